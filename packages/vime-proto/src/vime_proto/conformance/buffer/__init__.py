"""Conformance of BufferService. The server under test must have no prompt source of its own."""
