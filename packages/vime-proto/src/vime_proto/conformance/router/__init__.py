"""Conformance of RouterService. The router under test must start without engines; it must reach this process at loopback,
where the suite serves fake engines. Its passing of requests is tested by the rollout suite too.
"""
