"""Rollout stage of vime: ``vime-rollout engine`` serves a model, ``vime-rollout worker`` turns prompts into groups.

The two halves share nothing but the contracts: importing one never imports the other, nor torch or vLLM.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
