"""Why a rollout failed."""

from __future__ import annotations

from vime_proto.sample.v1 import sample_pb2 as pb


class RolloutError(Exception):
    """Ends one rollout; its group goes on.

    Args:
        stage: "prompt", "generate", "environment", "teacher" or "reward".
        message: what happened, for a person.
        retryable: whether another attempt may succeed.
    """

    def __init__(self, stage: str, message: str, retryable: bool):
        super().__init__(f"{stage}: {message}")
        self.stage, self.message, self.retryable = stage, message, retryable

    def failure(self) -> pb.Failure:
        """As a message."""
        return pb.Failure(stage=self.stage, message=self.message, retryable=self.retryable)


class FatalError(Exception):
    """Ends the worker: the text is the one line that its user sees."""
