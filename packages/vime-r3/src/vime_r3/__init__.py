"""Rollout routing replay (R3, arXiv:2510.11370): which experts the engine chose, carried to the trainer and used there.

``vime_r3.trace`` encodes and decodes ``vime.routing.v1.RoutingTrace``; ``vime_r3.capture`` takes an engine's arrays;
``vime_r3.layout`` places rows as a trainer places its tokens; ``vime_r3.agreement`` counts where two routings differ.
They need numpy alone. ``vime_r3.megatron`` replays routes in a Megatron-core model and needs megatron-core and torch.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
