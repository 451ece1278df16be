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

SCHEMA_VERSION = 2

UPGRADES = {
    1: (
        "ALTER TABLE calls ADD COLUMN context_only INTEGER DEFAULT '0' NOT NULL",
        "ALTER TABLE calls ADD COLUMN asked TEXT DEFAULT '{}' NOT NULL",
        "ALTER TABLE calls ADD COLUMN usage TEXT DEFAULT '{}' NOT NULL",
    ),
}
"""What makes a schema of each older version one of the next."""

RUNNING: ColumnElement[str] = literal_column("'running'")
"""A literal, not a parameter: only so can a planner prove that a partial index applies."""

metadata = MetaData()

_Serial = BigInteger().with_variant(Integer, "sqlite")  # only INTEGER is a rowid there


def _one_of(column: str, *values: str) -> CheckConstraint:
    allowed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({allowed})", name=f"{column}_is_known")


def _run() -> Column[str]:
    return Column("run_id", Text, ForeignKey("runs.id"), nullable=False)


def _attempt() -> list[Column[str] | Column[int] | ForeignKeyConstraint]:
    return [
        Column("rollout_id", Text, nullable=False),
        Column("attempt", Integer, nullable=False),
        ForeignKeyConstraint(["rollout_id", "attempt"], ["attempts.rollout_id", "attempts.attempt"]),
    ]


meta = Table(
    "meta",
    metadata,
    Column("key", Text, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)

runs = Table(
    "runs",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("config", Text, nullable=False),
    Column("created_ns", BigInteger, nullable=False),
    Column("updated_ns", BigInteger, nullable=False),
    Column("summary", Text, nullable=False),
    Column("finished", BigInteger, nullable=False, server_default="0"),  # the last finished_seq given
    _one_of("state", "running", "finished", "interrupted", "failed"),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("id", Text, primary_key=True),
    _run(),
    Column("task", Text, nullable=False),
    Column("group_id", Text, nullable=False),
    Column("replica", Integer, nullable=False),
    Column("mode", Text, nullable=False),
    Column("step", Integer, nullable=False),
    Column("sampling", Text, nullable=False),
    Column("retry", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("lost", Integer, nullable=False),
    Column("created_ns", BigInteger, nullable=False),
    Column("started_ns", BigInteger),
    Column("finished_ns", BigInteger),
    Column("finished_seq", BigInteger),
    Column("reward", Double),
    Column("calls", Integer, nullable=False, server_default="0"),
    Column("error", Text),
    Column("warning", Text),
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
    Column("rollout_id", Text, ForeignKey("rollouts.id"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("worker_id", Text, nullable=False),
    Column("token", Text, nullable=False),
    Column("lease_expires_ns", BigInteger, nullable=False),
    Column("started_ns", BigInteger, nullable=False),
    Column("finished_ns", BigInteger),
    Column("error", Text),
    Column("output", Text),
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
    Column("id", Text, nullable=False),
    _run(),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("running", Integer, nullable=False),
    Column("seen_ns", BigInteger, nullable=False),
    PrimaryKeyConstraint("run_id", "id"),
)

calls = Table(
    "calls",
    metadata,
    Column("id", Text, primary_key=True),
    _run(),
    *_attempt(),
    Column("parent_id", Text, ForeignKey("calls.id")),
    Column("suffix_ids", LargeBinary, nullable=False),
    Column("sampled_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("versions", Text, nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("policy", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("protocol", Text, nullable=False),
    Column("sampling", Text, nullable=False),
    Column("history_hash", Text, nullable=False),
    Column("request_hash", Text, nullable=False),
    Column("messages", Text, nullable=False),
    Column("answer", Text, nullable=False),
    Column("tools", Text),
    Column("fork_cause", Text),
    Column("context_only", Integer, nullable=False, server_default="0"),
    Column("asked", Text, nullable=False, server_default="{}"),
    Column("usage", Text, nullable=False, server_default="{}"),
    Column("agent", Text),
    Column("finish_reason", Text, nullable=False),
    Column("started_ns", BigInteger, nullable=False),
    Column("finished_ns", BigInteger, nullable=False),
    CheckConstraint("length(logprobs) = length(sampled_ids)", name="one_logprob_a_sampled_token"),
)
Index("calls_by_attempt", calls.c.rollout_id, calls.c.attempt)

spans = Table(
    "spans",
    metadata,
    Column("id", Text, primary_key=True),
    _run(),
    *_attempt(),
    Column("name", Text, nullable=False),
    Column("parent_id", Text),
    Column("attributes", Text, nullable=False),
    Column("started_ns", BigInteger, nullable=False),
    Column("finished_ns", BigInteger, nullable=False),
)
Index("spans_by_rollout", spans.c.rollout_id, spans.c.started_ns)

rewards = Table(
    "rewards",
    metadata,
    Column("seq", _Serial, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    _run(),
    *_attempt(),
    Column("value", Double, nullable=False),  # SQLite keeps NaN as NULL, so this refuses it
    Column("name", Text, nullable=False),
    Column("call_id", Text, ForeignKey("calls.id")),
    Column("source", Text, nullable=False),
    Column("created_ns", BigInteger, nullable=False),
    _one_of("source", "return", "function", "output", "emitted", "posted"),
)
Index("rewards_by_rollout", rewards.c.rollout_id, rewards.c.attempt)

resource_versions = Table(
    "resource_versions",
    metadata,
    _run(),
    Column("name", Text, nullable=False),
    Column("last", BigInteger, nullable=False),  # only ever counts up, so that no version is used twice
    PrimaryKeyConstraint("run_id", "name"),
)

resources = Table(
    "resources",
    metadata,
    _run(),
    Column("name", Text, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("value", Text, nullable=False),
    Column("parent", BigInteger),
    Column("step", Integer, nullable=False),
    Column("created_ns", BigInteger, nullable=False),
    PrimaryKeyConstraint("run_id", "name", "version"),
    ForeignKeyConstraint(["run_id", "name"], ["resource_versions.run_id", "resource_versions.name"]),
)

metrics = Table(
    "metrics",
    metadata,
    Column("seq", _Serial, primary_key=True, autoincrement=True),
    _run(),
    Column("step", Integer, nullable=False),
    Column("name", Text, nullable=False),
    Column("value", Double),  # NULL where it was not a finite number
    Column("created_ns", BigInteger, nullable=False),
    Column("abandoned", Boolean, nullable=False),
)
Index("metrics_by_name", metrics.c.run_id, metrics.c.step, metrics.c.name)

steps = Table(
    "steps",
    metadata,
    Column("id", _Serial, primary_key=True, autoincrement=True),
    _run(),
    Column("step", Integer, nullable=False),
    Column("state", Text, nullable=False),
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
    Column("rollout_id", Text, primary_key=True),
    Column("run_id", Text, nullable=False),
    Column("mode", Text, nullable=False, server_default="train"),
    Column("step_id", _Serial, nullable=False),
    Column("position", Integer, nullable=False),
    Column("outcome", Text, nullable=False),
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
    Column("step", Integer, nullable=False),
    Column("path", Text, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("created_ns", BigInteger, nullable=False),
    PrimaryKeyConstraint("run_id", "step"),
)
