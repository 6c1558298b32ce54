"""Tables. Portable: no type or constraint that PostgreSQL and SQLite do not share."""

from __future__ import annotations

import enum

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, LargeBinary, MetaData, String, Table, Text

# Raised when a table changes; a database of another number is refused instead of misread.
SCHEMA_VERSION = 1

metadata = MetaData()


class PromptState(enum.IntEnum):
    """Where a prompt is. Every prompt is in exactly one state, so nothing is lost and nothing counted twice."""

    # The message-format hook raised on its row; to be tried again.
    UNFORMATTED = 0
    PENDING = 1
    LEASED = 2
    # Its group waits for a batch.
    READY = 3
    # Its group is in a batch that is formed or on loan.
    BATCHED = 4
    # Its group is in an acked batch.
    TRAINED = 5
    FILTERED = 6
    DROPPED = 7
    # Its group counts for an evaluation.
    EVALUATED = 8


class BatchState(enum.IntEnum):
    FORMED = 0
    LEASED = 1
    ACKED = 2


class Purpose(enum.IntEnum):
    """What a prompt is for; evaluation first."""

    EVALUATE = 0
    TRAIN = 1


class LeaseKind(enum.IntEnum):
    PROMPT = 0
    BATCH = 1


def _key(name: str) -> Column:
    return Column(name, String(255), primary_key=True)


schema_info = Table("schema_info", metadata, Column("version", Integer, primary_key=True))
# One row: the name under which this database's payload files lie, so that databases may share a blob root.
identity = Table("identity", metadata, Column("name", String(32), primary_key=True))
# One row: what the blob root must say for this database to be its owner (see _claim.py); ``next`` while that changes.
blob_claim = Table(
    "blob_claim",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("token", String(32), nullable=False),
    Column("next", String(32), nullable=False),
)

runs = Table(
    "runs",
    metadata,
    _key("run_id"),
    Column("batch_groups", Integer, nullable=False),
    Column("group_size", Integer, nullable=False),
    Column("max_staleness", Integer, nullable=False),
    # Text: an unsigned 64-bit number does not fit SQL's integers. NULL keeps the order of the file.
    Column("seed", String(20)),
    Column("publish_interval", Integer, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("epochs", BigInteger),
    Column("lineage", BigInteger, nullable=False),
    Column("trained", BigInteger, nullable=False, default=0),
    # Number published in the present lineage; NULL before the first.
    Column("version", BigInteger),
    # A new lineage was opened and its rewind has not come yet.
    Column("rewind_due", Boolean, nullable=False, default=False),
    Column("closed", Boolean, nullable=False, default=False),
    Column("closed_reason", Text, nullable=False, default=""),
    Column("source_position", BigInteger, nullable=False, default=0),
    Column("source_digest", String(64), nullable=False, default=""),
    Column("next_seq", BigInteger, nullable=False, default=0),
    Column("next_ready", BigInteger, nullable=False, default=0),
    Column("next_batch", BigInteger, nullable=False, default=0),
    Column("checkpoint", BigInteger),
    # Batches below it are collected.
    Column("collected", BigInteger, nullable=False, default=0),
)

lineages = Table(
    "lineages",
    metadata,
    _key("run_id"),
    Column("ordinal", BigInteger, primary_key=True, autoincrement=False),
    Column("parent", BigInteger),
    Column("forked_at", BigInteger),
)

prompts = Table(
    "prompts",
    metadata,
    _key("run_id"),
    _key("prompt_id"),
    Column("seq", BigInteger, nullable=False),
    Column("purpose", Integer, nullable=False),
    Column("state", Integer, nullable=False),
    Column("evaluation_id", String(255), nullable=False, default=""),
    Column("attempts", Integer, nullable=False, default=0),
    Column("failures", Integer, nullable=False, default=0),
    # Rollouts wanted, as far as the prompt states it; 0 takes the run's group size.
    Column("group_size", Integer, nullable=False, default=0),
    # Serialised Prompt; NULL once the prompt is collected.
    Column("payload", LargeBinary),
    Column("digest", LargeBinary, nullable=False),
    Column("reason", Text, nullable=False, default=""),
    # Versions of the group that was filtered, for a rewind.
    Column("versions", Text, nullable=False, default=""),
    # Serialised PromptLease that holds only partial rollouts.
    Column("partial", LargeBinary),
    Index("prompts_queue", "run_id", "purpose", "state", "seq"),
    Index("prompts_evaluation", "run_id", "evaluation_id", "state"),
)

groups = Table(
    "groups",
    metadata,
    _key("run_id"),
    _key("group_id"),
    Column("seq", BigInteger, nullable=False),
    Column("ready", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    # Serialised GroupIndex.
    Column("content", LargeBinary, nullable=False),
    Column("oldest", BigInteger),
    Column("versions", Text, nullable=False),
    # Empty while it waits.
    Column("batch_id", String(255), nullable=False, default=""),
    Index("groups_queue", "run_id", "batch_id", "ready"),
)

samples = Table(
    "samples",
    metadata,
    _key("run_id"),
    _key("sample_id"),
    Column("group_id", String(255), nullable=False),
    # Serialised Sample without the payload of its routing trace: in the row, or in a blob.
    Column("body", LargeBinary),
    Column("body_blob", String(255), nullable=False, default=""),
    # Payload of the routing trace: in the row, in a blob, or at a URI.
    Column("trace", LargeBinary),
    Column("trace_blob", String(255), nullable=False, default=""),
    Column("trace_uri", Text, nullable=False, default=""),
    Column("size", BigInteger, nullable=False),
    Index("samples_group", "run_id", "group_id"),
)

blobs = Table(
    "blobs",
    metadata,
    _key("run_id"),
    _key("blob_id"),
    # Name below the blob root.
    Column("path", Text, nullable=False),
    Column("length", BigInteger, nullable=False),
    # Sample that owns it; empty until a commit names it.
    Column("owner", String(255), nullable=False, default=""),
    Column("created_at", Float, nullable=False),
    Index("blobs_owner", "run_id", "owner"),
)

batches = Table(
    "batches",
    metadata,
    _key("run_id"),
    _key("batch_id"),
    Column("sequence", BigInteger, nullable=False),
    Column("state", Integer, nullable=False),
    # Acked batches before it; set when it is acked.
    Column("ordinal", BigInteger),
    Index("batches_state", "run_id", "state", "sequence"),
)

leases = Table(
    "leases",
    metadata,
    _key("lease_id"),
    Column("run_id", String(255), nullable=False),
    Column("kind", Integer, nullable=False),
    Column("holder", String(255), nullable=False),
    Column("incarnation", String(255), nullable=False),
    # Prompt or batch.
    Column("target", String(255), nullable=False),
    Column("purpose", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    # Published number when it was granted.
    Column("granted_at", BigInteger),
    Column("expires_at", Float, nullable=False),
    # Empty while it is open.
    Column("ended", String(32), nullable=False, default=""),
    Index("leases_open", "run_id", "ended", "kind", "expires_at"),
    Index("leases_target", "run_id", "target"),
)

holders = Table(
    "holders",
    metadata,
    _key("run_id"),
    Column("kind", Integer, primary_key=True, autoincrement=False),
    _key("holder"),
    _key("incarnation"),
    Column("retired", Boolean, nullable=False),
)

requests = Table(
    "requests",
    metadata,
    _key("run_id"),
    _key("method"),
    _key("request_id"),
    Column("digest", LargeBinary, nullable=False),
    Column("response", LargeBinary, nullable=False),
    Column("created_at", Float, nullable=False),
    Index("requests_age", "created_at"),
)

counters = Table(
    "counters",
    metadata,
    _key("run_id"),
    _key("name"),
    _key("label"),
    Column("value", BigInteger, nullable=False),
)

evaluations = Table(
    "evaluations",
    metadata,
    _key("run_id"),
    _key("evaluation_id"),
    Column("set_name", String(255), nullable=False),
    Column("version", LargeBinary, nullable=False),
    Column("sampling", LargeBinary, nullable=False),
    Column("k", Integer, nullable=False),
    Column("prompts", Integer, nullable=False),
    Column("deadline_at", Float, nullable=False),
    Column("done", Boolean, nullable=False, default=False),
    Index("evaluations_open", "run_id", "done"),
)

evaluation_results = Table(
    "evaluation_results",
    metadata,
    _key("run_id"),
    _key("evaluation_id"),
    _key("prompt_id"),
    # JSON list, one object per rollout.
    Column("rollouts", Text, nullable=False),
)
