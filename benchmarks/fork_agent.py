"""The agents of the benchmark of forks: those of the demo, and one whose tool answers by chance."""

from __future__ import annotations

import random
from contextlib import closing
from typing import Any

from agentlightning.demo import sql
from agentlightning.demo.tasks import CITIES, answer_with_tool, load
from agentlightning.records import JSON


async def solve(task: JSON, llm: Any) -> float:
    """The demo's agent of the task, or the one that acts by chance."""
    if task["demo"] != "by chance":
        return await load(task["demo"]).solve(task, llm)
    with closing(sql.database(task["database"])) as company:

        def execute(query: str) -> str:
            answer = sql.execute(company, query)
            return answer if random.random() < 0.5 else f"{answer} {random.choice(CITIES)}"

        return await answer_with_tool(task, llm, execute, sql.SPECIAL_WORDS, sql.MAX_CALLS, sql.MAX_TOKENS)
