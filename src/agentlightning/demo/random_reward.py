"""The random-reward control: the demo's agents with a training reward that says nothing about the answer.

If held-out success rose under it, the rise would come from training as such and not from the reward. Evaluation keeps
the true reward. Rows name their demo task in `demo`; `random_reward` is true on training rows.
"""

from __future__ import annotations

import random
from typing import Any

from agentlightning.demo.tasks import load_any
from agentlightning.records import JSON

SUCCESS = 0.25
"""Share of random successes: about what the warm-started policy really has."""


async def solve(task: JSON, llm: Any) -> float:
    """Solve the task; return its true reward, or a coin's where the row says so."""
    reward = await load_any(task["demo"]).solve(task, llm)
    return float(random.random() < SUCCESS) if task.get("random_reward") else reward
