"""What a policy's learning asks of its engine, and which settings stop a run before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from agentlightning.algorithms import LightningRL
from agentlightning.config.run import Config, parse_config
from agentlightning.engines.base import SKIPPED
from agentlightning.errors import ConfigError
from agentlightning.trainer.check import check_agent
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.policies import TrainedPolicy
from agentlightning.trainer.progress import Silent
from agentlightning.trainer.schedules import check_fit
from agentlightning.trainer.step import StepPlanner, update_policy, values_by_call
from agentlightning.training_types import Loss, TrainingSequence, Trajectory
from build import transition


class TalkingEngine:
    """Answers every verb with numbers that say which verb and token they are of, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str]]] = []
        self.trained: list[list[TrainingSequence]] = []
        self.policies: set[str] = set()

    def _say(self, verb: str, rows: Sequence[TrainingSequence], policy: str, thousands: int) -> list[list[float]]:
        self.asked.append((verb, [row.rollout_id for row in rows]))
        self.policies.add(policy)
        return [[float(thousands + token) for token in row.tokens] for row in rows]

    async def logprobs(self, rows: Sequence[TrainingSequence], policy: str) -> list[list[float]]:
        return self._say("logprobs", rows, policy, 1000)

    async def reference_logprobs(self, rows: Sequence[TrainingSequence], policy: str) -> list[list[float]]:
        return self._say("reference_logprobs", rows, policy, 2000)

    async def values(self, rows: Sequence[TrainingSequence], policy: str) -> list[list[float]]:
        return self._say("values", rows, policy, 0)

    async def forward_backward(self, rows: Sequence[TrainingSequence], loss: Loss, policy: str) -> dict[str, float]:
        self.trained.append(list(rows))
        self._say("forward_backward", rows, policy, 0)
        return {"loss": 1.0, "tokens": 1.0}

    async def optim_step(self, learning_rate: float, grad_clip: float, policy: str) -> dict[str, float]:
        self.asked.append(("optim_step", []))
        return {"grad_norm": 1.0}


def config(**tables: Any) -> Config:
    least = {"model": {"path": "m"}, "agent": {"run": "a.py:f"}, "data": {"train": "t"}}
    return parse_config({**least, **tables})


def trained(algorithm: LightningRL) -> TrainedPolicy:
    return TrainedPolicy(config=config(), algorithm=algorithm, value={})


def planner(engine: TalkingEngine, algorithm: LightningRL) -> StepPlanner:
    return StepPlanner(
        policies={"white": trained(algorithm)},
        run_id="run",
        folder=Path("none"),
        store=cast(Any, None),
        engine=cast(Any, engine),
        progress=Silent(),
        learning_rate=1.0,
    )


async def update(engine: TalkingEngine, algorithm: LightningRL) -> dict[str, float]:
    plan = algorithm.plan([GROUP], seed=0)
    return await update_policy(cast(Any, engine), "white", trained(algorithm), plan, 1e-3, Silent())


def trajectory(name: str, reward: float) -> Trajectory:
    """Two calls of two tokens with prompts of their own, and so two rows."""
    transitions = [transition(f"{name}/{place}", sampled_ids=[10 + place, 20 + place]) for place in range(2)]
    return Trajectory(rollout_id=name, group_id=name[0], reward=reward, transitions=transitions)


GROUP = [trajectory(f"a{number}", float(number == 0)) for number in range(6)]


async def test_old_and_reference_logprobs_are_asked_once_before_the_first_update() -> None:
    engine = TalkingEngine()
    algorithm = LightningRL(correction="old_policy", kl=0.1, epochs=2, minibatches=3)
    await update(engine, algorithm)
    verbs = [verb for verb, _ in engine.asked]
    assert verbs[:6] == ["logprobs", "reference_logprobs"] * 3
    assert verbs[6:] == ["forward_backward", "optim_step"] * 6
    asked = [rollout for verb, rollouts in engine.asked if verb == "logprobs" for rollout in rollouts]
    assert sorted(asked) == sorted([f"a{number}" for number in range(6)] * 2)
    for row in (row for rows in engine.trained for row in rows):
        assert row.old_logprobs == [1000.0 + token for token in row.tokens]
        assert row.ref_logprobs == [2000.0 + token for token in row.tokens]
    assert engine.policies == {"white"}


async def test_the_sampler_gap_is_the_divergence_before_the_steps_first_update() -> None:
    class Drifting(TalkingEngine):
        """Goes further from the sampler with every update."""

        async def forward_backward(self, rows: Sequence[TrainingSequence], loss: Loss, policy: str) -> dict[str, float]:
            metrics = await super().forward_backward(rows, loss, policy)
            return metrics | {"kl": 0.1 * len(self.trained), "ratio_max": float(len(self.trained))}

    algorithm = LightningRL(minibatches=3)
    metrics = await update(Drifting(), algorithm)
    assert metrics["sampler_gap"] == 0.1
    assert (metrics["kl"], metrics["ratio_max"], metrics["updates"]) == (pytest.approx(0.2), 3.0, 3.0)


async def test_an_update_that_an_engine_skips_is_counted_and_the_step_s_means_are_of_the_others() -> None:
    class Overflowing(TalkingEngine):
        """Its first gradient is not finite."""

        async def forward_backward(self, rows: Sequence[TrainingSequence], loss: Loss, policy: str) -> dict[str, float]:
            metrics = await super().forward_backward(rows, loss, policy)
            return metrics | {"loss": float("inf") if len(self.trained) == 1 else 3.0, "kl": 0.5}

        async def optim_step(self, learning_rate: float, grad_clip: float, policy: str) -> dict[str, float]:
            await super().optim_step(learning_rate, grad_clip, policy)
            return {**SKIPPED} if len(self.trained) == 1 else {"grad_norm": 1.0}

    metrics = await update(Overflowing(), LightningRL(minibatches=3))
    assert metrics == {
        "updates": 2.0,
        "skipped_updates": 1.0,
        "loss": 3.0,
        "kl": 0.5,
        "sampler_gap": 0.5,
        "grad_norm": 1.0,
    }


async def test_the_critic_is_asked_for_every_sampled_token_of_every_call() -> None:
    engine = TalkingEngine()
    algorithm = LightningRL(advantage="gae")
    values = await values_by_call(engine.values, "white", [GROUP[:1], GROUP[1:]])
    expected = {f"a{number}/{place}": [10.0 + place, 20.0 + place] for number in range(6) for place in range(2)}
    assert values == expected
    plan, _ = await planner(engine, algorithm).plan_policy("white", 1, [GROUP])
    assert all(row.returns is not None for rows in plan.minibatches for row in rows)


async def test_what_would_stop_training_stops_the_check_of_an_agent(tmp_path: Path) -> None:
    wrong = config(algorithm={"loss": {"dual_clip": 1.1}})
    with pytest.raises(ConfigError, match=r"algorithm\.loss: dual_clip: expected a number above 1 \+ clip_high"):
        await check_agent(wrong, RunFolder(tmp_path, "run"), Silent(), 1)
    assert not (tmp_path / "run").exists()
    reinforce = LightningRL(loss="reinforce", minibatches=1)
    with pytest.raises(ConfigError, match=r"algorithm\.correction: expected 'importance'"):
        check_fit(reinforce, config(trainer={"max_staleness": 1}))
