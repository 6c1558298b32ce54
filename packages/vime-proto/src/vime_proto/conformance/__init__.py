"""Conformance suites: ``pytest --pyargs vime_proto.conformance.buffer --target host:port`` (also .rollout, .router, .engine_control).

They run against any implementation in any language. Each test takes a run id of its own.
"""
