"""Reward function of the joins slice: execution match, as what each query of the team added to it.

The steps of a rollout add up to its reward: a right query after a wrong one, a repair, is a step reward of 1, the opposite
-1.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from agent import is_right, run_query
from database import Database

WRITERS = ("writer", "rewriter")


def joins(task: dict[str, Any], result: Any) -> dict[str, Any]:
    """1 or 0 (is the last query right), `repaired` and `broken` (between the first query and the last), and steps."""
    queries = [call.completion.get("content") or "" if call.agent in WRITERS else None for call in result.calls]
    with Database(task["database"]) as database:
        right = [
            None if query is None else is_right(task, run_query(database, query, task["names"])) for query in queries
        ]
    known = [False]
    for one in right:
        known.append(known[-1] if one is None else one)  # the checker changes nothing
    first = next(one for one in right if one is not None)
    return {
        "reward": float(known[-1]),
        "repaired": float(known[-1] and not first),
        "broken": float(first and not known[-1]),
        "steps": [float(after) - float(before) for before, after in pairwise(known)],
    }
