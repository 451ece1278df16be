"""The examples on real data and the picture game, with their own files and commands, as a user would run them.

Arms of an example: `control`, more of the warm start instead (`warm_start.py --control`, `agl eval`), and `trained`
(`agl train`). Those of a pretrained model: `base`, as it is; `control`, more of the warm start on gold traces; `random`, a
coin in the place of the reward; `trained`. Figures: labelled and held-out rows, rollouts, success at temperature 1, and the
mean of every data set and named reward of the rows.

A call of the picture game is exact where its prompt continues the calls before it token for token and image for image, or is
the first; and where it was sampled with the weights of the end, a learner finds its log-probabilities
again, each to 1e-4.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from claim import AGL, REPOSITORY, Cell, Claim, Outcome, curve, execute, last_json, options, train

from agentlightning.adapters.sequences import merge
from agentlightning.adapters.trajectories import trajectories
from agentlightning.engines.base import LearnerSetup
from agentlightning.engines.local.learner import Learner
from agentlightning.records import JSON, Call, Rollout
from agentlightning.store.base import RolloutQuery
from agentlightning.store.open import open_store
from agentlightning.store.scan import read_images

TOLERANCE = 1e-4
COIN = """\
import random
import sys

sys.path.insert(0, {folder!r})
from agent import solve_text


async def solve(task, llm):
    await solve_text(task, llm)
    return float(random.random() < 0.25)
"""
"""The agent of an example with a coin for its reward."""
PASSES = 2
"""Of the warm start of a pretrained model; its control has twice as many."""
QUICK_PRETRAINED = {"trainer.steps": 2, "trainer.tasks_per_step": 2, "eval.tasks": 8, "eval.every": 0}
QUICK = {"trainer.steps": 2, "trainer.tasks_per_step": 4, "eval.tasks": 16, "eval.sampled": False}


@dataclass(frozen=True)
class Example:
    """One example with a part of its data."""

    folder: str
    config: str
    words: tuple[str, ...] = ()
    """More words for its warm_start.py."""
    pretrained: bool = False
    """SmolLM2-135M-Instruct in place of a tiny model, warm-started on gold traces."""

    @property
    def path(self) -> Path:
        return REPOSITORY / "examples" / self.folder


EXAMPLES = {
    "calculator": Example("calculator", "train.toml"),
    "calculator-all": Example("calculator", "all.toml", ("--slice", "all")),
    "text_to_sql-spider": Example("text_to_sql", "spider.toml", ("--slice", "spider")),
    "text_to_sql-joins": Example("text_to_sql", "joins.toml", ("--slice", "joins")),
    "text_to_sql-generated": Example("text_to_sql", "train.toml"),
    "rag-2wiki": Example("rag", "train.toml"),
    "rag-musique": Example("rag", "musique.toml", ("--slice", "musique")),
    **{
        f"{name}-smollm2": Example(name, "pretrained.toml", pretrained=True)
        for name in ("calculator", "text_to_sql", "rag")
    },
}


def warm_start(example: Example, cell: Cell, name: str, to: Path, *more: str) -> JSON:
    script = (sys.executable, example.path / "warm_start.py", "--seed", str(cell.seed), "--to", to)
    return last_json(execute(cell, name, *script, *example.words, *more))


def pretrained() -> Path:
    """The model's folder; fetched where it is not there."""
    from agentlightning.demo.pretrained import pretrained_model

    return pretrained_model()


def imitate(cell: Cell, example: Example, name: str, passes: int) -> Path:
    """The pretrained model after so many passes over gold traces, by `agl train --algorithm sft`."""
    place, traces = cell.folder / name, cell.folder / "traces.jsonl"
    place.mkdir(exist_ok=True)
    script = (sys.executable, REPOSITORY / "examples" / "gold_traces.py", "--example", example.folder, "--to", traces)
    execute(cell, "traces", *script, "--seed", str(cell.seed), *(["--count", "32"] * cell.quick))
    store = ("--store", f"sqlite:///{cell.folder}/traces.db", "--runs", cell.folder / "traces-runs")
    recorded = str(last_json(execute(cell, "record", *AGL, "record", "--traces", traces, *store))["run_id"])
    settings = {
        "trainer.epochs": 1 if cell.quick else passes,
        "trainer.tasks_per_step": 16,
        "trainer.learning_rate": 5e-5,
    }
    words = ("--algorithm", "sft", "--from-run", recorded, "--model", pretrained(), *options(settings))
    execute(cell, f"{name}/train", *AGL, "train", *words, *store[:2], "--runs", place / "runs")
    return max(place.glob("runs/*/checkpoints/step-*"))


def measure_pretrained(example: Example, cell: Cell) -> Outcome:
    """Held-out success of one arm, greedy and at temperature 1, before and after."""
    config, settings = example.path / example.config, dict(QUICK_PRETRAINED) if cell.quick else {}
    warm, last = imitate(cell, example, "warm_start", PASSES), 0
    figures, curves = dict[str, float](), list[tuple[float, float]]()
    if cell.arm in ("trained", "random"):
        used = settings | {"model.path": str(warm), "trainer.seed": cell.seed}
        if cell.arm == "random":
            coin = cell.place / "coin.py"
            coin.write_text(COIN.format(folder=str(example.path)))
            used |= {"agent.run": f"{coin}:solve", "agent.reward": [], "eval.tasks": 1, "eval.every": 0}
        run, rows = train(cell, config, used)
        figures["rollouts"] = int(sum(row["rollout/count"] for row in rows if row["kind"] == "step"))
        model, curves = max((run.path / "checkpoints").glob("step-*")), curve(rows)
    else:
        model = pretrained() if cell.arm == "base" else imitate(cell, example, "more", 2 * PASSES)
    if cell.arm == "trained":
        last = int(curves[-1][0])
        sampled = [row["eval/sampled/reward_mean"] for row in rows if "eval/sampled/reward_mean" in row]
        figures |= asyncio.run(parts(cell.place / "agl.db", last))
    else:
        pairs = [("before", warm), (cell.arm, model)] if cell.arm != "base" else [(cell.arm, model)]
        found = [evaluate(cell, name, config, one, settings) for name, one in pairs]
        curves, sampled = [(step, one["greedy"]) for step, one in enumerate(found)], [one["sampled"] for one in found]
        figures |= asyncio.run(parts(cell.folder / f"{cell.arm}.db", 0))
    return Outcome(curves, figures | {"before_t1": sampled[0], "after_t1": sampled[-1]})


def prepare(example: Example, cell: Cell) -> None:
    """Six epochs are enough that the agents of a quick run use their tools."""
    if example.pretrained:
        imitate(cell, example, "warm_start", PASSES)
    else:
        warm_start(example, cell, "warm_start", cell.model, *(["--epochs", "6"] * cell.quick))


def measure(example: Example, cell: Cell) -> Outcome:
    """Greedy held-out success before and after; `before` of the control is that of its seed's model."""
    config, settings = example.path / example.config, QUICK if cell.quick else {}
    made = warm_start(example, cell, "warm_start", cell.model)
    figures = {"labelled": made["labelled"], "held_out": made["held_out"]}
    if cell.arm == "trained":
        settings = {"model.path": str(cell.model), "trainer.seed": cell.seed, **settings}
        _, rows = train(cell, config, settings)
        points, last = curve(rows), curve(rows)[-1][0]
        figures["rollouts"] = int(sum(row["rollout/count"] for row in rows if row["kind"] == "step"))
    else:
        warm_start(
            example, cell, "control", cell.place / "model", *(("--epochs", "1") if cell.quick else ("--control",))
        )
        models = (("before", cell.model), ("control", cell.place / "model"))
        success = [float(evaluate(cell, name, config, model, settings)["greedy"]) for name, model in models]
        points, last = [(0, success[0]), (1, success[1])], 0
    database = cell.place / "agl.db" if cell.arm == "trained" else cell.folder / "control.db"
    return Outcome(points, figures | asyncio.run(parts(database, int(last))))


def evaluate(cell: Cell, name: str, config: Path, model: Path, settings: JSON) -> JSON:
    """Success of a model by ``agl eval``: `greedy` and, where it is asked for, `sampled`."""
    words = (config, *options({"model.path": str(model), **settings}), "--runs", cell.folder / f"{name}-runs")
    store = f"sqlite:///{cell.folder}/{name}.db"
    return last_json(execute(cell, f"eval-{name}", *AGL, "eval", *words, "--store", store))


async def parts(database: Path, step: int) -> dict[str, float]:
    """Means over a step's greedy evaluation: the reward of the rows of each `set`, and each named reward."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    async with open_store(f"sqlite:///{database}") as store:
        found = await store.rollouts(RolloutQuery(mode="eval", step=step))
        rollouts = {one.id: one for one in found if one.group_id.startswith(f"eval:{step}:greedy:")}
        for rollout in rollouts.values():
            if "set" in rollout.task:
                values[str(rollout.task["set"])].append(rollout.reward or 0.0)
        for reward in await store.rewards(list(rollouts)):
            if reward.call_id is None and reward.name != "reward":
                values[reward.name].append(reward.value)
    return {name: round(statistics.fmean(each), 4) for name, each in sorted(values.items())}


# --- the picture game ---------------------------------------------------------------------------------------------------

PICTURES = Example("pictures", "train.toml")


def prepare_pictures(cell: Cell) -> None:
    warm_start(PICTURES, cell, "warm_start", cell.model, *(["--steps=20"] * cell.quick))


def measure_pictures(cell: Cell) -> Outcome:
    quick = {"trainer.steps": 2, "trainer.tasks_per_step": 4, "eval.every": 2} if cell.quick else {}
    run, rows = train(
        cell, PICTURES.path / "train.toml", {"model.path": str(cell.model), "trainer.seed": cell.seed, **quick}
    )
    points, weights = curve(rows), max((run.path / "checkpoints").iterdir())
    store = f"sqlite:///{cell.place}/agl.db"
    return Outcome(points, {"exact_share": asyncio.run(exact_share(store, run.run_id, weights, int(points[-1][0])))})


async def exact_share(url: str, run_id: str, weights: Path, last: int) -> float:
    learner, total, wrong = Learner(weights, LearnerSetup()), 0, 0
    async with open_store(url) as store:
        for rollout in await store.rollouts(RolloutQuery(run_id=run_id)):
            calls = await store.calls([rollout.id])
            differ = {call.id for call in calls if call.fork_cause is not None}
            if rollout.mode == "eval" and rollout.step == last:
                differ |= differing(learner, rollout, calls, await read_images(store, calls))
            total, wrong = total + len(calls), wrong + len(differ)
    return round(1 - wrong / total, 4)


def differing(learner: Learner, rollout: Rollout, calls: list[Call], images: dict[str, bytes]) -> set[str]:
    """The ids of the calls of which the learner finds other log-probabilities than are recorded."""
    kept, left_out = trajectories([rollout], calls, keep_unrewarded=True, images=images)
    if left_out:
        return {call.id for call in calls}
    found, recorded = set(), {call.id: call.logprobs for call in calls}
    for one in kept:
        nothing = [0.0] * len(one.transitions)
        rows = merge(one.rollout_id, one.transitions, nothing, nothing)
        ends = zip(rows, learner.logprobs(rows), strict=True)
        values = [of_row[start:end] for row, of_row in ends for start, end in row.segments]
        for transition, of_call in zip(one.transitions, values, strict=True):
            pairs = zip(recorded[transition.call_id], of_call, strict=True)
            found |= {transition.call_id} if any(abs(a - b) > TOLERANCE for a, b in pairs) else set()
    return found


CLAIMS = {
    **{
        name: Claim(
            arms=("base", "control", "random", "trained") if one.pretrained else ("control", "trained"),
            measure=partial(measure_pretrained if one.pretrained else measure, one),
            prepare=partial(prepare, one),
        )
        for name, one in EXAMPLES.items()
    },
    "pictures": Claim(arms=("trained",), measure=measure_pictures, prepare=prepare_pictures, seeds=1),
}
