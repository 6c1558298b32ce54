"""Conformance of EngineControlService. Weight updates need --manifest-dir, unless the target is the fake engine."""
