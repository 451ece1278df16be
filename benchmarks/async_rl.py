"""Asynchronous against synchronous training where rollouts last from one to ten times as long as the shortest.

    python benchmarks/async_rl.py [--seeds 3] [--steps 32] [--longest 2.0]

The lookup demo's task and model; the agent's tool and its grader take time, drawn for each rollout between a tenth of
`--longest` seconds and all of it (log-uniform). Both ways train on the same number of rollouts with the same settings but
one, trainer.max_staleness. Everything is real: workers, gateway, store, sampler and learner are processes of their own.

Last line: {"busy_share", "wall_over_sync", "after_async", "after_sync"}: means over seeds. busy_share: of the time from the
first step's start to the last step's end, in which the trainer works or the sampler is full, that is at least nine in ten of
the rollouts that workers may run at a time are running. wall_over_sync: of the same span. after_*: held-out success, greedy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentlightning.config.run import Config, parse_config
from agentlightning.demo import lookup
from agentlightning.demo.tasks import rows
from agentlightning.records import JSON
from agentlightning.store.base import RolloutQuery
from agentlightning.store.open import open_store
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.training import Training, TrainResult

SPREAD = 10
TASKS, GROUP, BOUND = 16, 8, 3
WORKERS, CONCURRENCY = 2, TASKS * GROUP // 2
FULL = 0.9
HELD_OUT = 200


async def solve(task: JSON, llm: Any) -> float:
    """The lookup agent; what its tool and its grader take adds up to what was drawn for the rollout."""
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


@dataclass(frozen=True)
class Figures:
    """The measurements of one run."""

    busy_share: float
    wall_s: float
    after: float
    reward: float
    """Of the training rollouts of the last five steps, sampled at temperature 1."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--longest", type=float, default=2.0, help="seconds of the longest rollouts")
    options = parser.parse_args()
    found: dict[str, list[Figures]] = {"sync": [], "async": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = warm_start(folder / "model")
        for seed in range(options.seeds):
            for way, bound in (("sync", 0), ("async", BOUND)):
                figures = measure(folder, f"{way}-{seed}", model, seed, bound, options)
                found[way].append(figures)
                print(
                    f"{way:<5} seed {seed}: {figures.wall_s:6.1f} s, busy {figures.busy_share:.2f}, "
                    f"held-out {figures.after:.3f}, reward at the end {figures.reward:.3f}",
                    flush=True,
                )
    mean = {
        way: {name: statistics.fmean(getattr(one, name) for one in each) for name in ("busy_share", "wall_s", "after")}
        for way, each in found.items()
    }
    summary = {
        "busy_share": mean["async"]["busy_share"],
        "wall_over_sync": mean["async"]["wall_s"] / mean["sync"]["wall_s"],
        "after_async": mean["async"]["after"],
        "after_sync": mean["sync"]["after"],
    }
    print(json.dumps({name: round(value, 3) for name, value in summary.items()}))


def warm_start(folder: Path) -> Path:
    """The policy that all runs begin with."""
    module = ["-m", "agentlightning.demo.warm_start", "--task", "lookup", "--threads", "1", "--to", str(folder)]
    subprocess.run([sys.executable, *module], check=True, stdout=subprocess.DEVNULL)
    return folder


def measure(folder: Path, name: str, model: Path, seed: int, bound: int, options: argparse.Namespace) -> Figures:
    run = RunFolder(folder / "runs", name)
    run.make()
    config = configure(folder, run, model, seed, bound, options)
    result = asyncio.run(Training(config, run).run(name=name))
    return asyncio.run(read(config, result))


def configure(folder: Path, run: RunFolder, model: Path, seed: int, bound: int, options: argparse.Namespace) -> Config:
    tasks = {
        "train": [row | {"longest_s": options.longest} for row in rows(lookup, "train", TASKS * options.steps, seed)],
        "val": [row | {"longest_s": 0.0} for row in rows(lookup, "test", HELD_OUT, 12345)],
    }
    return parse_config(
        {
            "model": {"path": str(model)},
            "agent": {"run": f"{Path(__file__).resolve()}:solve", "workers": WORKERS, "concurrency": CONCURRENCY},
            "data": {split: run.write_tasks(f"{split}.jsonl", each) for split, each in tasks.items()},
            "algorithm": {"group_size": GROUP, "minibatches": 4},
            "trainer": {
                "steps": options.steps,
                "tasks_per_step": TASKS,
                "learning_rate": 1e-3,
                "warmup_steps": 3,
                "seed": seed,
                "max_staleness": bound,
            },
            "eval": {"sampled": False},
            "store": {"url": f"sqlite:///{folder}/{run.run_id}.db"},
        }
    )


async def read(config: Config, result: TrainResult) -> Figures:
    """The shares of a run, from its metrics and from what its store says of each attempt."""
    steps = [row for row in result.metrics if row["kind"] == "step"]
    waits = [
        (row["time"] - row["time/step_s"], row["time"] - row["time/step_s"] + row["time/collect_s"]) for row in steps
    ]
    begin, end = waits[0][0], steps[-1]["time"]
    async with open_store(config.store.url) as store:
        ids = [one.id for one in await store.rollouts(RolloutQuery(run_id=result.run_id, mode="train"))]
        attempts = await store.attempts(ids)
    running = [(one.started_ns / 1e9, (one.finished_ns or one.started_ns) / 1e9) for one in attempts]
    after = next(
        row["eval/greedy/reward_mean"]
        for row in result.metrics
        if row["step"] == result.step and "eval/greedy/reward_mean" in row
    )
    return Figures(
        busy_share=1 - idle(waits, running, FULL * WORKERS * CONCURRENCY) / (end - begin),
        wall_s=end - begin,
        after=after,
        reward=statistics.fmean(row["train/reward_mean"] for row in steps[-5:]),
    )


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


if __name__ == "__main__":
    main()
