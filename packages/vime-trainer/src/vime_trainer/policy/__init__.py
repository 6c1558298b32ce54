"""The model that is trained, seen through packed batches and Hugging Face names."""

from vime_trainer.policy._logprobs import token_logprobs
from vime_trainer.policy._policy import DTYPES, Policy

__all__ = ["DTYPES", "Policy", "token_logprobs"]
