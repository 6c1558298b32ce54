"""Router in front of inference engines: one address that behaves like an engine, and a fleet behind it."""

from vime_router.policies import Candidate, Policy, make_policy, policy_names
from vime_router.server import serve
from vime_router.settings import RouterSettings

__version__ = "0.1.0"
__all__ = ["Candidate", "Policy", "RouterSettings", "__version__", "make_policy", "policy_names", "serve"]
