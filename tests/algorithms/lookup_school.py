"""A class that learns the demo's lookup task in one process: a learner, a scheduler, and no server between them.

What a test gives is an algorithm's settings; the plan, the logprobs of trainer and reference, the critic's values and the
updates go the way they go in a run, through `StepPlanner`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

from transformers import AutoTokenizer

from agentlightning.algorithms import LightningRL
from agentlightning.config.run import parse_config
from agentlightning.demo import lookup
from agentlightning.demo.tasks import rows
from agentlightning.demo.tiny_model import END
from agentlightning.engines.base import DEFAULT_POLICY, Engine
from agentlightning.engines.local.decoder import open_decoder
from agentlightning.engines.local.learner import Learner
from agentlightning.engines.local.scheduler import SamplingRequest, Scheduler
from agentlightning.records import JSON
from agentlightning.trainer.policies import TrainedPolicy
from agentlightning.trainer.progress import Silent
from agentlightning.trainer.step import StepPlanner, update_policy
from agentlightning.training_types import Loss, TrainingSequence, Trajectory, Transition
from build import learner_setup
from call_tree import linked

TASKS = 32
LEARNING_RATE = 2e-3
HELD_OUT = 200


class InProcess:
    """An engine whose learner is called as it is."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    async def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Loss, policy: str
    ) -> dict[str, float]:
        return self._learner.forward_backward(sequences, loss)

    async def logprobs(self, sequences: Sequence[TrainingSequence], policy: str) -> list[list[float]]:
        return self._learner.logprobs(sequences)

    async def reference_logprobs(self, sequences: Sequence[TrainingSequence], policy: str) -> list[list[float]]:
        return self._learner.reference_logprobs(sequences)

    async def values(self, sequences: Sequence[TrainingSequence], policy: str) -> list[list[float]]:
        return self._learner.values(sequences)

    async def optim_step(self, learning_rate: float, grad_clip: float, policy: str) -> dict[str, float]:
        return self._learner.optim_step(learning_rate, grad_clip)


class School:
    """One policy and how it learns. `model` is a warm-started folder, `folder` a place for weights; coin: rewards of
    training say nothing."""

    def __init__(self, model: Path, folder: Path, algorithm: LightningRL, seed: int = 0, *, coin: bool = False) -> None:
        self.algorithm = algorithm
        self._folder = folder / "weights"
        self._seed = seed
        self._coin = coin
        rate = algorithm.critic_learning_rate
        self._learner = Learner(
            model,
            learner_setup(
                reference=algorithm.needs_reference,
                critic=None if rate is None else rate / LEARNING_RATE,
            ),
        )
        self._words = AutoTokenizer.from_pretrained(model)
        (self._end,) = self._words.convert_tokens_to_ids([END])
        self._scheduler = Scheduler(open_decoder(model), max_num_seqs=256, decode_text=self._words.decode)
        self._tasks = rows(cast(Any, lookup), "train", 2000, seed)
        self._step = 0
        config = parse_config(
            {
                "model": {"path": str(model)},
                "agent": {"run": "a.py:f"},
                "data": {"train": "t"},
                "trainer": {"seed": seed},
            }
        )
        self._planner = StepPlanner(
            policies={DEFAULT_POLICY: TrainedPolicy(config=config, algorithm=self.algorithm, value={})},
            run_id="school",
            folder=folder,
            store=cast(Any, None),
            engine=cast(Engine, InProcess(self._learner)),
            progress=Silent(),
            learning_rate=config.trainer.learning_rate,
        )

    def success(self) -> float:
        """Share of held-out tasks that are solved greedily."""
        tasks = rows(cast(Any, lookup), "test", HELD_OUT, 12345)
        talks = self._play([(f"test/{index}", task) for index, task in enumerate(tasks)], 0.0)
        return sum(talk.reward for talk in talks) / len(talks)

    def step(self) -> dict[str, float]:
        """Collect a group of each of the next tasks, learn from them, and sample from the new weights on."""
        self._step += 1
        tasks = [self._tasks.pop() for _ in range(TASKS)]
        size = self.algorithm.group_size
        names = [(f"{self._step}-{place}/{one}", task) for place, task in enumerate(tasks) for one in range(size)]
        talks = self._play(names, 1.0)
        if self._coin:
            talks = [replace(talk, reward=float(Random(talk.rollout_id).random() < 0.5)) for talk in talks]
        groups = [talks[start : start + size] for start in range(0, len(talks), size)]
        metrics = asyncio.run(self._learn(groups))
        self._learner.export(self._folder)
        self._scheduler.load(self._folder, str(self._step))
        return metrics

    async def _learn(self, groups: list[list[Trajectory]]) -> dict[str, float]:
        plan, _ = await self._planner.plan_policy(DEFAULT_POLICY, self._step, groups)
        (own,) = self._planner.policies.values()
        updates = await update_policy(self._planner.engine, DEFAULT_POLICY, own, plan, LEARNING_RATE, Silent())
        return plan.stats | updates

    def _play(self, tasks: Sequence[tuple[str, JSON]], temperature: float) -> list[Trajectory]:
        """`lookup.solve` of all tasks at a time."""
        talks = [Talk(name, task, self._encode("user", task["question"])) for name, task in tasks]
        for call in range(lookup.MAX_CALLS):
            going = [talk for talk in talks if talk.reward is None]
            dice = Random(f"{self._seed} {self._step} {call}")
            requests = [
                SamplingRequest(
                    prompt=talk.prompt,
                    max_tokens=lookup.MAX_TOKENS,
                    temperature=temperature,
                    seed=dice.getrandbits(60),
                    stop_ids=frozenset([self._end]),
                )
                for talk in going
            ]
            for request in requests:
                self._scheduler.submit(request)
            while self._scheduler.busy:
                self._scheduler.turn()
            for talk, request in zip(going, requests, strict=True):
                talk.hear(request, self._words.decode(request.sampled[:-1]), self._encode)
        return [talk.trajectory() for talk in talks]

    def _encode(self, role: str, text: str) -> list[int]:
        ids: list[int] = self._words.encode(f"<|{role}|>{text}{END}<|assistant|>", add_special_tokens=False)
        return ids


class Talk:
    """One execution of the agent: what `lookup.solve` holds between its calls."""

    def __init__(self, name: str, task: JSON, prompt: list[int]) -> None:
        self.prompt = prompt
        self.reward: float | None = None
        self._name, self._task = name, task
        self._transitions: list[Transition] = []

    def hear(self, request: SamplingRequest, text: str, encode: Any) -> None:
        self._transitions.append(
            Transition(
                call_id=f"{self._name}/{len(self._transitions)}",
                suffix_ids=self.prompt,
                sampled_ids=request.sampled,
                logprobs=request.logprobs,
                versions=[],
                temperature=request.temperature,
            )
        )
        wanted = re.fullmatch(r"<find>(.*)</find>", text)
        if request.finish != "stop":
            self.reward = 0.0
        elif wanted is None:
            self.reward = float(text == f"Answer: {self._task['answer']}")
        else:
            fact = lookup.find(self._task["corpus"], wanted[1])
            self.prompt = [*self.prompt, *request.sampled, *encode("user", fact)]

    def trajectory(self) -> Trajectory:
        return Trajectory(
            rollout_id=self._name,
            group_id=self._name.partition("/")[0],
            reward=self.reward or 0.0,
            transitions=linked(self._transitions),
        )
