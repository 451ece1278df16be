"""The tables of the SQL stores, whose constraints make wrong states impossible to write.

Driven by the verbs beside it; decides nothing. Times are integers (ns), ids text, token ids and logprobs little-endian
int32 and float32 arrays, everything nested is JSON text. What the constraints promise:

- a (run, group, replica) is one rollout; a rollout has at most one running attempt, and a place in the order of finished
  rollouts if and only if it is in a final state;
- calls, spans and rewards belong to attempts that exist; a call's parent is recorded before it;
- a rollout is consumed at most once, by a step of its own run, and never if it is an evaluation rollout;
- a step that is not abandoned is the only one of its number.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    literal_column,
)

SCHEMA_VERSION = 4
"""The last of migrations/versions, which make one version the next; a change here is a new file there."""

RUNNING: ColumnElement[str] = literal_column("'running'")
"""A literal, not a parameter: only so can a planner prove that a partial index applies."""

metadata = MetaData()

_Serial = BigInteger().with_variant(Integer, "sqlite")  # only INTEGER is a rowid there
_Text = Text().with_variant(Text(collation="C"), "postgresql")  # ids sort by time only where bytes decide
_Int = Integer().with_variant(BigInteger(), "postgresql")  # SQLite's INTEGER has 64 bits


def _one_of(column: str, *values: str) -> CheckConstraint:
    allowed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({allowed})", name=f"{column}_is_known")


def _run() -> Column[str]:
    return Column("run_id", _Text, ForeignKey("runs.id"), nullable=False)


def _attempt() -> list[Column[str] | Column[int] | ForeignKeyConstraint]:
    """What belongs to an attempt names its run too, without a key: deleting a run would look for it in every call."""
    return [
        Column("run_id", _Text, nullable=False),
        Column("rollout_id", _Text, nullable=False),
        Column("attempt", _Int, nullable=False),
        ForeignKeyConstraint(["rollout_id", "attempt"], ["attempts.rollout_id", "attempts.attempt"]),
    ]


meta = Table(
    "meta",
    metadata,
    Column("key", _Text, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)

writers = Table(
    "writers",
    metadata,
    Column("id", _Text, primary_key=True),
    Column("last", BigInteger, nullable=False),  # number of its last transaction, written by that transaction
    Column("seen_ns", BigInteger, nullable=False),
)
"""One row a process that writes: after a lost connection it tells whether the last commit took place."""

runs = Table(
    "runs",
    metadata,
    Column("id", _Text, primary_key=True),
    Column("name", _Text, nullable=False),
    Column("state", _Text, nullable=False),
    Column("config", _Text, nullable=False),
    Column("created_ns", BigInteger, nullable=False),
    Column("updated_ns", BigInteger, nullable=False),
    Column("summary", _Text, nullable=False),
    Column("finished", BigInteger, nullable=False, server_default="0"),  # the last finished_seq given
    _one_of("state", "running", "finished", "interrupted", "failed"),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("id", _Text, primary_key=True),
    _run(),
    Column("task", _Text, nullable=False),
    Column("group_id", _Text, nullable=False),
    Column("replica", _Int, nullable=False),
    Column("mode", _Text, nullable=False),
    Column("step", _Int, nullable=False),
    Column("sampling", _Text, nullable=False),
    Column("retry", _Text, nullable=False),
    Column("priority", _Int, nullable=False),
    Column("state", _Text, nullable=False),
    Column("attempt", _Int, nullable=False),
    Column("lost", _Int, nullable=False),
    Column("created_ns", BigInteger, nullable=False),
    Column("started_ns", BigInteger),
    Column("finished_ns", BigInteger),
    Column("finished_seq", BigInteger),
    Column("reward", Double),
    Column("calls", _Int, nullable=False, server_default="0"),
    Column("error", _Text),
    Column("warning", _Text),
    UniqueConstraint("run_id", "group_id", "replica"),
    UniqueConstraint("run_id", "finished_seq"),
    UniqueConstraint("id", "run_id", "mode"),  # what consumption refers to
    _one_of("mode", "train", "eval"),
    _one_of("state", "queued", "running", "succeeded", "failed", "cancelled"),
    CheckConstraint(
        "(finished_seq IS NOT NULL) = (state IN ('succeeded', 'failed', 'cancelled'))", name="finished_has_its_place"
    ),
)
Index(
    "rollouts_by_state", rollouts.c.run_id, rollouts.c.state, rollouts.c.priority.desc(), rollouts.c.id, rollouts.c.mode
)

attempts = Table(
    "attempts",
    metadata,
    Column("rollout_id", _Text, ForeignKey("rollouts.id"), nullable=False),
    Column("attempt", _Int, nullable=False),
    Column("state", _Text, nullable=False),
    Column("worker_id", _Text, nullable=False),
    Column("token", _Text, nullable=False),
    Column("lease_expires_ns", BigInteger, nullable=False),
    Column("started_ns", BigInteger, nullable=False),
    Column("finished_ns", BigInteger),
    Column("error", _Text),
    Column("output", _Text),
    PrimaryKeyConstraint("rollout_id", "attempt"),
    _one_of("state", "running", "succeeded", "failed", "timed_out", "lost"),
    sqlite_with_rowid=False,
)
Index(
    "attempts_one_running",
    attempts.c.rollout_id,
    unique=True,
    sqlite_where=attempts.c.state == RUNNING,
    postgresql_where=attempts.c.state == RUNNING,
)
Index(
    "attempts_by_lease",
    attempts.c.lease_expires_ns,
    sqlite_where=attempts.c.state == RUNNING,
    postgresql_where=attempts.c.state == RUNNING,
)

workers = Table(
    "workers",
    metadata,
    Column("id", _Text, nullable=False),
    _run(),
    Column("host", _Text, nullable=False),
    Column("pid", _Int, nullable=False),
    Column("running", _Int, nullable=False),
    Column("seen_ns", BigInteger, nullable=False),
    PrimaryKeyConstraint("run_id", "id"),
)

calls = Table(
    "calls",
    metadata,
    Column("id", _Text, primary_key=True),
    *_attempt(),
    Column("parent_id", _Text, ForeignKey("calls.id")),
    Column("suffix_ids", LargeBinary, nullable=False),
    Column("sampled_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("versions", _Text, nullable=False),
    Column("prompt_tokens", _Int, nullable=False),
    Column("policy", _Text, nullable=False),
    Column("model", _Text, nullable=False),
    Column("protocol", _Text, nullable=False),
    Column("sampling", _Text, nullable=False),
    Column("history_hash", _Text, nullable=False),
    Column("request_hash", _Text, nullable=False),
    Column("messages", _Text, nullable=False),
    Column("answer", _Text, nullable=False),
    Column("tools", _Text),
    Column("fork_cause", _Text),
    Column("context_only", _Int, nullable=False, server_default="0"),
    Column("asked", _Text, nullable=False, server_default="{}"),
    Column("usage", _Text, nullable=False, server_default="{}"),
    Column("agent", _Text),
    Column("finish_reason", _Text, nullable=False),
    Column("started_ns", BigInteger, nullable=False),
    Column("finished_ns", BigInteger, nullable=False),
    Column("span_id", _Text),
    CheckConstraint("length(logprobs) = length(sampled_ids)", name="one_logprob_a_sampled_token"),
)
Index("calls_by_attempt", calls.c.rollout_id, calls.c.attempt)
_HAS_PARENT = calls.c.parent_id.is_not(None)
Index("calls_by_parent", calls.c.parent_id, sqlite_where=_HAS_PARENT, postgresql_where=_HAS_PARENT)  # to delete calls

spans = Table(
    "spans",
    metadata,
    Column("id", _Text, primary_key=True),
    *_attempt(),
    Column("name", _Text, nullable=False),
    Column("parent_id", _Text),
    Column("attributes", _Text, nullable=False),
    Column("started_ns", BigInteger, nullable=False),
    Column("finished_ns", BigInteger, nullable=False),
    Column("trace_id", _Text),
    Column("kind", _Text, nullable=False, server_default="internal"),
    Column("status", _Text, nullable=False, server_default="unset"),
    Column("status_message", _Text, nullable=False, server_default=""),
    Column("events", _Text, nullable=False, server_default="[]"),
)
Index("spans_by_rollout", spans.c.rollout_id, spans.c.started_ns)
BROKEN: ColumnElement[bool] = spans.c.name == literal_column("'gateway.broken_spans'")
Index("spans_broken", spans.c.rollout_id, sqlite_where=BROKEN, postgresql_where=BROKEN)

rewards = Table(
    "rewards",
    metadata,
    Column("seq", _Serial, primary_key=True, autoincrement=True),
    Column("id", _Text, nullable=False, unique=True),
    *_attempt(),
    Column("value", Double, nullable=False),  # SQLite keeps NaN as NULL, so this refuses it
    Column("name", _Text, nullable=False),
    Column("call_id", _Text, ForeignKey("calls.id")),
    Column("source", _Text, nullable=False),
    Column("created_ns", BigInteger, nullable=False),
    _one_of("source", "return", "function", "output", "emitted", "posted", "air", "rescored"),
)
Index("rewards_by_rollout", rewards.c.rollout_id, rewards.c.attempt)
_OF_CALL = rewards.c.call_id.is_not(None)
Index("rewards_by_call", rewards.c.call_id, sqlite_where=_OF_CALL, postgresql_where=_OF_CALL)  # to delete calls

resource_versions = Table(
    "resource_versions",
    metadata,
    _run(),
    Column("name", _Text, nullable=False),
    Column("last", BigInteger, nullable=False),  # only ever counts up, so that no version is used twice
    PrimaryKeyConstraint("run_id", "name"),
)

resources = Table(
    "resources",
    metadata,
    _run(),
    Column("name", _Text, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("kind", _Text, nullable=False),
    Column("value", _Text, nullable=False),
    Column("parent", BigInteger),
    Column("step", _Int, nullable=False),
    Column("created_ns", BigInteger, nullable=False),
    PrimaryKeyConstraint("run_id", "name", "version"),
    ForeignKeyConstraint(["run_id", "name"], ["resource_versions.run_id", "resource_versions.name"]),
)

metrics = Table(
    "metrics",
    metadata,
    Column("seq", _Serial, primary_key=True, autoincrement=True),
    _run(),
    Column("step", _Int, nullable=False),
    Column("name", _Text, nullable=False),
    Column("value", Double),  # NULL where it was not a finite number
    Column("created_ns", BigInteger, nullable=False),
    Column("abandoned", Boolean, nullable=False),
    sqlite_autoincrement=True,  # who follows metrics relies on a seq that is never used twice
)
Index("metrics_by_name", metrics.c.run_id, metrics.c.step, metrics.c.name)
Index("metrics_by_seq", metrics.c.run_id, metrics.c.seq)

steps = Table(
    "steps",
    metadata,
    Column("id", _Serial, primary_key=True, autoincrement=True),
    _run(),
    Column("step", _Int, nullable=False),
    Column("state", _Text, nullable=False),
    Column("version", BigInteger),
    Column("created_ns", BigInteger, nullable=False),
    UniqueConstraint("id", "run_id"),
    _one_of("state", "open", "closed", "abandoned"),
    CheckConstraint("state <> 'closed' OR version IS NOT NULL", name="closed_has_a_version"),
)
_SURVIVES = steps.c.state != literal_column("'abandoned'")
Index(
    "steps_one_a_number",
    steps.c.run_id,
    steps.c.step,
    unique=True,
    sqlite_where=_SURVIVES,
    postgresql_where=_SURVIVES,
)

consumption = Table(
    "consumption",
    metadata,
    Column("rollout_id", _Text, primary_key=True),
    Column("run_id", _Text, nullable=False),
    Column("mode", _Text, nullable=False, server_default="train"),
    Column("step_id", _Serial, nullable=False),
    Column("position", _Int, nullable=False),
    Column("outcome", _Text, nullable=False),
    ForeignKeyConstraint(["rollout_id", "run_id", "mode"], ["rollouts.id", "rollouts.run_id", "rollouts.mode"]),
    ForeignKeyConstraint(["step_id", "run_id"], ["steps.id", "steps.run_id"]),
    UniqueConstraint("step_id", "position"),
    CheckConstraint("mode = 'train'", name="evaluation_is_never_consumed"),
    _one_of("outcome", "trained", "zero_variance", "stale", "surplus", "invalid"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    _run(),
    Column("step", _Int, nullable=False),
    Column("path", _Text, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("created_ns", BigInteger, nullable=False),
    PrimaryKeyConstraint("run_id", "step"),
)
