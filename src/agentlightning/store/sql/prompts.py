"""The versions of prompt templates that rollouts use, in SQL: those named exist, the others are pinned at the first claim.

Driven by lifecycle.py, within its transactions. A template is a resource; what is in one, nobody here knows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson
from sqlalchemy import Connection, select, tuple_

from agentlightning.records import Rollout
from agentlightning.store import codec
from agentlightning.store.sentences import refusal
from agentlightning.store.sql import statements
from agentlightning.store.sql.prepared import execute, execute_many
from agentlightning.store.sql.tables import resources


def require_templates(connection: Connection, new: Sequence[dict[str, Any]]) -> None:
    """NotFoundError where the columns of a new rollout name a template, or a version of one, that its run does not have."""
    named: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for row in new:
        if row["prompts"] != "{}":
            named[row["run_id"]].update(orjson.loads(row["prompts"]).items())
    for run_id, pins in named.items():
        of_run = resources.c.run_id == run_id, resources.c.kind == "prompt_template"
        query = select(resources.c.name, resources.c.version)
        query = query.where(*of_run, tuple_(resources.c.name, resources.c.version).in_(sorted(pins)))
        if missing := sorted(pins - {tuple(row) for row in connection.execute(query)}):
            raise refusal("no_template", run_id, *missing[0])


def pin_templates(connection: Connection, run_id: str, claimed: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts with the versions that they keep: those claimed for the first time get the newest of what they do not
    name."""
    first = [rollout for rollout in claimed if rollout.attempt == 1]
    newest = dict(execute(connection, statements.NEWEST_TEMPLATES, {"run": run_id})) if first else {}
    pinned = {rollout.id: replace(rollout, prompts=newest | rollout.prompts) for rollout in first if newest}
    changed = [
        {"rollout": rollout.id, "prompts": codec.dump(rollout.prompts, "prompts")} for rollout in pinned.values()
    ]
    execute_many(connection, statements.UPDATE_ROLLOUT, changed)
    return [pinned.get(rollout.id, rollout) for rollout in claimed]
