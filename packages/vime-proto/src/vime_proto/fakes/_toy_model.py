"""A tiny language model in numpy: next-token logits from the last two tokens, and expert routes from each token.

Everything depends on its tensors alone, so a change of weights shows in tokens, log-probs and routes.
"""

from __future__ import annotations

import numpy as np

from vime_proto.common.v1 import common_pb2 as common
from vime_proto.update_state import Expected, digest_of
from vime_proto.weights.v1 import weights_pb2

VOCAB = 32
EXPERTS, TOP_K, MOE_LAYERS = 4, 2, (0, 1)
EOS = 1
MAX_MODEL_LEN = 256
_WIDTH = 8
_SHAPES = {
    "model.embed_tokens.weight": (VOCAB, _WIDTH),
    "model.layers.0.mlp.gate.weight": (EXPERTS, _WIDTH),
    "model.layers.1.mlp.gate.weight": (EXPERTS, _WIDTH),
    "model.norm.weight": (_WIDTH,),
    "lm_head.weight": (VOCAB, _WIDTH),
}
EXPECTED: Expected = {name: (common.DTYPE_FLOAT32, shape) for name, shape in _SHAPES.items()}
DIGEST = digest_of(EXPECTED)


def toy_weights(seed: int) -> dict[str, tuple[np.ndarray, int]]:
    """Random tensors of the toy model, with their Dtype, by name."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape).astype(np.float32), common.DTYPE_FLOAT32) for name, shape in _SHAPES.items()
    }


class ToyModel:
    """The model; tensors are written in place, piece by piece, as an engine would."""

    def __init__(self, seed: int = 0):
        self.tensors = {name: array for name, (array, _) in toy_weights(seed).items()}

    def load(self, manifest: weights_pb2.WeightManifest, source_id: str, offset: int, data: bytes) -> None:
        """Writes the pieces of a source that lie within [offset, offset + len(data)) of its stream."""
        for spec in manifest.tensors:
            for piece in spec.pieces:
                begin = piece.bytes.offset - offset
                if piece.source_id != source_id or begin < 0 or begin + piece.bytes.length > len(data):
                    continue
                shape = tuple(piece.shape) or tuple(spec.shape)
                place = tuple(slice(low, low + count) for low, count in zip(piece.start, piece.shape, strict=True))
                values = np.frombuffer(data[begin : begin + piece.bytes.length], "<f4").reshape(shape)
                self.tensors[spec.name][place] = values

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits of the next token after each prefix, float64 [n, VOCAB]."""
        embedding = self.tensors["model.embed_tokens.weight"].astype(np.float64)
        last = embedding[tokens]
        before = np.vstack([np.zeros((1, _WIDTH)), last[:-1]])
        hidden = np.tanh(last + 0.5 * before) * self.tensors["model.norm.weight"]
        return hidden @ self.tensors["lm_head.weight"].T.astype(np.float64)

    def routes(self, tokens: np.ndarray) -> np.ndarray:
        """Expert ids of each token, uint8 [n, layers, TOP_K], most likely first."""
        hidden = self.tensors["model.embed_tokens.weight"][tokens]
        scores = [hidden @ self.tensors[f"model.layers.{layer}.mlp.gate.weight"].T for layer in MOE_LAYERS]
        return np.argsort(-np.stack(scores, axis=1), axis=-1, kind="stable")[..., :TOP_K].astype(np.uint8)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities over the last dimension."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
