"""Golden steps: the rows, weights and loss that an engine receives for generated groups, held against stored digests.

A change of the rows of any of these settings is a change of what is learned. `python tests/trainer/test_golden_step.py`
writes the file anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from agentlightning.algorithms.credit import Evidence
from agentlightning.algorithms.credit.tree import RolloutTree
from agentlightning.algorithms.critic import Gae
from agentlightning.algorithms.lightning_rl import LightningRL, UpdatePlan
from agentlightning.algorithms.losses import Cispo, FixedLength, Importance, KlTerm, PpoClip, RatioMask
from agentlightning.training_types import Loss, TrainingSequence, Trajectory
from build import linked, transition

GOLDEN = Path(__file__).with_name("golden_step.json")
DIGITS = 9
GROUP_SIZE = 4

SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": FixedLength(length=64)},
    "rloo": {"advantage": "rloo"},
    "reinforce": {"advantage": "reinforce", "loss": "reinforce", "minibatches": 1},
    "reinforce_pp": {"advantage": "reinforce_pp"},
    "reinforce_pp, KL in the reward": {"advantage": "reinforce_pp", "kl": 0.1},
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline"},
    "maxrl": {"advantage": "maxrl"},
    "gae": {"advantage": "gae"},
    "gae, clipped and discounted": {
        "advantage": Gae(gamma=0.99, call_gamma=0.9, lam=0.8, clip=0.2),
    },
    "gspo": {"loss": "gspo"},
    "cispo": {"loss": Cispo(clip_high=3.0)},
    "ppo_clip, dual clip": {"loss": PpoClip(dual_clip=3.0)},
    "importance": {"correction": Importance(level="call", cap=4.0)},
    "ratio mask": {"correction": RatioMask(low=0.8, high=2.0)},
    "sequence_mean": {"aggregation": "sequence_mean"},
    "rollout_mean": {"aggregation": "rollout_mean"},
    "fixed_length": {"aggregation": FixedLength(length=32)},
    "KL and entropy": {"kl": KlTerm(coefficient=0.02, estimator="k2"), "entropy": 0.01, "epochs": 2},
    "discounted": {"credit": {"type": "discounted", "gamma": 0.8}},
    "last": {"credit": "last"},
    "step_rewards": {"credit": {"type": "step_rewards", "gamma": 0.9}},
    "gigpo": {"credit": "gigpo"},
    "grouped_gae": {"credit": {"type": "grouped_gae", "lam": 0.9}},
    "counterfactual": {"credit": "counterfactual"},
    "decisive": {"credit": "decisive"},
    "learned": {"credit": "learned"},
    "judge": {"credit": "judge"},
    "forked": {"credit": "forked"},
    "tree": {"rollouts": RolloutTree(roots=2, rounds=1)},
    "dynamic sampling": {"dynamic_sampling": True},
    "solved bonus": {"solved_bonus": 0.1},
    "weighted rewards": {"reward_weights": {"right": 1.0, "short": 0.25}},
    "one agent of two": {"agents": ("solver",)},
}
"""What is set of LightningRL, besides `group_size`."""


def groups_of(seed: int, agents: tuple[str, ...] | None = None) -> list[list[Trajectory]]:
    """Groups of mixed, equal, missing and failed rewards; turns of two agents with step rewards and forced tokens."""
    dice = random.Random(seed)
    rewards = [
        [1.0, 0.0, 0.5, 0.0],
        [1.0, 1.0, 1.0, 1.0],
        [0.0, 0.0, 0.0, 0.0],
        [1.0, math.nan, 0.0, 1.0],
        [0.25, 1.0],
        [0.0, 1.0, 0.0, 1.0],
    ]
    return [
        [
            _trajectory(f"{seed}-{number}-{place}", f"g{number}", reward, dice, agents)
            for place, reward in enumerate(row)
        ]
        for number, row in enumerate(rewards)
    ]


def _trajectory(
    name: str, group: str, reward: float, dice: random.Random, agents: tuple[str, ...] | None
) -> Trajectory:
    calls = []
    for number in range(dice.randint(1, 3)):
        length = dice.randint(2, 5)
        agent = dice.choice(("solver", "checker"))
        step = dice.choice((0.0, 0.0, 0.5))
        calls.append(
            transition(
                f"{name}/{number}",
                suffix_ids=[dice.randint(1, 9) for _ in range(dice.randint(1, 3))]
                if number
                else [1, 2, ord(group[-1])],
                sampled_ids=[dice.randint(10, 12) for _ in range(length)],
                logprobs=[-dice.randint(1, 2000) / 1000 for _ in range(length)],
                agent=agent,
                trained=agents is None or agent in agents,
                reward=step,
                rewards={"progress": step} if step else {},
                decoding={"forced": [[0, 1]]} if dice.random() < 0.3 else {},
                messages=[{"role": "user", "content": f"{group} {number}"}],
                completion={"role": "assistant", "content": str(dice.randint(0, 1))},
                temperature=dice.choice((1.0, 0.7)),
            )
        )
    return Trajectory(
        rollout_id=name,
        group_id=group,
        reward=reward,
        rewards={"right": reward, "short": dice.randint(0, 4) / 4},
        transitions=linked(calls),
    )


def in_trees(groups: list[list[Trajectory]]) -> list[list[Trajectory]]:
    """Each group as two trees: the third and the fourth rollout repeat the first call of the first and the second."""
    return [
        [
            dataclasses.replace(one, replayed={f"replayed/{one.rollout_id}": group[place - 2].transitions[0].call_id})
            if place >= 2
            else one
            for place, one in enumerate(group)
        ]
        for group in groups
    ]


def decided(groups: list[list[Trajectory]]) -> list[list[Trajectory]]:
    """Each rollout's first call samples one thing if the rollout succeeds and another if it fails."""
    return [[_decided(one) for one in group] for group in groups]


def _decided(one: Trajectory) -> Trajectory:
    first, *rest = one.transitions
    sampled = [10 + (one.reward >= 0.5)] * 2
    decisive = dataclasses.replace(first, sampled_ids=sampled, logprobs=first.logprobs[:2], decoding={})
    return dataclasses.replace(one, transitions=linked([decisive, *rest]))


def plan_of(settings: dict[str, Any], seed: int) -> UpdatePlan:
    algorithm = LightningRL(group_size=GROUP_SIZE, **{"minibatches": 4, **settings})
    groups = groups_of(seed, settings.get("agents"))
    groups = in_trees(groups) if algorithm.tree is not None else groups
    groups = decided(groups) if settings.get("credit") == "decisive" else groups
    dice = random.Random(seed)
    rollouts = [one for group in groups for one in group]
    numbers = {
        call.call_id: [dice.randint(0, 1000) / 1000 for _ in call.sampled_ids]
        for one in rollouts
        for call in one.transitions
    }
    evidence = Evidence(
        history=groups_of(seed + 100, settings.get("agents")),
        scores={one.rollout_id: dice.randint(0, 10) / 10 for one in rollouts},
        fork_returns={
            one.rollout_id: {call.call_id: [1.0, 0.0, 1.0] for call in one.transitions[1:]} for one in rollouts[::2]
        },
    )
    reference = {call: [-number for number in of_call] for call, of_call in numbers.items()}
    return algorithm.plan(groups, seed, evidence, values=numbers, reference=reference)


def golden(name: str) -> dict[str, Any]:
    """What an engine receives under these settings, rows as a digest."""
    plans = [plan_of(SETTINGS[name], seed) for seed in (0, 1)]
    return {
        "rows": digest([[map(row_of, part) for part in plan.minibatches] for plan in plans]),
        "outcomes": digest([sorted(plan.outcomes.items()) for plan in plans]),
        "resample": [plan.resample for plan in plans],
        "loss": terms(plans[0].loss),
    }


def row_of(row: TrainingSequence) -> list[Any]:
    columns = (
        row.logprobs,
        row.advantages,
        row.weights,
        row.kl_weights,
        row.entropy_weights,
        row.returns,
        row.values,
    )
    return [row.rollout_id, row.tokens, row.mask, *columns, row.segments, row.temperature, row.decodings]


def terms(loss: Loss) -> dict[str, Any]:
    """The terms of the loss that are not their defaults."""
    fields = [one.name for one in dataclasses.fields(loss)]
    return {name: getattr(loss, name) for name in fields if getattr(loss, name) != getattr(Loss(), name)}


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(plain(value)).encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS) + 0.0  # without the sign of a zero
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, str | int | None):
        return value
    return [plain(one) for one in value]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_of_these_settings_gives_an_engine_the_same_rows(name: str) -> None:
    assert golden(name) == json.loads(GOLDEN.read_text())[name]


def test_no_two_settings_that_change_rows_or_loss_are_one() -> None:
    stored = json.loads(GOLDEN.read_text())
    assert stored.keys() == SETTINGS.keys()
    assert len({json.dumps(one) for one in stored.values()}) == len(stored)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: golden(name) for name in SETTINGS}, indent=1) + "\n")
