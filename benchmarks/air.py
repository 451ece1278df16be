"""AIR on and off: training steps to the same held-out success on the generated SQL demo.

    python benchmarks/air.py [--seeds 3] [--steps 20] [--goal 0.5] [--work FOLDER]

The demo's agent asks a database in text and reads the first cell, `empty` or `error`. With AIR, a query that comes back as
one of the latter two costs its call 0.2, and so does one that was asked before with the same outcome. Both
ways take credit = "step_rewards", which without step rewards is uniform credit. Everything else is equal: the warm-started
model of the seed, tasks, settings, and the noise of sampling. Everything is real: workers,
gateway, store, sampler and learner are processes of their own.

Last line: {"goal", "steps_without", "steps_with", "with_over_without", "reached_…", "curve_…", "after_…", "others"}. steps:
median over seeds of the step at which held-out success (greedy) first reaches the goal, linearly between evaluations; a run
that never does counts with its last step. reached: how many do. curve, after: means over seeds of all evaluations, and of
the last ones. others: steps and reached for other goals, since one goal alone says little of so few seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentlightning.config.run import Config, parse_config
from agentlightning.demo import sql
from agentlightning.demo.tasks import rows
from agentlightning.records import JSON
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.training import Training, TrainResult

TASKS, GROUP, EVERY, HELD_OUT, HELD_OUT_SEED = 32, 8, 2, 150, 12345
OTHER_GOALS = (0.6, 0.7, 0.8)
RULES: JSON = {"tool_error": -0.2, "repeated_state": -0.2}


@dataclass(frozen=True)
class Curve:
    """Held-out success of one run by step, and what its rules said over all steps."""

    points: list[tuple[int, float]]
    rules: dict[str, float]

    def steps_to(self, goal: float) -> float | None:
        """The step at which the curve first reaches `goal`; None where it never does.

        >>> Curve([(0, 0.2), (2, 0.4), (4, 0.8)], {}).steps_to(0.6)
        3.0
        """
        for (before, low), (after, high) in zip(self.points, self.points[1:], strict=False):
            if low < goal <= high:
                return before + (after - before) * (goal - low) / (high - low)
        return 0.0 if self.points[0][1] >= goal else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tasks", type=int, default=TASKS, help="tasks of a step")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="held-out tasks of an evaluation")
    parser.add_argument("--goal", type=float, default=0.5, help="held-out success, greedy")
    parser.add_argument("--work", type=Path, help="folder that keeps models and runs; a temporary one by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.work or Path(temporary)
        found: dict[str, list[Curve]] = {"without": [], "with": []}
        for seed in range(options.seeds):
            model = warm_start(folder / f"model-{seed}", seed)
            for way in found:
                curve = measure(folder, way, model, seed, options)
                found[way].append(curve)
                print(_line(way, seed, curve, options.goal), flush=True)
    print(json.dumps(summary(found, options.goal)))


def summary(found: dict[str, list[Curve]], goal: float) -> dict[str, Any]:
    """The figures of the last line."""
    figures = _to(found, goal)
    for way, curves in found.items():
        figures[f"curve_{way}"] = round(statistics.fmean(value for curve in curves for _, value in curve.points), 3)
        figures[f"after_{way}"] = round(statistics.fmean(curve.points[-1][1] for curve in curves), 3)
    return {"goal": goal, **figures, "others": {str(other): _to(found, other) for other in OTHER_GOALS}}


def _to(found: dict[str, list[Curve]], goal: float) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for way, curves in found.items():
        steps = [curve.steps_to(goal) for curve in curves]
        last = [float(curve.points[-1][0]) for curve in curves]
        reached = [end if step is None else step for step, end in zip(steps, last, strict=True)]
        figures |= {
            f"steps_{way}": round(statistics.median(reached), 1),
            f"reached_{way}": sum(step is not None for step in steps),
        }
    figures["with_over_without"] = round(figures["steps_with"] / max(0.1, figures["steps_without"]), 2)
    return figures


def warm_start(to: Path, seed: int) -> Path:
    """The demo's model of that seed, unless it is there already."""
    if not (to / "config.json").exists():
        command = [sys.executable, "-m", "agentlightning.demo.warm_start", "--task", "sql"]
        subprocess.run([*command, "--to", str(to), "--seed", str(seed)], check=True, stdout=subprocess.DEVNULL)
    return to


def measure(folder: Path, way: str, model: Path, seed: int, options: argparse.Namespace) -> Curve:
    """Train once."""
    run = RunFolder(folder / "runs", f"{way}-{seed}")
    config = configuration(run, way, model, seed, options, f"sqlite:///{folder}/{way}-{seed}.db")
    result: TrainResult = asyncio.run(Training(config, run).run(name=f"AIR {way}, seed {seed}"))
    points = [
        (int(row["step"]), row["eval/greedy/reward_mean"]) for row in result.metrics if "eval/greedy/reward_mean" in row
    ]
    names = tuple(f"air/{rule}/share" for rule in RULES)
    steps = [row for row in result.metrics if row["kind"] == "step"]
    rules = {name: statistics.fmean(row.get(name, 0.0) for row in steps) for name in names}
    return Curve(points, rules)


def configuration(run: RunFolder, way: str, model: Path, seed: int, options: argparse.Namespace, store: str) -> Config:
    run.make()
    count = options.steps * options.tasks
    return parse_config(
        {
            "model": {"path": str(model.resolve())},
            "agent": {"run": "agentlightning.demo.sql:solve", "workers": 2, "concurrency": 48, "timeout_s": 60},
            "data": {
                "train": run.write_tasks("train.jsonl", rows(sql, "train", count, seed)),
                "val": run.write_tasks("val.jsonl", rows(sql, "test", options.held_out, HELD_OUT_SEED)),
            },
            "algorithm": {"group_size": GROUP, "minibatches": 4, "credit": "step_rewards"},
            "trainer": {
                "steps": options.steps,
                "tasks_per_step": options.tasks,
                "learning_rate": 1e-3,
                "warmup_steps": 3,
                "final_learning_rate": 0.3,
                "checkpoint_every": options.steps,
                "seed": seed,
            },
            "eval": {"every": EVERY, "sampled": False},
            "air": {"text_tool_error": "^(error|empty)$", "rules": RULES} if way == "with" else {},
            "store": {"url": store},
        },
        "air",
    )


def _line(way: str, seed: int, curve: Curve, goal: float) -> str:
    reached = curve.steps_to(goal)
    points = " ".join(f"{value:.2f}" for _, value in curve.points)
    rules = ", ".join(f"{name.removeprefix('air_')} {value:.2f}" for name, value in curve.rules.items())
    return f"{way:<8} seed {seed}: {goal:g} at {'never' if reached is None else f'{reached:.1f}'}; {points}; {rules}"


if __name__ == "__main__":
    main()
