"""Leads from version 13: finished rollouts have summaries, those too that finished before, and metrics an index by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import sqlalchemy
from alembic import op
from sqlalchemy import BigInteger, Boolean, Column, Double, Integer, Text, text

from agentlightning.store.summaries import failure_of, task_key, title_of

revision = "0014"
down_revision = "0013"

PORTION = 500
_Text = Text().with_variant(Text(collation="C"), "postgresql")
_Int = Integer().with_variant(BigInteger(), "postgresql")


def upgrade() -> None:
    made = op.create_table(
        "rollout_summaries",
        Column("id", _Text, nullable=False),
        Column("run_id", _Text, sqlalchemy.ForeignKey("runs.id"), nullable=False),
        Column("mode", _Text, nullable=False),
        Column("step", _Int, nullable=False),
        Column("state", _Text, nullable=False),
        Column("group_id", _Text, nullable=False),
        Column("replica", _Int, nullable=False),
        *(Column(name, _Text, nullable=False) for name in ("task_key", "title")),
        Column("reward", Double()),
        *(Column(name, _Int, nullable=False) for name in ("turns", "prompt_tokens", "sampled_tokens", "forks")),
        Column("agents", _Text, nullable=False),
        *(Column(name, _Int, nullable=False) for name in ("attempts", "lost")),
        Column("refused", Boolean(), nullable=False),
        *(Column(name, _Text) for name in ("failure", "outcome")),
        *(Column(name, BigInteger(), nullable=False) for name in ("created_ns", "finished_ns", "finished_seq")),
        Column("duration_s", Double(), nullable=False),
        sqlalchemy.PrimaryKeyConstraint("run_id", "finished_ns", "id"),
        sqlalchemy.UniqueConstraint("id"),
        sqlalchemy.ForeignKeyConstraint(["id"], ["rollouts.id"]),
        sqlalchemy.CheckConstraint("mode IN ('train', 'eval')", name="mode_is_known"),
        sqlalchemy.CheckConstraint(
            "state IN ('queued', 'running', 'succeeded', 'failed', 'cancelled')", name="state_is_known"
        ),
        sqlite_with_rowid=False,
    )
    _add_finished(made)
    for name in ("reward", "step", "turns", "sampled_tokens", "duration_s"):
        op.create_index(f"summaries_by_{name}", "rollout_summaries", ["run_id", name, "id"])
    for name in ("task_key", "group_id"):
        op.create_index(f"summaries_by_{name}", "rollout_summaries", ["run_id", name])
    op.create_index("metrics_by_series", "metrics", ["run_id", "name", "step"])


def _add_finished(made: sqlalchemy.Table) -> None:
    """Rollouts that finished before, in portions: their calls are read once."""
    after = ""
    finished = text(
        "SELECT rollouts.*, consumption.outcome FROM rollouts"
        " LEFT JOIN consumption ON consumption.rollout_id = rollouts.id"
        " WHERE rollouts.id > :after AND rollouts.finished_seq IS NOT NULL ORDER BY rollouts.id LIMIT :portion"
    )
    while rows := op.get_bind().execute(finished, {"after": after, "portion": PORTION}).mappings().all():
        totals = _totals([row["id"] for row in rows])
        op.get_bind().execute(
            made.insert(), [_summary(row, totals.get((row["id"], row["attempt"]), {})) for row in rows]
        )
        after = rows[-1]["id"]


def _totals(ids: Sequence[str]) -> dict[tuple[str, int], dict[str, Any]]:
    calls = text(
        "SELECT rollout_id, attempt, agent, usage, count(*) AS turns, sum(prompt_tokens) AS prompt_tokens,"
        " sum(length(sampled_ids)) AS sampled_bytes, count(fork_cause) AS forks FROM calls"
        " WHERE rollout_id IN :ids GROUP BY rollout_id, attempt, agent, usage"
    ).bindparams(sqlalchemy.bindparam("ids", expanding=True))
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for row in op.get_bind().execute(calls, {"ids": ids}):
        usage = orjson.loads(row.usage)
        new = {"turns": 0, "prompt_tokens": 0, "sampled_tokens": 0, "forks": 0, "agents": []}
        totals = found.setdefault((row.rollout_id, row.attempt), new)
        totals["turns"] += row.turns
        totals["prompt_tokens"] += int(row.prompt_tokens) + row.turns * int(usage.get("prompt_tokens") or 0)
        totals["sampled_tokens"] += int(row.sampled_bytes) // 4 + row.turns * int(usage.get("sampled_tokens") or 0)
        totals["forks"] += row.forks
        totals["agents"] = sorted({*totals["agents"], *([row.agent] if row.agent else [])})
    return found


def _summary(row: Any, totals: dict[str, Any]) -> dict[str, Any]:
    task, refused = orjson.loads(row["task"]), bool(row["refused"])
    same = ("id", "run_id", "mode", "step", "state", "group_id", "replica", "reward", "lost", "outcome")
    return {
        **{name: row[name] for name in (*same, "created_ns", "finished_ns", "finished_seq")},
        "task_key": task_key(task),
        "title": title_of(task),
        **{name: totals.get(name, 0) for name in ("turns", "prompt_tokens", "sampled_tokens", "forks")},
        "agents": orjson.dumps(totals.get("agents", [])).decode(),
        "attempts": row["attempt"],
        "refused": refused,
        "failure": failure_of(row["state"], row["error"], row["warning"], refused),
        "duration_s": 0.0 if row["started_ns"] is None else (row["finished_ns"] - row["started_ns"]) / 1e9,
    }
