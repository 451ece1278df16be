"""The schema with which agentlightning 0.1 began: runs, rollouts, their record, steps and checkpoints."""

from __future__ import annotations

from typing import Any

from alembic import op
from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    Text,
    UniqueConstraint,
    text,
)

revision = "0001"
down_revision = None

_Serial = BigInteger().with_variant(Integer, "sqlite")
_Text = Text().with_variant(Text(collation="C"), "postgresql")
_Int = Integer().with_variant(BigInteger(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "meta",
        Column("key", _Text, primary_key=True),
        Column("value", LargeBinary, nullable=False),
    )
    op.create_table(
        "runs",
        Column("id", _Text, primary_key=True),
        Column("name", _Text, nullable=False),
        Column("state", _Text, nullable=False),
        Column("config", _Text, nullable=False),
        Column("created_ns", BigInteger, nullable=False),
        Column("updated_ns", BigInteger, nullable=False),
        Column("summary", _Text, nullable=False),
        Column("finished", BigInteger, nullable=False, server_default="0"),
        _one_of("state", "running", "finished", "interrupted", "failed"),
    )
    op.create_table(
        "rollouts",
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
        UniqueConstraint("id", "run_id", "mode"),
        _one_of("mode", "train", "eval"),
        _one_of("state", "queued", "running", "succeeded", "failed", "cancelled"),
        CheckConstraint(
            "(finished_seq IS NOT NULL) = (state IN ('succeeded', 'failed', 'cancelled'))",
            name="finished_has_its_place",
        ),
    )
    op.create_index("rollouts_by_state", "rollouts", ["run_id", "state", text("priority DESC"), "id", "mode"])
    op.create_table(
        "attempts",
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
    _index("attempts_one_running", "attempts", ["rollout_id"], where="state = 'running'", unique=True)
    _index("attempts_by_lease", "attempts", ["lease_expires_ns"], where="state = 'running'")
    op.create_table(
        "workers",
        Column("id", _Text, nullable=False),
        _run(),
        Column("host", _Text, nullable=False),
        Column("pid", _Int, nullable=False),
        Column("running", _Int, nullable=False),
        Column("seen_ns", BigInteger, nullable=False),
        PrimaryKeyConstraint("run_id", "id"),
    )
    op.create_table(
        "calls",
        Column("id", _Text, primary_key=True),
        _run(),
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
        Column("agent", _Text),
        Column("finish_reason", _Text, nullable=False),
        Column("started_ns", BigInteger, nullable=False),
        Column("finished_ns", BigInteger, nullable=False),
        CheckConstraint("length(logprobs) = length(sampled_ids)", name="one_logprob_a_sampled_token"),
    )
    op.create_index("calls_by_attempt", "calls", ["rollout_id", "attempt"])
    op.create_table(
        "spans",
        Column("id", _Text, primary_key=True),
        _run(),
        *_attempt(),
        Column("name", _Text, nullable=False),
        Column("parent_id", _Text),
        Column("attributes", _Text, nullable=False),
        Column("started_ns", BigInteger, nullable=False),
        Column("finished_ns", BigInteger, nullable=False),
    )
    op.create_index("spans_by_rollout", "spans", ["rollout_id", "started_ns"])
    op.create_table(
        "rewards",
        Column("seq", _Serial, primary_key=True, autoincrement=True),
        Column("id", _Text, nullable=False, unique=True),
        _run(),
        *_attempt(),
        Column("value", Double, nullable=False),
        Column("name", _Text, nullable=False),
        Column("call_id", _Text, ForeignKey("calls.id")),
        Column("source", _Text, nullable=False),
        Column("created_ns", BigInteger, nullable=False),
        _one_of("source", "return", "function", "output", "emitted", "posted"),
    )
    op.create_index("rewards_by_rollout", "rewards", ["rollout_id", "attempt"])
    op.create_table(
        "resource_versions",
        _run(),
        Column("name", _Text, nullable=False),
        Column("last", BigInteger, nullable=False),
        PrimaryKeyConstraint("run_id", "name"),
    )
    op.create_table(
        "resources",
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
    op.create_table(
        "metrics",
        Column("seq", _Serial, primary_key=True, autoincrement=True),
        _run(),
        Column("step", _Int, nullable=False),
        Column("name", _Text, nullable=False),
        Column("value", Double),
        Column("created_ns", BigInteger, nullable=False),
        Column("abandoned", Boolean, nullable=False),
    )
    op.create_index("metrics_by_name", "metrics", ["run_id", "step", "name"])
    op.create_table(
        "steps",
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
    _index("steps_one_a_number", "steps", ["run_id", "step"], where="state <> 'abandoned'", unique=True)
    op.create_table(
        "consumption",
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
    op.create_table(
        "checkpoints",
        _run(),
        Column("step", _Int, nullable=False),
        Column("path", _Text, nullable=False),
        Column("version", BigInteger, nullable=False),
        Column("created_ns", BigInteger, nullable=False),
        PrimaryKeyConstraint("run_id", "step"),
    )


def _one_of(column: str, *values: str) -> CheckConstraint:
    allowed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({allowed})", name=f"{column}_is_known")


def _run() -> Column[str]:
    return Column("run_id", _Text, ForeignKey("runs.id"), nullable=False)


def _attempt() -> list[Any]:
    return [
        Column("rollout_id", _Text, nullable=False),
        Column("attempt", _Int, nullable=False),
        ForeignKeyConstraint(["rollout_id", "attempt"], ["attempts.rollout_id", "attempts.attempt"]),
    ]


def _index(name: str, table: str, columns: list[str], where: str, unique: bool = False) -> None:
    op.create_index(name, table, columns, unique=unique, sqlite_where=text(where), postgresql_where=text(where))
