"""Leads from version 4, the first that was used: columns and values get the field's own words, and no step is abandoned
any more, so that a run has one of each number.
"""

from __future__ import annotations

from collections.abc import Callable

import orjson
from alembic import op
from sqlalchemy import text

from agentlightning.records import JSON
from agentlightning.store import former_names

revision = "0005"
down_revision = None

_COLUMNS = {"answer": "completion", "asked": "overridden_params", "context_only": "untrained_tokens"}
_OUTCOMES = "outcome IN ('trained', 'zero_variance', 'stale', 'overprovisioned', 'invalid')"


def upgrade() -> None:
    run = op.get_bind().exec_driver_sql
    for old, new in _COLUMNS.items():
        run(f"ALTER TABLE calls RENAME COLUMN {old} TO {new}")
    run("DELETE FROM steps WHERE state = 'abandoned'")  # their rollouts were freed when they were abandoned
    op.drop_index("steps_one_a_number", "steps")
    with op.batch_alter_table("steps") as steps:
        steps.create_unique_constraint("steps_run_id_step_key", ["run_id", "step"])
        steps.drop_constraint("state_is_known", type_="check")
        steps.create_check_constraint("state_is_known", text("state IN ('open', 'closed')"))
    with op.batch_alter_table("consumption") as consumption:
        consumption.drop_constraint("outcome_is_known", type_="check")
    run("UPDATE consumption SET outcome = 'overprovisioned' WHERE outcome = 'surplus'")
    with op.batch_alter_table("consumption") as consumption:
        consumption.create_check_constraint("outcome_is_known", text(_OUTCOMES))
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
