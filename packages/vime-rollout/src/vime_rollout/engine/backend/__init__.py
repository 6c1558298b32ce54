"""The only modules that import vLLM: start, generation, pause, weight updates. Differences of its versions end here."""

from vime_rollout.engine.backend._backend import Backend

__all__ = ["Backend"]
