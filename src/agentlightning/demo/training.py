"""The demo from nothing to a trained agent: build and warm-start a tiny model, then train it through the whole system.

Everything after the warm start is what ``agl train`` does: agents in worker processes, calls over HTTP through the gateway.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import orjson

from agentlightning.config.run import Config, parse_config
from agentlightning.demo.tasks import load, rows
from agentlightning.errors import EngineError
from agentlightning.records import JSON
from agentlightning.runtime.children import inheritable, secrets_line
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.training import TrainResult

GROUP_SIZE = 8
HELD_OUT_TASKS = 300
EVALUATIONS = 2
"""Greedy evaluations during training, beside those before and after it."""
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
    task = load(name)
    training = task.TRAINING
    extra: JSON = {"demo": name}
    train = [
        row | extra | ({"random_reward": True} if random_reward else {})
        for row in rows(task, "train", training.steps * training.tasks_per_step, seed)
    ]
    val = [row | extra for row in rows(task, "test", HELD_OUT_TASKS, TASKS_SEED)]
    table: dict[str, dict[str, Any]] = {
        "model": {"path": str(model.resolve())},
        "agent": {
            "run": f"agentlightning.demo.{'random_reward' if random_reward else name}:solve",
            "workers": 2,
            "concurrency": 128,
            "timeout_s": 60,
        },
        "data": {
            "train": folder.write_tasks("train.jsonl", train),
            "val": folder.write_tasks("val.jsonl", val),
        },
        "algorithm": {
            "group_size": GROUP_SIZE,
            "minibatches": 4,
        },
        "trainer": {
            "steps": training.steps,
            "tasks_per_step": training.tasks_per_step,
            "learning_rate": 1e-3,
            "warmup_steps": 3,
            "final_learning_rate": 0.1,
            "checkpoint_every": 5,
            "seed": seed,
        },
        "eval": {"every": -(-training.steps // (EVALUATIONS + 1))},
        "engine": {"device": "cpu", **(engine or {})},  # so small a model is no faster on a GPU
        "store": {"url": store},
    }
    return parse_config(table, "demo")


def summarize(name: str, seed: int, started: float, demonstrator: float, result: TrainResult) -> JSON:
    """The figures that the demo prints as its last line."""

    def at(step: int, metric: str) -> float | None:
        return next((row[metric] for row in result.metrics if row["step"] == step and metric in row), None)

    def total(metric: str) -> int:
        return int(sum(row.get(metric, 0) for row in result.metrics if row["kind"] == "step"))

    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "task": name,
        "seed": seed,
        "demonstrator": round(demonstrator, 3),
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
