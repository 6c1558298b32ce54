"""Keys of call metadata: what a router needs to know of a request without decoding it."""

# Groups the turns of a conversation (text).
SESSION = "vime-session"
# Generate or Score request id (text).
REQUEST_ID = "vime-request-id"
# Whose request it is, for fairness and accounting (text).
TENANT = "vime-tenant"
# Lower runs first (decimal integer).
PRIORITY = "vime-priority"
# Prompt tokens plus the most tokens that may be generated (decimal integer).
ESTIMATED_TOKENS = "vime-estimated-tokens"
# Lowest version that may answer, as "run_id/lineage:number".
MINIMUM_VERSION = "vime-minimum-version"
# Hashes of the leading blocks of prompt tokens, as comma-separated hexadecimal numbers, first block first.
PREFIX_HASHES = "vime-prefix-hashes"
# "Bearer <token>", where a server asks for one.
AUTHORIZATION = "authorization"

__all__ = [
    "AUTHORIZATION",
    "ESTIMATED_TOKENS",
    "MINIMUM_VERSION",
    "PREFIX_HASHES",
    "PRIORITY",
    "REQUEST_ID",
    "SESSION",
    "TENANT",
]
