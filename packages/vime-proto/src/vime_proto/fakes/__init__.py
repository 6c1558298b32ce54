"""In-memory fakes of the services that have a conformance suite; they pass it too, so that each stage is tested alone."""

from vime_proto.fakes import build
from vime_proto.fakes._serve import serve
from vime_proto.fakes.buffer import FakeBuffer

__all__ = ["FakeBuffer", "build", "serve"]
