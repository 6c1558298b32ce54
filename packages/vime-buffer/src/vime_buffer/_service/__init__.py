"""BufferService over the store."""

from vime_buffer._service.core import Core
from vime_buffer._service.servicer import BufferServicer

__all__ = ["BufferServicer", "Core"]
