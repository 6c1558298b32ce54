"""Megatron's GPTModel over packed sequences, up to the hidden states that the output head takes."""

from __future__ import annotations

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from vime_trainer.fused import switches
from vime_trainer.megatron._layout import SequenceLayout
from vime_trainer.megatron._rotary import turns_of

__all__ = ["PackedGPT"]


class PackedGPT(GPTModel):
    """GPTModel whose forward pass takes packed tokens and stops before the logits, which are never held whole."""

    def forward(self, tokens: Tensor, positions: Tensor, layout: SequenceLayout) -> Tensor:  # type: ignore[override]
        """One pipeline chunk.

        Args:
            tokens, positions: int64 [tokens], those of this context-parallel rank. Chunks after the first take their
                input from `set_input_tensor` instead of `tokens`.
            layout: where the sequences of these tokens lie.

        Returns:
            [tokens, 1, hidden], after the final norm in the last chunk; under sequence parallelism this rank's tokens.
        """
        hidden = None
        if self.pre_process:
            hidden = self.embedding(input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0))
        # Megatron would cut the table for context parallelism; it is looked up by position instead.
        rotary = self.rotary_pos_emb(layout.longest, packed_seq=True)[positions]
        if switches.rope:
            # The core attention turns queries and keys, once for all layers' sines and cosines.
            layout.turns, rotary = turns_of(rotary, self.config.params_dtype), None
        return self.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=layout)
