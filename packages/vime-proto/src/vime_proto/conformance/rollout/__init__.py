"""Conformance of RolloutService: an engine, or a router in front of engines."""
