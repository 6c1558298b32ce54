"""Conformance suites: ``pytest --pyargs vime_proto.conformance.buffer --target host:port``.

Also .rollout (an engine, or a router in front of engines), .router and .engine_control.

They run against any implementation in any language. Each test takes a run id of its own.
"""
