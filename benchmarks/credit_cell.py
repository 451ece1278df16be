"""One cell of the credit suite: a task, a contestant and a seed, trained until a budget of compute is spent.

Compute is counted in token forwards of the model, one for each of

- a token that is sampled, in rollouts and in forks of them, and a token of a prompt that is read for the first time in its
  rollout (a prefix that a later call or a fork shares is not read again);
- a token of a row that passes forward only: a critic's values before an update;

and three for a token of a row that is trained (forward and backward), or, of contestants that are packed, three for each
that the learner computes. Rollouts from which nothing is learned are in no row, and rows end with their last call that has
an advantage.
Evaluations are not counted. `credit_suite.py` drives it; it knows neither other cells nor what they show.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np

from agentlightning.algorithms.credit import Evidence
from agentlightning.algorithms.credit.forked import chosen_calls
from agentlightning.algorithms.credit.rule import HISTORY
from agentlightning.algorithms.lightning_rl import UpdatePlan
from agentlightning.algorithms.rewards import shaped_air
from agentlightning.config.engine import EngineConfig
from agentlightning.config.run import parse_config
from agentlightning.demo import tiny_model
from agentlightning.demo.imitation import Imitation, batches, encode_all, imitate
from agentlightning.engines.base import DEFAULT_POLICY, Engine
from agentlightning.engines.local.learner import Learner
from agentlightning.engines.setup import EngineNeeds, LearnerSetup
from agentlightning.records import JSON
from agentlightning.runner.air import load_air
from agentlightning.trainer.policies import TrainedPolicy
from agentlightning.trainer.progress import Silent
from agentlightning.trainer.step import critic_values, update_policy
from agentlightning.training_types import Loss, TrainingSequence, Trajectory
from credit_agents import CONTEXT, Execution, Sampler
from credit_figures import BASELINES, GOAL
from credit_rules import CONTESTANTS, GROUP, Contestant, true_credit
from credit_tasks import TASKS, SuiteTask

TASKS_PER_STEP = 4
DEMONSTRATIONS = 3000
HELD_OUT, HELD_OUT_SEED = 200, 12345
EVALUATIONS = 10
"""Of a cell, at equal fractions of its budget, and one before training."""
TRAINED, READ = 3, 1
"""Weights of a token that is trained, and of one that is read."""
CORRELATED_STEPS = 4
"""First steps, in which the policies of all rules are still much alike, whose credit is compared with the true one."""


@dataclass(frozen=True)
class Point:
    """Held-out success after so many rollouts and so much compute."""

    compute: int
    rollouts: int
    success: float


@dataclass(kw_only=True)
class Cell:
    """The result of one cell."""

    points: list[Point]
    """Evaluations up to its budget."""
    beyond: list[Point]
    """Those of a baseline after it, up to the goal or twice the budget: what others need is divided by what it needs."""
    steps: int
    correlation: float | None = None
    """Spearman's, of the calls' advantages with their true credit."""
    cpu_s: float = 0.0


def warm_start(task: SuiteTask, seed: int, folder: Path) -> float:
    """Makes the policy that all contestants start from in `folder`; returns the loss in nats per token."""
    rng = Random(f"demonstrations {seed}")
    demos = []
    for _ in range(DEMONSTRATIONS):
        demos += task.demonstrate(task.sample(rng, "train"), rng)
    texts = [message["content"] for demo in demos for message in demo]
    tiny_model.build(folder, texts, seed=seed, special_words=task.special_words, context=CONTEXT, **task.model)
    settings = Imitation(steps=task.warm_start_steps, threads=1)
    return imitate(folder, batches(encode_all(folder, demos), seed), settings)


def rows(task: SuiteTask, split: Any, count: int, seed: int) -> list[JSON]:
    rng = Random(f"{split} {seed}")
    return [task.sample(rng, split) for _ in range(count)]


class CountingEngine:
    """An engine whose learner is called as it is; it counts compute."""

    def __init__(self, learner: Learner, *, packed: bool) -> None:
        self._learner, self._packed = learner, packed
        self.compute = 0

    async def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Loss, policy: str
    ) -> dict[str, float]:
        if not self._packed:
            self.compute += TRAINED * sum(len(one.tokens) for one in sequences)
        return self._learner.forward_backward(sequences, loss)

    async def values(self, sequences: Sequence[TrainingSequence], policy: str) -> list[list[float]]:
        self.compute += READ * sum(len(one.tokens) for one in sequences)
        return self._learner.values(sequences)

    async def optim_step(self, learning_rate: float, grad_clip: float, policy: str) -> dict[str, float]:
        metrics = self._learner.optim_step(learning_rate, grad_clip)
        if self._packed:
            self.compute += TRAINED * round(metrics["learner_tokens"])
        return metrics


class Trainer:
    """One policy and how it learns."""

    def __init__(self, task: SuiteTask, contestant: Contestant, seed: int, model: Path, folder: Path) -> None:
        self.task, self.contestant, self.algorithm = task, contestant, contestant.algorithm()
        setup = LearnerSetup(
            config=EngineConfig(device="cpu", packing="prefix_tree" if contestant.packed else "padded"),
            needs=EngineNeeds(critic_learning_rate=self.algorithm.critic_learning_rate),
            learning_rate=task.learning_rate,
            seed=seed,
            threads=1,
        )
        self._learner = Learner(model, setup)
        self._engine = CountingEngine(self._learner, packed=contestant.packed)
        self._sampler = Sampler(model, seed)
        self._weights, self._seed = folder / "weights", seed
        self._draw = Random(f"train {seed}")
        self._history: list[list[list[Trajectory]]] = []
        self._rules = load_air(contestant.air)
        table = {"model": {"path": str(model)}, "agent": {"run": "a.py:f"}, "data": {"train": "t"}}
        self._policy = TrainedPolicy(config=parse_config(table), algorithm=self.algorithm, value={})
        self.steps = self.rollouts = self._sampled = 0
        self.pairs: list[tuple[float, float]] = []
        """(advantage, true credit) of the calls of the first steps."""

    @property
    def compute(self) -> int:
        return self._sampled + self._engine.compute

    def success(self, tasks: Sequence[JSON]) -> float:
        """Share of these tasks that are solved at temperature 1, with the same noise for every rule and step."""
        executions = [self._start(f"test/{index}", task) for index, task in enumerate(tasks)]
        for one in executions:
            one.to_the_end = False
        self._sampler.play(executions, 1.0)
        return statistics.fmean(one.reward or 0.0 for one in executions)

    def step(self) -> None:
        """Collects a group of each of the next tasks, learns from them, and samples from the new weights on."""
        self.steps += 1
        tasks = [self.task.sample(self._draw, "train") for _ in range(TASKS_PER_STEP)]
        names = [f"{self.steps}-{place}" for place in range(len(tasks))]
        tree = self.algorithm.tree
        groups = [
            [self._start(f"{name}/{one}", task) for one in range(tree.roots if tree else GROUP)]
            for name, task in zip(names, tasks, strict=True)
        ]
        self._sample([one for group in groups for one in group])
        if tree is not None:
            count = tree.branches(GROUP)
            forks = [[one for root in group for one in self._branches(root, count)] for group in groups]
            self._sample([one for of_group in forks for one in of_group])
            groups = [group + of_group for group, of_group in zip(groups, forks, strict=True)]
        if self.contestant.coin:
            for one in (one for group in groups for one in group):
                one.reward = float(Random(f"{self._seed} {one.name}").random() < 0.5)
        asyncio.run(self._learn(groups))
        self._learner.export(self._weights)
        self._sampler.load(self._weights, str(self.steps))

    def _start(self, name: str, task: JSON) -> Execution:
        return Execution(name, task, self.task.solve, self._sampler.words)

    def _branches(self, root: Execution, count: int) -> list[Execution]:
        """So many forks of a root, as `trainer.scheduler` has them: after calls chosen at random, each once before
        any a second time; of a root of one call, independent rollouts."""
        places = list(range(1, len(root.calls)))
        Random(f"{self._seed} {root.name}").shuffle(places)
        names = [f"{root.name}+{number}" for number in range(count)]
        if not places:
            return [self._start(name, root.task) for name in names]
        return [root.fork(name, places[number % len(places)]) for number, name in enumerate(names)]

    def _sample(self, executions: Sequence[Execution]) -> None:
        self._sampled += self._sampler.play(executions, 1.0)
        self.rollouts += len(executions)

    async def _learn(self, executions: Sequence[Sequence[Execution]]) -> None:
        groups = [[self._trajectory(one) for one in group] for group in executions]
        groups = shaped_air(groups, self.algorithm.call_gamma)
        engine = cast(Engine, self._engine)
        values = await critic_values(engine, DEFAULT_POLICY, self.algorithm, groups)
        evidence = self._evidence(executions, groups)
        plan = self.algorithm.plan(groups, seed=self._seed * 1_000_003 + self.steps, evidence=evidence, values=values)
        if self.task.decisive and self.steps <= CORRELATED_STEPS:
            self.pairs += pairs(groups, plan)
        await update_policy(engine, DEFAULT_POLICY, self._policy, plan, self.task.learning_rate, Silent())

    def _trajectory(self, execution: Execution) -> Trajectory:
        trajectory = execution.trajectory(steps=self.contestant.steps)
        if self._rules is None:
            return trajectory
        earned: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for reward in self._rules.rewards(execution.stored()):
            earned[str(reward.call_id)][reward.name] = reward.value
        calls = [replace(one, rewards=one.rewards | earned[one.call_id]) for one in trajectory.transitions]
        return replace(trajectory, transitions=calls)

    def _evidence(self, executions: Sequence[Sequence[Execution]], groups: list[list[Trajectory]]) -> Evidence:
        rule, evidence = self.algorithm.rule, Evidence()
        if "history" in rule.needs:
            evidence = replace(evidence, history=[group for step in self._history[-HISTORY:] for group in step])
            self._history.append(groups)
        if "fork_returns" in rule.needs:
            returns = self._fork_returns(executions, groups, self.algorithm.rule_settings)
            evidence = replace(evidence, fork_returns=returns)
        return evidence

    def _fork_returns(
        self,
        executions: Sequence[Sequence[Execution]],
        groups: Sequence[Sequence[Trajectory]],
        settings: dict[str, Any],
    ) -> dict[str, dict[str, list[float]]]:
        """Samples around the chosen calls, as `trainer.credit_inputs` does through a store."""
        forks: dict[tuple[str, str], list[Execution]] = {}
        for running, group in zip(executions, groups, strict=True):
            for execution, trajectory in zip(running, group, strict=True):
                chosen = {one.call_id for one in chosen_calls(trajectory, settings["calls"])}
                ids = [one.call_id for one in trajectory.transitions]
                for place, (before, after) in enumerate(pairwise(ids), 1):
                    if chosen & {before, after}:
                        forks[execution.name, after] = [
                            execution.fork(f"{after}+{number}", place) for number in range(settings["forks"])
                        ]
        self._sample([one for several in forks.values() for one in several])
        returns: dict[str, dict[str, list[float]]] = {}
        for (name, call_id), several in forks.items():
            returns.setdefault(name, {})[call_id] = [one.reward or 0.0 for one in several]
        return returns


def pairs(groups: Sequence[Sequence[Trajectory]], plan: UpdatePlan) -> list[tuple[float, float]]:
    """The mean advantage of each call's tokens and the call's true credit, where rewards of a group differ."""
    true: dict[str, float] = {}
    for group in groups:
        mean = statistics.fmean(one.reward for one in group)
        if len({one.reward for one in group}) > 1:
            for one in group:
                true |= zip((call.call_id for call in one.transitions), true_credit(one, mean), strict=True)
    found = {one.call.call_id: one.advantages for one in plan.calls}
    return [(float(np.mean(found[call_id])), credit) for call_id, credit in true.items() if np.size(found[call_id])]


def spearman(found: Sequence[tuple[float, float]]) -> float:
    """Spearman's rank correlation, equal numbers having their mean rank; 0 where one side is constant.

    >>> spearman([(1.0, 10.0), (2.0, 20.0), (3.0, 40.0)])
    1.0
    """
    ranks = [_ranks(np.array(column)) for column in zip(*found, strict=True)]
    if not ranks or any(np.ptp(one) == 0 for one in ranks):
        return 0.0
    return round(float(np.corrcoef(ranks)[0, 1]), 6)


def _ranks(numbers: Any) -> Any:
    _, inverse, counts = np.unique(np.round(numbers, 9), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def run_cell(task_name: str, rule: str, seed: int, model: Path, budget: float | None = None, **bounds: int) -> Cell:
    """Trains one cell. `budget`: in token forwards; the task's own by default. bounds: held_out, evaluations."""
    task, held_out = TASKS[task_name], bounds.get("held_out", HELD_OUT)
    spent, started = task.budget * 1e6 if budget is None else budget, time.process_time()
    tasks = rows(task, "test", held_out, HELD_OUT_SEED)
    evaluations = bounds.get("evaluations", EVALUATIONS)
    with tempfile.TemporaryDirectory() as temporary:
        trainer = Trainer(task, CONTESTANTS[rule], seed, model, Path(temporary))
        points = [Point(0, 0, trainer.success(tasks))]
        points += _train(trainer, tasks, spent, spent / evaluations, math.inf)
        steps, beyond = trainer.steps, list[Point]()
        if rule in BASELINES and max(one.success for one in points) < GOAL:
            beyond = _train(trainer, tasks, 2 * spent, spent / evaluations, GOAL)
    correlation = spearman(trainer.pairs) if trainer.pairs else None
    cpu_s = time.process_time() - started
    return Cell(points=points, beyond=beyond, steps=steps, correlation=correlation, cpu_s=cpu_s)


def _train(trainer: Trainer, tasks: list[JSON], until: float, every: float, goal: float) -> list[Point]:
    """Trains until so much compute is spent, or until `goal`; returns the evaluations, one after each `every` of compute."""
    points: list[Point] = []
    evaluated = trainer.compute // every
    while trainer.compute < until and not (points and points[-1].success >= goal):
        trainer.step()
        if trainer.compute >= every * (evaluated + 1):
            evaluated = trainer.compute // every
            points.append(Point(trainer.compute, trainer.rollouts, trainer.success(tasks)))
    return points
