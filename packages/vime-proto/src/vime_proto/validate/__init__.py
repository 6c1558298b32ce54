"""One validator per message that crosses a boundary. Each raises ContractError that names the field and the id.

Per-token data is checked with numpy: no Python loop over tokens.
"""

from vime_proto.validate._buffer import (
    validate_batch_end,
    validate_commit_group,
    validate_fetch_samples,
    validate_lease_batch,
    validate_lease_prompts,
    validate_lineage,
    validate_open_run,
    validate_publish_version,
    validate_put_prompts,
    validate_release_lease,
    validate_renew_leases,
    validate_report_checkpoint,
    validate_rewind,
    validate_start_evaluation,
)
from vime_proto.validate._rollout import (
    check_streams,
    validate_generate_request,
    validate_generate_response,
    validate_in_flight,
    validate_score_request,
    validate_score_response,
)
from vime_proto.validate._router import validate_engine_change, validate_minimum_version, validate_register_engine
from vime_proto.validate._routing import validate_trace, validate_trace_header
from vime_proto.validate._sample import (
    validate_group,
    validate_prompt,
    validate_ragged,
    validate_rollout,
    validate_sample,
    validate_top_logprobs,
)
from vime_proto.validate._sampling import truncates, validate_sampling
from vime_proto.validate._weights import dtype_name, model_digest, validate_manifest, validate_transport

__all__ = [
    "check_streams",
    "dtype_name",
    "model_digest",
    "truncates",
    "validate_batch_end",
    "validate_commit_group",
    "validate_engine_change",
    "validate_fetch_samples",
    "validate_generate_request",
    "validate_generate_response",
    "validate_group",
    "validate_in_flight",
    "validate_lease_batch",
    "validate_lease_prompts",
    "validate_lineage",
    "validate_manifest",
    "validate_minimum_version",
    "validate_open_run",
    "validate_prompt",
    "validate_publish_version",
    "validate_put_prompts",
    "validate_ragged",
    "validate_register_engine",
    "validate_release_lease",
    "validate_renew_leases",
    "validate_report_checkpoint",
    "validate_rewind",
    "validate_rollout",
    "validate_sample",
    "validate_sampling",
    "validate_score_request",
    "validate_score_response",
    "validate_start_evaluation",
    "validate_top_logprobs",
    "validate_trace",
    "validate_trace_header",
    "validate_transport",
]
