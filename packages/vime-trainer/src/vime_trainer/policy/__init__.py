"""The model that is trained, seen through packed batches and Hugging Face names."""

from vime_trainer.policy._logprobs import token_logprobs
from vime_trainer.policy._policy import Policy
from vime_trainer.policy._transformer import DTYPES, Transformer

__all__ = ["DTYPES", "Policy", "Transformer", "token_logprobs"]
