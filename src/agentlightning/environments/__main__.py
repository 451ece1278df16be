"""``python -m agentlightning.environments NAME …``: an environment's tasks, made and checked by the Python that has it.

Prints one JSON object as its last output: rows by split and warnings, or the error. What the environment prints goes to
the standard error. Exit code 0, or 2 with an error.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

import orjson

from agentlightning.environments.base import Split, open_environment
from agentlightning.environments.checks import check_openings, check_outcome, check_rows
from agentlightning.errors import AgentLightningError
from agentlightning.records import JSON
from agentlightning.runtime.children import end_with_parent


def main() -> int:
    """Make the tasks of an environment; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m agentlightning.environments")
    parser.add_argument("name")
    parser.add_argument("--train", type=int, default=0, help="training tasks, at most")
    parser.add_argument("--val", type=int, default=0, help="held-out tasks, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episode", action="store_true", help="also play one to its end")
    options = parser.parse_args()
    end_with_parent()
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what the environment prints is no part of the answer
        try:
            answer = asyncio.run(_tasks(options))
        except AgentLightningError as cause:
            answer = {"error": type(cause).__name__, "message": str(cause)}
        except Exception as cause:
            answer = {"error": "DataError", "message": f"env {options.name}: {type(cause).__name__}: {cause}"}
        out.write(orjson.dumps(answer))
    return 2 if "error" in answer else 0


async def _tasks(options: argparse.Namespace) -> JSON:
    environment = open_environment(options.name)
    try:
        limits: dict[Split, int] = {"train": options.train, "val": options.val}
        rows = {split: list(environment.tasks(split, limit, options.seed)) for split, limit in limits.items() if limit}
        rows = orjson.loads(orjson.dumps(rows))  # as the store gives them back
        warnings: list[str] = []
        if options.train and options.val:
            rows["train"], warnings = check_rows(rows["train"], rows["val"])
        train = rows.get("train") or rows.get("val") or []
        warnings += await check_openings(environment, train, rows.get("val", []))
        if options.episode:
            warnings += await check_outcome(environment, train[0])
        return {"rows": rows, "warnings": warnings}
    finally:
        environment.close()


if __name__ == "__main__":
    sys.exit(main())
