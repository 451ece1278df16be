"""Claims about credit rules: agents of a tiny language model, every rule, equal compute, one process per cell.

Compute is counted in token forwards: one for a token that is sampled (in rollouts and forks), one for a prompt token
that is read for the first time in its rollout or by a critic, three for a token of a row that is trained (packed arms:
that the learner computes). Rows end with their last call that has an advantage. Evaluations, at temperature 1 on 200
held-out tasks, are free. All arms of a task and seed have the same budget, warm-started model, tasks, noise and
settings; learning rates and budgets suit `uniform`. Baselines that have not reached the goal within the budget go on to
twice the budget. Figures: rollouts, after (the mean of the budget's last three evaluations), reached_in_budget.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, cast

from claim import HELD_OUT, HELD_OUT_SEED, Cell, Claim, Outcome, Points
from credit_agents import CONTEXT, Execution, Sampler
from credit_tasks import DECIDES, TASKS, SuiteTask

from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.credit import Credit, Evidence, credit_rule
from agentlightning.algorithms.credit.forked import chosen_calls
from agentlightning.algorithms.credit.rule import HISTORY
from agentlightning.algorithms.rewards import shaped_air
from agentlightning.config.engine import EngineConfig
from agentlightning.config.run import parse_config
from agentlightning.demo import tiny_model
from agentlightning.demo.imitation import Imitation, batches, encode_all, imitate
from agentlightning.engines.base import DEFAULT_POLICY, Engine, EngineNeeds, LearnerSetup
from agentlightning.engines.local.learner import Learner
from agentlightning.records import JSON
from agentlightning.runner.air import load_air
from agentlightning.trainer.policies import TrainedPolicy
from agentlightning.trainer.progress import Silent
from agentlightning.trainer.step import update_policy, values_by_call
from agentlightning.training_types import Loss, TrainingSequence, Trajectory, Transition

GROUP, MINIBATCHES, TASKS_PER_STEP = 8, 2, 4
DEMONSTRATIONS = 3000
EVALUATIONS = 10
"""At equal fractions of the budget, and one before training."""
GOAL = 0.8
QUICK_BUDGET, QUICK_HELD_OUT = 30_000.0, 20


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of assigning credit; all else is equal."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Of LightningRL."""
    steps: bool = False
    """True where step rewards are shown to it."""
    coin: bool = False
    """True where the rewards of training are a coin's."""
    air: dict[str, Any] = field(default_factory=dict)
    """A table [air]; only for tasks with tools."""
    packed: bool = False
    """True where `packing = "prefix_tree"`."""
    decisive: bool = False
    """True where it makes sense only where one call is known to decide and others are ignored."""


def action(transition: Transition) -> str:
    """Returns what the agents of the suite read of a completion; all that they do not read is the same action."""
    text = str(transition.completion["content"])
    return text if re.match(r"<|Answer: |Route: |door ", text) else ""


@credit_rule("oracle", each="group", reads_steps=False)
def oracle(group: Sequence[Trajectory]) -> list[Credit]:
    """The reward less the group's mean for the call that decides, and nothing for the others."""
    mean = statistics.fmean(one.reward for one in group)
    return [
        Credit(
            values=[(one.reward - mean) * call.rewards.get(DECIDES, 0.0) for call in one.transitions],
            shares=[0.0] * len(one.transitions),
        )
        for one in group
    ]


def rule(name: str, **settings: Any) -> dict[str, Any]:
    return {"credit": {"type": name, **settings}}


KEY = f"{__file__}:action"
AIR = {"text_tool_error": "^(error|empty|none)$", "rules": {"tool_error": -0.2, "repeated_state": -0.2}}
NAMED = ("last", "discounted", "gigpo", "grouped_gae", "counterfactual", "learned", "decisive", "forked")
ARMS = {
    "uniform": Arm(),
    **{name: Arm(settings=rule(name)) for name in NAMED},
    "step_rewards": Arm(settings=rule("step_rewards"), steps=True),
    "counterfactual_key": Arm(settings=rule("counterfactual", key=KEY), decisive=True),
    "decisive_key": Arm(settings=rule("decisive", key=KEY), decisive=True),
    "forked_lean": Arm(settings=rule("forked", forks=2, calls=1)),
    "gae": Arm(settings={"advantage": {"type": "gae", "learning_rate": 0.003, "backbone_grad_scale": 0.3}}),
    "packed": Arm(packed=True),
    "tree": Arm(settings={"rollouts": "tree"}, packed=True),
    "air": Arm(settings=rule("step_rewards"), air=AIR),
    "random_reward": Arm(coin=True),
    "oracle": Arm(settings=rule(f"{__file__}:oracle"), decisive=True),
}


class CountingEngine:
    """An engine whose learner is called in this process; it counts compute."""

    def __init__(self, learner: Learner, *, packed: bool) -> None:
        self._learner, self._packed = learner, packed
        self.compute = 0

    async def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Loss, policy: str
    ) -> dict[str, float]:
        self.compute += 0 if self._packed else 3 * sum(len(one.tokens) for one in sequences)
        return dict(self._learner.forward_backward(sequences, loss))

    async def values(self, sequences: Sequence[TrainingSequence], policy: str) -> list[list[float]]:
        self.compute += sum(len(one.tokens) for one in sequences)
        return list(self._learner.values(sequences))

    async def optim_step(self, learning_rate: float, grad_clip: float, policy: str) -> dict[str, float]:
        metrics = self._learner.optim_step(learning_rate, grad_clip)
        self.compute += 3 * round(metrics["learner_tokens"]) if self._packed else 0
        return dict(metrics)


class Trainer:
    """One policy and how it learns."""

    def __init__(self, task: SuiteTask, arm: Arm, seed: int, model: Path, folder: Path) -> None:
        self.task, self.arm = task, arm
        self.algorithm = LightningRL(group_size=GROUP, minibatches=MINIBATCHES, **arm.settings)
        setup = LearnerSetup(
            config=EngineConfig(device="cpu", packing="prefix_tree" if arm.packed else "padded"),
            needs=EngineNeeds(critic_learning_rate=self.algorithm.critic_learning_rate),
            learning_rate=task.learning_rate,
            seed=seed,
            threads=1,
        )
        self._learner = Learner(model, setup)
        self._engine = CountingEngine(self._learner, packed=arm.packed)
        self._sampler = Sampler(model, seed)
        self._weights, self._seed = folder / "weights", seed
        self._draw = Random(f"train {seed}")
        self._history: list[list[list[Trajectory]]] = []
        self._air = load_air(arm.air)
        table = {"model": {"path": str(model)}, "agent": {"run": "a.py:f"}, "data": {"train": "t"}}
        self._policy = TrainedPolicy(config=parse_config(table), algorithm=self.algorithm, value={})
        self.steps = self.rollouts = self._sampled = 0

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
        tree = self.algorithm.tree
        groups = []
        for place in range(TASKS_PER_STEP):
            task = self.task.sample(self._draw, "train")
            groups.append(
                [self._start(f"{self.steps}-{place}/{n}", task) for n in range(tree.roots if tree else GROUP)]
            )
        self._sample([one for group in groups for one in group])
        if tree is not None:
            forks = [[one for root in group for one in self._branches(root, tree.branches(GROUP))] for group in groups]
            self._sample([one for of_group in forks for one in of_group])
            groups = [group + of_group for group, of_group in zip(groups, forks, strict=True)]
        if self.arm.coin:
            for one in (one for group in groups for one in group):
                one.reward = float(Random(f"{self._seed} {one.name}").random() < 0.5)
        asyncio.run(self._learn(groups))
        self._learner.export(self._weights)
        self._sampler.load(self._weights, str(self.steps))

    def _start(self, name: str, task: JSON) -> Execution:
        return Execution(name, task, self.task.solve, self._sampler.words)

    def _branches(self, root: Execution, count: int) -> list[Execution]:
        """So many forks of a root, after calls chosen at random, each once before any a second time; of a root of one call,
        independent rollouts."""
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
        groups = shaped_air([[self._trajectory(one) for one in each] for each in executions], self.algorithm.call_gamma)
        engine, evidence, needs = cast(Engine, self._engine), Evidence(), self.algorithm.rule.needs
        values = await values_by_call(engine.values, DEFAULT_POLICY, groups) if self.algorithm.critic else None
        if "history" in needs:
            evidence = replace(evidence, history=[group for step in self._history[-HISTORY:] for group in step])
            self._history.append(groups)
        if "fork_returns" in needs:
            evidence = replace(evidence, fork_returns=self._fork_returns(executions, groups))
        plan = self.algorithm.plan(groups, seed=self._seed * 1_000_003 + self.steps, evidence=evidence, values=values)
        await update_policy(engine, DEFAULT_POLICY, self._policy, plan, self.task.learning_rate, Silent())

    def _trajectory(self, execution: Execution) -> Trajectory:
        trajectory: Trajectory = execution.trajectory(steps=self.arm.steps)
        if self._air is None:
            return trajectory
        earned: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for reward in self._air.rewards(execution.stored()):
            earned[str(reward.call_id)][reward.name] = reward.value
        calls = [replace(one, rewards=one.rewards | earned[one.call_id]) for one in trajectory.transitions]
        return replace(trajectory, transitions=calls)

    def _fork_returns(self, executions: Any, groups: Any) -> dict[str, dict[str, list[float]]]:
        """Returns of forks around the chosen calls, as `trainer.credit_inputs` samples them through a store."""
        settings, forks = self.algorithm.rule_settings, dict[tuple[str, str], list[Execution]]()
        for running, group in zip(executions, groups, strict=True):
            for execution, trajectory in zip(running, group, strict=True):
                chosen = {one.call_id for one in chosen_calls(trajectory, settings["calls"])}
                for place, (before, after) in enumerate(pairwise(one.call_id for one in trajectory.transitions), 1):
                    if chosen & {before, after}:
                        names = [f"{after}+{number}" for number in range(settings["forks"])]
                        forks[execution.name, after] = [execution.fork(name, place) for name in names]
        self._sample([one for several in forks.values() for one in several])
        returns: defaultdict[str, dict[str, list[float]]] = defaultdict(dict)
        for (name, call_id), several in forks.items():
            returns[name][call_id] = [one.reward or 0.0 for one in several]
        return dict(returns)


def warm_start(name: str, cell: Cell) -> None:
    """Makes the policy that all arms start from."""
    if cell.model.exists():
        return
    task, rng, demos = TASKS[name], Random(f"demonstrations {cell.seed}"), []
    for _ in range(DEMONSTRATIONS):
        demos += task.demonstrate(task.sample(rng, "train"), rng)
    texts = [message["content"] for demo in demos for message in demo]
    with tempfile.TemporaryDirectory(dir=cell.folder) as temporary:
        made = Path(temporary) / "model"
        special = {"special_words": task.special_words, "context": CONTEXT, **task.model}
        tiny_model.build(made, texts, seed=cell.seed, **special)
        settings = Imitation(steps=task.warm_start_steps, threads=1)
        imitate(made, batches(encode_all(made, demos), cell.seed), settings)
        made.rename(cell.model)  # whole, or not at all


def measure(name: str, cell: Cell) -> Outcome:
    """Trains one cell until its budget of compute is spent."""
    task = TASKS[name]
    budget, held_out = (QUICK_BUDGET, QUICK_HELD_OUT) if cell.quick else (task.budget * 1e6, HELD_OUT)
    rng = Random(f"test {HELD_OUT_SEED}")
    tasks = [task.sample(rng, "test") for _ in range(held_out)]
    with tempfile.TemporaryDirectory() as temporary:
        trainer = Trainer(task, ARMS[cell.arm], cell.seed, cell.model, Path(temporary))
        points: Points = [(0, trainer.success(tasks))]
        extend(points, trainer, tasks, budget, budget / EVALUATIONS)
        within, rollouts = list(points), trainer.rollouts
        if cell.arm in ("uniform", "packed") and max(value for _, value in points) < GOAL:
            extend(points, trainer, tasks, 2 * budget, budget / EVALUATIONS, GOAL)
    figures = {"rollouts": float(rollouts), "after": statistics.fmean(value for _, value in within[-3:])}
    figures["reached_in_budget"] = float(max(value for _, value in within) >= GOAL)
    return Outcome(points, figures)


def extend(
    points: Points, trainer: Trainer, tasks: list[JSON], until: float, every: float, goal: float = float("inf")
) -> None:
    """Trains until so much compute is spent, or until `goal`; adds an evaluation after each `every` of compute."""
    evaluated = trainer.compute // every
    while trainer.compute < until and points[-1][1] < goal:
        trainer.step()
        if trainer.compute >= every * (evaluated + 1):
            evaluated = trainer.compute // every
            points.append((trainer.compute, round(trainer.success(tasks), 4)))


def arms(task: SuiteTask) -> tuple[str, ...]:
    return tuple(
        name
        for name, arm in ARMS.items()
        if (task.decisive or not arm.decisive) and (task.special_words or not arm.air)
    )


CLAIMS = {
    f"credit-{name}": Claim(
        arms=arms(task),
        measure=partial(measure, name),
        prepare=partial(warm_start, name),
        goal=GOAL,
        baselines={"tree": "packed"},
        cost="compute, token forwards",
        seeds=5,
    )
    for name, task in TASKS.items()
}
