"""In-memory fakes of the services with a conformance suite, which they pass too, and what else it takes to test a stage alone."""

from vime_proto.fakes import build
from vime_proto.fakes._certificate import certificate
from vime_proto.fakes._serve import serve
from vime_proto.fakes._toy_model import toy_weights
from vime_proto.fakes._weight_files import write_chunks
from vime_proto.fakes.buffer import FakeBuffer
from vime_proto.fakes.engine import FakeEngine
from vime_proto.fakes.router import FakeRouter

__all__ = ["FakeBuffer", "FakeEngine", "FakeRouter", "build", "certificate", "serve", "toy_weights", "write_chunks"]
