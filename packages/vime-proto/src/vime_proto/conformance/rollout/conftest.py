"""The client that the rollout tests share."""

from __future__ import annotations

import pytest

from vime_proto.conformance._rollout_client import RolloutClient


@pytest.fixture(scope="session")
def engine(target) -> RolloutClient:
    """A client of the server under test."""
    return RolloutClient(target)
