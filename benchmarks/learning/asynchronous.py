"""Asynchronous against synchronous training where the longest rollouts last ten times as long as the shortest.

The lookup demo's task and model; the agent's tool and its grader take time, drawn for each rollout between 0.2 and 2
seconds (log-uniform). Both arms train on as many rollouts with the same settings but trainer.max_staleness. Figures:
train_s, from the first step's start to the last step's end; busy_share, the part of it in which the trainer works or at
least nine in ten of the rollouts that workers may run at a time are running.
"""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from typing import Any

from claim import HELD_OUT, HELD_OUT_SEED, Cell, Claim, Outcome, curve, train, warm_start, write_rows

from agentlightning.demo import lookup
from agentlightning.demo.tasks import rows
from agentlightning.records import JSON
from agentlightning.store.base import RolloutQuery
from agentlightning.store.open import open_store

SPREAD, LONGEST_S = 10, 2.0
STEPS, TASKS, GROUP = 32, 16, 8
WORKERS, CONCURRENCY = 2, TASKS * GROUP // 2
FULL = 0.9 * WORKERS * CONCURRENCY
STALENESS = {"sync": 0, "async": 3}
CONFIG = f"""
[model]
path = "{{model}}"
[agent]
run = "{__file__}:solve"
workers = {WORKERS}
concurrency = {CONCURRENCY}
[data]
train = "train.jsonl"
val = "val.jsonl"
[algorithm]
group_size = {GROUP}
minibatches = 4
[trainer]
steps = {{steps}}
tasks_per_step = {TASKS}
learning_rate = 1e-3
warmup_steps = 3
seed = {{seed}}
max_staleness = {{staleness}}
[eval]
sampled = false
"""


async def solve(task: JSON, llm: Any) -> float:
    """The lookup agent; its tool and its grader take as long as was drawn for the rollout."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, http_client=llm.http_client)
    left_s = task["longest_s"] * SPREAD ** -random.random()
    pause_s = left_s / lookup.MAX_CALLS
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    reward = 0.0
    for _ in range(lookup.MAX_CALLS):
        reply = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=lookup.MAX_TOKENS)
        text = reply.choices[0].message.content or ""
        wanted = re.fullmatch(r"<find>(.*)</find>", text)
        if wanted is None:
            reward = float(text == f"Answer: {task['answer']}")
            break
        await asyncio.sleep(pause_s)
        left_s -= pause_s
        fact = lookup.find(task["corpus"], wanted[1])
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": fact}]
    await asyncio.sleep(left_s)
    return reward


def measure(cell: Cell) -> Outcome:
    steps, longest_s = (4, LONGEST_S / 4) if cell.quick else (STEPS, LONGEST_S)
    tasks = rows(lookup, "train", TASKS * steps, cell.seed)
    write_rows(cell.place / "train.jsonl", [row | {"longest_s": longest_s} for row in tasks])
    held_out = rows(lookup, "test", HELD_OUT, HELD_OUT_SEED)
    write_rows(cell.place / "val.jsonl", [row | {"longest_s": 0.0} for row in held_out])
    config = cell.place / "train.toml"
    known = {"model": cell.model, "steps": steps, "seed": cell.seed, "staleness": STALENESS[cell.arm]}
    config.write_text(CONFIG.format(**known))
    run, found = train(cell, config, {})
    return Outcome(curve(found), asyncio.run(shares(cell.place / "agl.db", run.run_id, found)))


async def shares(database: Path, run_id: str, metrics: list[JSON]) -> dict[str, float]:
    steps = [row for row in metrics if row["kind"] == "step"]
    starts = [row["time"] - row["time/step_s"] for row in steps]
    waits = [(start, start + row["time/collect_s"]) for start, row in zip(starts, steps, strict=True)]
    begin, end = starts[0], steps[-1]["time"]
    async with open_store(f"sqlite:///{database}") as store:
        ids = [one.id for one in await store.rollouts(RolloutQuery(run_id=run_id, mode="train"))]
        attempts = await store.attempts(ids)
    running = [(one.started_ns / 1e9, (one.finished_ns or one.started_ns) / 1e9) for one in attempts]
    return {"train_s": end - begin, "busy_share": 1 - idle(waits, running, FULL) / (end - begin)}


def idle(waits: list[tuple[float, float]], running: list[tuple[float, float]], full: float) -> float:
    """Seconds within `waits` in which fewer than `full` of the spans `running` cover the moment."""
    moments = [(start, 1, 0) for start, _ in running] + [(stop, -1, 0) for _, stop in running]
    moments += [(start, 0, 1) for start, _ in waits] + [(stop, 0, -1) for _, stop in waits]
    seconds, before, count, waiting = 0.0, 0.0, 0, 0
    for at, more, wait in sorted(moments):
        if waiting and count < full:
            seconds += at - before
        before, count, waiting = at, count + more, waiting + wait
    return seconds


CLAIMS = {"async": Claim(arms=("sync", "async"), measure=measure, prepare=lambda cell: warm_start(cell, "lookup"))}
