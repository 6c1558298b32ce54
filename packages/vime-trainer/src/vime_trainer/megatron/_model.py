"""Megatron's GPTModel over packed sequences, up to the hidden states that the output head takes."""

from __future__ import annotations

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from vime_trainer.megatron._layout import SequenceLayout

__all__ = ["PackedGPT"]


class PackedGPT(GPTModel):
    """GPTModel whose forward pass takes packed tokens and stops before the logits, which are never held whole."""

    def forward(self, tokens: Tensor, positions: Tensor, layout: SequenceLayout) -> Tensor:  # type: ignore[override]
        """The decoder's output after the final norm.

        Args:
            tokens, positions: int64 [tokens].
            layout: where the sequences of these tokens lie.

        Returns:
            [tokens, hidden].
        """
        hidden = self.embedding(input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0))
        rotary = self.rotary_pos_emb(layout.max_seqlen_q)[positions]
        hidden = self.decoder(
            hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=layout
        )
        return hidden.squeeze(1)
