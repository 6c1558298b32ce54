"""Replays routes in a Megatron-core model. Needs megatron-core and torch: ``pip install 'vime-r3[megatron]'``."""

from vime_r3.megatron._pass import ReplayError, Usage
from vime_r3.megatron._replay import Replay, attach

__all__ = ["Replay", "ReplayError", "Usage", "attach"]
