"""Megatron-core trainer. Nothing heavy is imported here: `import vime_trainer` loads neither torch nor Megatron."""

__version__ = "0.1.0"

__all__ = ["__version__"]
