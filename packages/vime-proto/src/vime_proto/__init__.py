"""The contracts of vime: protobuf messages, gRPC services and the helpers that every side of them needs.

The generated code of an area is imported as ``vime_proto.<area>.v1.<area>_pb2``; this package has no dependency on
torch, vllm, megatron or ray.
"""

__version__ = "0.1.0"
CONTRACT_MINIMUM = "1.0"
CONTRACT_MAXIMUM = "1.0"

__all__ = ["CONTRACT_MAXIMUM", "CONTRACT_MINIMUM", "__version__"]
