"""Columns and values have the field's own words; no step is abandoned any more, so a run has one of each number.

SQLite cannot change a check, so its tables of steps and consumption are made anew.
"""

from __future__ import annotations

from collections.abc import Callable

import orjson
from alembic import op
from sqlalchemy import text

from agentlightning.store import former_names
from agentlightning.types import JSON

revision = "0005"
down_revision = "0004"

_COLUMNS = {"answer": "completion", "asked": "overridden_params", "context_only": "untrained_tokens"}
_STATES = "state IN ('open', 'closed')"
_OUTCOMES = "outcome IN ('trained', 'zero_variance', 'stale', 'overprovisioned', 'invalid')"
_RENAMED = "CASE outcome WHEN 'surplus' THEN 'overprovisioned' ELSE outcome END"


def upgrade() -> None:
    run = op.get_bind().exec_driver_sql
    for old, new in _COLUMNS.items():
        run(f"ALTER TABLE calls RENAME COLUMN {old} TO {new}")
    run("DELETE FROM steps WHERE state = 'abandoned'")  # their rollouts were freed when they were abandoned
    op.drop_index("steps_one_a_number", "steps")
    if op.get_context().dialect.name == "sqlite":
        _make_anew("steps", _STEPS, "id, run_id, step, state, version, created_ns")
        kept = "rollout_id, run_id, mode, step_id, position"
        _make_anew("consumption", _CONSUMPTION, f"{kept}, outcome", f"{kept}, {_RENAMED}")
    else:
        op.create_unique_constraint(None, "steps", ["run_id", "step"])
        op.drop_constraint("state_is_known", "steps", type_="check")
        op.create_check_constraint("state_is_known", "steps", _STATES)
        op.drop_constraint("outcome_is_known", "consumption", type_="check")
        run(f"UPDATE consumption SET outcome = {_RENAMED} WHERE outcome = 'surplus'")
        op.create_check_constraint("outcome_is_known", "consumption", _OUTCOMES)
    run("UPDATE resources SET kind = 'external' WHERE kind = 'upstream'")
    _rename_pauses()
    _rename_metrics()
    _rewrite_runs("config", former_names.upgraded_config)
    _rewrite_runs("summary", former_names.upgraded_summary)


def _rename_metrics() -> None:
    for (name,) in op.get_bind().execute(text("SELECT DISTINCT name FROM metrics")).all():
        if (new := former_names.upgraded_metric(name)) != name:
            op.get_bind().execute(text("UPDATE metrics SET name = :new WHERE name = :old"), {"new": new, "old": name})


def _rewrite_runs(column: str, upgraded: Callable[[JSON], JSON]) -> None:
    for run_id, value in op.get_bind().execute(text(f"SELECT id, {column} FROM runs")).all():
        new = orjson.dumps(upgraded(orjson.loads(value))).decode()
        op.get_bind().execute(text(f"UPDATE runs SET {column} = :new WHERE id = :id"), {"new": new, "id": run_id})


def _make_anew(table: str, definition: str, columns: str, values: str | None = None) -> None:
    """SQLite's own procedure: foreign keys off, a new table, the rows, then its name."""
    run = op.get_bind().exec_driver_sql
    run(f"CREATE TABLE {table}_anew ({definition})")
    run(f"INSERT INTO {table}_anew ({columns}) SELECT {values or columns} FROM {table}")
    run(f"DROP TABLE {table}")
    run(f"ALTER TABLE {table}_anew RENAME TO {table}")


def _rename_pauses() -> None:
    """Versions are counted by name, and resources refer to the counter: the new one comes first, the old one goes last."""
    run = op.get_bind().exec_driver_sql
    run(
        "INSERT INTO resource_versions (run_id, name, last)"
        " SELECT run_id, 'pause:' || substr(name, 6), last FROM resource_versions WHERE name IN"
        " (SELECT name FROM resources WHERE kind = 'hold')"
    )
    run("UPDATE resources SET kind = 'pause', name = 'pause:' || substr(name, 6) WHERE kind = 'hold'")
    run(
        "DELETE FROM resource_versions WHERE substr(name, 1, 5) = 'hold:' AND NOT EXISTS (SELECT 1 FROM resources"
        " WHERE resources.run_id = resource_versions.run_id AND resources.name = resource_versions.name)"
    )


_STEPS = f"""
    id INTEGER NOT NULL,
    run_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    state TEXT NOT NULL,
    version BIGINT,
    created_ns BIGINT NOT NULL,
    PRIMARY KEY (id),
    UNIQUE (id, run_id),
    UNIQUE (run_id, step),
    CONSTRAINT state_is_known CHECK ({_STATES}),
    CONSTRAINT closed_has_a_version CHECK (state <> 'closed' OR version IS NOT NULL),
    FOREIGN KEY(run_id) REFERENCES runs (id)
"""

_CONSUMPTION = f"""
    rollout_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    mode TEXT DEFAULT 'train' NOT NULL,
    step_id INTEGER NOT NULL,
    position INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    PRIMARY KEY (rollout_id),
    FOREIGN KEY(rollout_id, run_id, mode) REFERENCES rollouts (id, run_id, mode),
    FOREIGN KEY(step_id, run_id) REFERENCES steps (id, run_id),
    UNIQUE (step_id, position),
    CONSTRAINT evaluation_is_never_consumed CHECK (mode = 'train'),
    CONSTRAINT outcome_is_known CHECK ({_OUTCOMES})
"""
