"""The demo from nothing to a trained agent: the configuration of a task, the warm start of the tiny model, the figures.

The training is what ``agl train`` does: agents in worker processes, calls over HTTP through the gateway.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from agentlightning.config.run import Config, parse_config
from agentlightning.demo.tasks import load_any, rows
from agentlightning.errors import EngineError
from agentlightning.records import JSON, Call, Rollout
from agentlightning.runtime.children import inheritable, secrets_line
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.training import TrainResult

GROUP_SIZE = 8
TASKS_SEED = 12345
"""Held-out tasks are the same for every seed, so that seeds can be compared."""


async def warm_start(name: str, seed: int, to: Path, progress: Progress, head_dim: int | None = None) -> JSON:
    """Build and warm-start the tiny model in a process of its own; returns the facts. EngineError if that fails."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-m", "agentlightning.demo.warm_start", "--child"),
        *("--task", name, "--seed", str(seed), "--to", str(to)),
        *(() if head_dim is None else ("--head-dim", str(head_dim))),
        env=inheritable(os.environ),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(secrets_line({}))
    errors = asyncio.ensure_future(process.stderr.read())
    facts: JSON = {}
    try:
        async for line in process.stdout:
            row = orjson.loads(line)
            if "step" in row:
                progress.phase("warm start", row["step"], row["of"])
            else:
                facts = row
        if await process.wait() != 0:
            raise EngineError(f"the warm start failed: {(await errors).decode(errors='replace').strip()[-500:]}")
    finally:
        errors.cancel()
        if process.returncode is None:
            process.kill()
            await process.wait()
    return facts


def configure(
    name: str, seed: int, folder: RunFolder, model: Path, store: str, random_reward: bool, engine: JSON | None = None
) -> Config:
    """The training configuration of a demo task; writes its tasks to the run folder. engine: settings beside the demo's."""
    task = load_any(name)
    training = task.TRAINING
    extra: JSON = {"demo": name}
    train = [
        row | extra | ({"random_reward": True} if random_reward else {})
        for row in rows(task, "train", training.steps * training.tasks_per_step, seed)
    ]
    val = [row | extra for row in rows(task, "test", training.held_out_tasks, TASKS_SEED)]
    table: dict[str, dict[str, Any]] = {
        "model": {"path": str(model.resolve())},
        "agent": {"run": f"agentlightning.demo.{'random_reward' if random_reward else name}:solve"},
        "data": {"train": folder.write_tasks("train.jsonl", train), "val": folder.write_tasks("val.jsonl", val)},
        "algorithm": {"group_size": GROUP_SIZE},
        "trainer": {"steps": training.steps, "tasks_per_step": training.tasks_per_step, "seed": seed},
        "eval": {"every": -(-training.steps // (training.evaluations + 1))},
        "engine": {},
        "store": {"url": store},
    }
    for part, settings in (*training.tables.items(), ("engine", engine or {})):
        table[part] |= settings
    return parse_config(table, "demo")


def summarize(name: str, seed: int, started: float, of_model: JSON, result: TrainResult) -> JSON:
    """The figures that the demo prints as its last line. of_model: those about its start."""

    def at(step: int, metric: str) -> float | None:
        return next((row[metric] for row in result.metrics if row["step"] == step and metric in row), None)

    def total(metric: str) -> int:
        return int(sum(row.get(metric, 0) for row in result.metrics if row["kind"] == "step"))

    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "task": name,
        "seed": seed,
        **of_model,
        "before_greedy": at(0, "eval/greedy/reward_mean"),
        "before_t1": at(0, "eval/sampled/reward_mean"),
        "after_greedy": at(result.step, "eval/greedy/reward_mean"),
        "after_t1": at(result.step, "eval/sampled/reward_mean"),
        "rollouts": total("rollout/count"),
        "calls": total("rollout/calls"),
        "forked_calls": total("rollout/forked_calls"),
        "wall_s": round(time.time() - started, 1),
        "cpu_s": round(sum(usage.ru_utime + usage.ru_stime for usage in (own, children)), 1),
    }


async def conversations(
    store: LightningStore, run_id: str, step: int
) -> list[tuple[str, Rollout, list[tuple[str, str]]]]:
    """The greedy conversation on one held-out task before training and after `step`, from its question on: on the first task
    that only the trained model solves, if there is one."""
    before, after = [await _greedy(store, run_id, at) for at in (0, step)]
    both = [name for name in before if name in after]
    if not both:
        return []  # a store in memory is gone
    learned = (name for name in both if (after[name].reward or 0.0) > (before[name].reward or 0.0))
    name = next(learned, both[0])
    shown = [("before", before[name]), ("after", after[name])]
    return [(when, rollout, _lines(rollout, await store.calls([rollout.id]))) for when, rollout in shown]


async def _greedy(store: LightningStore, run_id: str, step: int) -> dict[str, Rollout]:
    """Greedy held-out rollouts of a step, by task."""
    found = await store.rollouts(RolloutQuery(run_id=run_id, mode="eval", step=step, states=["succeeded"]))
    return {orjson.dumps(one.task).decode(): one for one in found if one.sampling.temperature == 0.0}


def _lines(rollout: Rollout, calls: Sequence[Call]) -> list[tuple[str, str]]:
    """Role and text of each message, from the task's question on."""
    messages = [message for call in calls for message in (*call.messages, call.completion)]
    texts = [(str(message["role"]), str(message.get("content") or "")) for message in messages]
    start = next((index for index, (_, text) in enumerate(texts) if text == rollout.task["question"]), 0)
    return texts[start:]
