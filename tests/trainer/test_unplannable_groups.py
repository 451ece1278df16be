"""A group of whose rewards no update can be planned is left out with a warning; the run goes on, and so does its resume."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from loop_doubles import EVERY, GROUP, STEPS, TASKS, Noting, RememberingEngine, agents, killed_and_resumed, loop
from loop_doubles import reward_of as usual_reward

from agentlightning.algorithms.lightning_rl import LightningRL, UpdatePlan
from agentlightning.errors import AgentError
from agentlightning.records import Claim, Outcome
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.trainer.step import plan_groups
from agentlightning.training_types import Trajectory
from build import trajectory

HUGE = sys.float_info.max
BAD = "train:2:0"
"""The first group of the second step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAlgorithm(LightningRL):
    """A user's own, which cannot cope with a reward of -7."""

    everywhere: bool = False

    def plan(self, groups: Sequence[Sequence[Trajectory]], seed: int, **inputs: Any) -> UpdatePlan:
        if self.everywhere or any(one.reward == -7 for group in groups for one in group):
            raise KeyError("a reward of -7")
        return LightningRL.plan(self, groups, seed, **inputs)


def spoiled(value: float) -> Callable[[Claim], float]:
    return lambda claim: value if claim.rollout.group_id == BAD else usual_reward(claim)


async def outcomes(store: LightningStore) -> dict[str, set[Outcome]]:
    """By group, of the steps' lists."""
    found: dict[str, set[Outcome]] = {}
    rollouts = {one.id: one for one in await store.rollouts(RolloutQuery(run_id="run"))}
    for step in await store.steps("run"):
        for one in step.consumed:
            found.setdefault(rollouts[one.rollout_id].group_id, set()).add(one.outcome)
    return found


@pytest.mark.parametrize(
    ("algorithm", "value", "reason"),
    [
        (LightningRL(group_size=GROUP, minibatches=1, advantage="maxrl"), -1.0, "maxrl expects rewards of at least 0"),
        (OwnAlgorithm(group_size=GROUP, minibatches=1), -7.0, "a reward of -7"),
    ],
)
async def test_a_group_that_cannot_be_planned_is_left_out_with_a_warning(
    store: LightningStore, tmp_path: Path, algorithm: LightningRL, value: float, reason: str
) -> None:
    training, progress = loop(store, RememberingEngine(), tmp_path, val=[], algorithm=algorithm), Noting()
    training.progress = progress
    training.planner = replace(training.planner, progress=progress)
    async with agents(store, reward_of=spoiled(value)):
        assert await training.run(resume=False) == STEPS
    found = await outcomes(store)
    assert [group for group, of_group in found.items() if "invalid" in of_group] == [BAD]
    [warning] = [note for note in progress.notes if "cannot be planned" in note]
    assert warning.startswith(f"step 2: 1 groups cannot be planned and are left out, {BAD} first: ")
    assert reason in warning
    assert [(one.step, one.value) for one in await store.metrics("run", "rollout/unrewarded")] == [(2, GROUP)]


@EVERY
async def test_a_run_that_is_killed_over_such_a_group_ends_as_if_it_never_was(
    store: LightningStore, tmp_path: Path, every: int
) -> None:
    own, whole = OwnAlgorithm(group_size=GROUP, minibatches=1), RememberingEngine()
    async with agents(store, reward_of=spoiled(-7.0)):
        await loop(store, whole, tmp_path / "whole", val=[], algorithm=own).run(resume=False)
    runs = killed_and_resumed(
        store,
        4 * every,
        lambda *made: loop(*made[:2], tmp_path, made[2], [], own),
        lambda run: agents(store, run=run, reward_of=spoiled(-7.0)),
    )
    async for run, engine in runs:
        assert engine.updates == whole.updates, run


async def test_an_algorithm_of_ones_own_that_fails_for_every_group_ends_the_run_with_its_error(
    store: LightningStore, tmp_path: Path
) -> None:
    own = OwnAlgorithm(group_size=GROUP, minibatches=1, everywhere=True)
    async with agents(store):
        with pytest.raises(AgentError, match=r"OwnAlgorithm' failed: KeyError: 'a reward of -7'"):
            await loop(store, RememberingEngine(), tmp_path, val=[], algorithm=own).run(resume=False)


async def test_a_group_that_cannot_be_planned_is_resampled_where_those_without_a_signal_are(
    store: LightningStore, tmp_path: Path
) -> None:
    own = OwnAlgorithm(group_size=GROUP, minibatches=1, dynamic_sampling=True)

    def differing(claim: Claim) -> float:
        return -7.0 if claim.rollout.group_id == BAD else float(claim.rollout.replica)

    async with agents(store, reward_of=differing):
        await loop(store, RememberingEngine(), tmp_path, val=[], algorithm=own).run(resume=False)
    sizes = [len(step.consumed) for step in await store.steps("run")]
    assert sizes == [TASKS * GROUP, (TASKS + 1) * GROUP, TASKS * GROUP]


async def test_agents_that_call_themselves_otherwise_in_a_later_step_end_no_run(
    store: LightningStore, tmp_path: Path
) -> None:
    (tmp_path / "names.py").write_text("def chosen(call):\n    return call.versions[0].version == 1\n")
    own = LightningRL(group_size=GROUP, minibatches=1, agents=(f"{tmp_path}/names.py:chosen",))
    engine = RememberingEngine()
    training, progress = loop(store, engine, tmp_path, val=[], algorithm=own), Noting()
    training.planner = replace(training.planner, progress=progress)
    async with agents(store, reward_of=lambda claim: float(claim.rollout.replica)):
        assert await training.run(resume=False) == STEPS
    assert len([note for note in progress.notes if "no call of this step is learned from" in note]) == STEPS - 1
    assert len(engine.updates) == 1


# --- rewards that no store takes in any more ------------------------------------------------------------------------------


def a_group(name: str, *rewards: float) -> list[Trajectory]:
    return [
        trajectory(f"{name}-{number}", reward, calls=1, group_id=name, rewards={"reward": reward, "style": reward})
        for number, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    "advantage", ["grpo", "dr_grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "maxrl"]
)
@pytest.mark.parametrize("rewards", [(HUGE, HUGE), (1e155, -1e155)])
def test_rewards_near_the_end_of_numbers_leave_the_step_as_it_were_without_them(
    advantage: str, rewards: tuple[float, float]
) -> None:
    loss = {"loss": "reinforce"} if advantage == "reinforce" else {}
    own = LightningRL(group_size=2, minibatches=1, advantage=advantage, **loss)
    good = a_group("good", 1.0, 0.0)
    found, _ = plan_groups(own, [a_group("bad", *rewards), good], seed=0)
    wanted = own.plan([good], seed=0)
    assert [[row.advantages for row in part] for part in found.minibatches] == [
        [row.advantages for row in part] for part in wanted.minibatches
    ]
    assert found.stats["reward_mean"] == wanted.stats["reward_mean"]
    assert {one for one, outcome in found.outcomes.items() if outcome == "invalid"} == {"bad-0", "bad-1"}


def test_a_mistake_in_the_settings_is_still_an_error() -> None:
    own = LightningRL(group_size=2, minibatches=1, kl=0.1, advantage="reinforce_pp")
    with pytest.raises(ValueError, match="reference"):
        plan_groups(own, [a_group("good", 1.0, 0.0)], seed=0)
