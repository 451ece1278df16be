"""The training loop against a store in memory, agents that answer at random, and an engine that remembers its updates.

A `Crash` is raised at every verb that the run has. Whatever the point, the resumed run must end in the state of a run that
was never interrupted.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loop_doubles import (
    EVERY,
    GROUP,
    STEPS,
    TASKS,
    Countdown,
    Crash,
    Crashing,
    RememberingEngine,
    agents,
    killed_and_resumed,
    loop,
)

from agentlightning.algorithms.credit import Evidence, credit_rule
from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.settings import NamedPart
from agentlightning.errors import AgentError, ConflictError, LearnerLostError, NoCallsError
from agentlightning.records import Reward
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.trainer.loop import RLLoop
from agentlightning.training_types import Trajectory


async def finished(store: LightningStore, folder: Path) -> RememberingEngine:
    engine = RememberingEngine()
    assert await loop(store, engine, folder).run(resume=False) == STEPS
    return engine


async def test_every_finished_training_rollout_is_consumed_by_exactly_one_step_and_no_version_is_used_twice(
    store: LightningStore, tmp_path: Path
) -> None:
    async with agents(store):
        engine = await finished(store, tmp_path)
    steps = await store.steps("run")
    consumed = [each.rollout_id for step in steps for each in step.consumed]
    trained = await store.rollouts(RolloutQuery(run_id="run", mode="train"))
    assert [step.state for step in steps] == ["closed"] * STEPS
    assert sorted(consumed) == [rollout.id for rollout in trained]
    assert all(rollout.outcome in ("trained", "zero_variance") for rollout in trained)
    evaluated = await store.rollouts(RolloutQuery(run_id="run", mode="eval"))
    assert len(evaluated) == 5  # greedy before, after steps 2 and 3; T = 1 before and after
    assert all(rollout.outcome is None for rollout in evaluated)
    assert engine.served == sorted(set(engine.served))
    assert [step.version for step in steps] == engine.served[1:]


@EVERY
async def test_a_run_killed_at_any_verb_resumes_to_the_state_of_one_that_was_not(
    store: LightningStore, tmp_path: Path, every: int
) -> None:
    async with agents(store):
        expected = (await finished(store, tmp_path / "whole")).updates
    runs = killed_and_resumed(
        store, every, lambda *made: loop(*made[:2], tmp_path, made[2]), lambda run: agents(store, run=run)
    )
    async for run, engine in runs:
        trained = await store.rollouts(RolloutQuery(run_id=run, mode="train"))
        steps = await store.steps(run)
        assert engine.updates == expected, run
        assert len(trained) == STEPS * TASKS * GROUP, "a rollout was sampled again"
        consumed = [each.rollout_id for step in steps for each in step.consumed]
        assert sorted(consumed) == [rollout.id for rollout in trained]
        assert all(step.state == "closed" for step in steps)


async def late(store: LightningStore, run: str) -> None:
    """Everything that can still be recorded of rollouts that have finished, and would change what is learned from them."""
    finished = await store.rollouts(RolloutQuery(run_id=run, mode="train", states=["succeeded"]))
    calls = await store.calls([rollout.id for rollout in finished])
    await store.append_calls([replace(call, id=f"{call.id}-late", suffix_ids=[9, 9]) for call in calls])
    of = {(call.rollout_id): call for call in calls}
    place = [{"run_id": run, "rollout_id": each.id, "attempt": each.attempt} for each in finished if each.id in of]
    for source, call_id in (("posted", None), ("emitted", None), ("air", "call"), ("function", "call")):
        await store.record_rewards(
            [
                Reward(
                    **one,
                    id=f"late-{source}-{one['rollout_id']}",
                    value=number % 3 - 1.0,
                    source=source,
                    call_id=None if call_id is None else of[one["rollout_id"]].id,
                    created_ns=1,  # the clock of whoever sends it may be slow
                )
                for number, one in enumerate(place)
            ]
        )


@credit_rule("back", each="step", needs=("history",))
def back(groups: Sequence[Sequence[Trajectory]], evidence: Evidence, *, history: int = 2) -> Any:
    """A rule whose credit depends on what earlier steps earned."""
    earlier = sum(one.reward for group in evidence.history for one in group)
    return [[[one.reward * (2.0 + earlier)] * len(one.transitions) for one in group] for group in groups]


@pytest.mark.parametrize("ticks", [11, 25])
@pytest.mark.parametrize("history", [0, 2])
async def test_what_is_recorded_after_a_step_opened_is_not_learned_from_when_it_is_executed_again(
    store: LightningStore, tmp_path: Path, ticks: int, history: int
) -> None:
    algorithm = LightningRL(group_size=GROUP, minibatches=1, credit=NamedPart(type=back.path, history=history))
    crashed = RememberingEngine()
    async with agents(store):
        with pytest.raises(Crash):  # in the engine, soon after an update
            await loop(store, Crashing(crashed, Countdown(ticks)), tmp_path, algorithm=algorithm).run(resume=False)
        before = list(crashed.updates)
        assert before
        opened = await store.steps("run")
        await late(store, "run")
        again = RememberingEngine()
        await loop(store, again, tmp_path, algorithm=algorithm).run(resume=True)
    assert again.updates[: len(before)] == before
    assert [step.consumed for step in await store.steps("run")][: len(opened)] == [step.consumed for step in opened]
    assert not any("late" in call for step in opened for one in step.consumed for call in one.inputs.calls)  # type: ignore[union-attr]


async def test_a_step_whose_records_are_gone_is_not_executed_again(store: LightningStore, tmp_path: Path) -> None:
    async with agents(store):
        with pytest.raises(Crash):
            await loop(store, Crashing(RememberingEngine(), Countdown(8)), tmp_path).run(resume=False)
        step = (await store.steps("run"))[-1]
        gone = step.consumed[1].rollout_id
        await store.drop_records([gone])
        with pytest.raises(
            ConflictError,
            match=rf"rollout {gone}: a step of run run learned from . records that are gone, {gone}-0 first",
        ):
            await loop(store, RememberingEngine(), tmp_path).run(resume=True)


async def test_a_step_that_is_executed_again_learns_from_its_stored_pictures(
    store: LightningStore, tmp_path: Path
) -> None:
    crashed, again = RememberingEngine(), RememberingEngine()
    async with agents(store, picture=b"a picture"):
        with pytest.raises(Crash):
            await loop(store, Crashing(crashed, Countdown(8)), tmp_path).run(resume=False)
        first = list(crashed.pictures)
    async with agents(store):
        await loop(store, again, tmp_path).run(resume=True)
    assert first
    assert again.pictures == first


@pytest.mark.parametrize("ticks", [20, 60])
async def test_a_rule_that_looks_at_earlier_steps_learns_the_same_after_a_crash(
    store: LightningStore, tmp_path: Path, ticks: int
) -> None:
    algorithm = LightningRL(group_size=GROUP, minibatches=1, credit=NamedPart(type=back.path, history=2))
    alone = replace(algorithm, credit=NamedPart(type=back.path, history=0))
    async with agents(store):
        whole, forgetful = RememberingEngine(), RememberingEngine()
        await loop(store, whole, tmp_path / "whole", algorithm=algorithm).run(resume=False)
        await store.create_run("test", {}, "run-alone")
    async with agents(store, run="run-alone"):
        await loop(store, forgetful, tmp_path, "run-alone", algorithm=alone).run(resume=False)
    assert forgetful.updates != whole.updates  # the earlier steps have an effect
    await store.create_run("test", {}, "run-again")
    async with agents(store, run="run-again"):
        countdown = Countdown(ticks)
        crashing = Crashing(store, countdown), Crashing(RememberingEngine(), countdown)
        with suppress(Crash):
            await loop(*crashing, tmp_path, "run-again", algorithm=algorithm).run(resume=False)
        again = RememberingEngine()
        await loop(store, again, tmp_path, "run-again", algorithm=algorithm).run(resume=True)
    assert again.updates == whole.updates


async def test_a_learner_lost_at_any_verb_is_replaced_and_the_run_ends_as_one_that_never_lost_it(
    store: LightningStore, tmp_path: Path
) -> None:
    async with agents(store):
        expected = (await finished(store, tmp_path / "whole")).updates
    ticks = 1
    while True:
        run = f"run-{ticks}"
        await store.create_run("test", {}, run)
        countdown, engine = Countdown(ticks, LearnerLostError), RememberingEngine()
        async with agents(store, run=run):
            assert await loop(store, Crashing(engine, countdown), tmp_path, run).run(resume=False) == STEPS
        assert engine.updates == expected, f"after a loss at verb {ticks}"
        assert len(await store.rollouts(RolloutQuery(run_id=run, mode="train"))) == STEPS * TASKS * GROUP
        assert all(step.state == "closed" for step in await store.steps(run))
        if countdown.left > 0:
            break
        ticks += 1
    assert ticks > 20


async def test_a_learner_that_is_lost_again_and_again_ends_the_run(store: LightningStore, tmp_path: Path) -> None:
    class Doomed(RememberingEngine):
        restarts = 0

        async def optim_step(self, learning_rate: float, grad_clip: float, policy: str = "default") -> dict[str, float]:
            raise LearnerLostError("the learner ended during optim_step")

        async def restart_learner(self) -> None:
            self.restarts += 1

    engine = Doomed()
    async with agents(store):
        with pytest.raises(LearnerLostError):
            await loop(store, engine, tmp_path).run(resume=False)
    assert engine.restarts == 3


async def test_a_stop_ends_after_the_step_with_a_checkpoint_and_resumes(store: LightningStore, tmp_path: Path) -> None:
    engine = RememberingEngine()
    stopped = loop(store, engine, tmp_path)
    stopped.stopping = True
    async with agents(store):
        first = await stopped.run(resume=False)
        assert (first, [each.step for each in await store.checkpoints("run")]) == (0, [0])
        assert await loop(store, engine, tmp_path).run(resume=True) == STEPS


async def test_a_run_whose_agents_never_call_the_model_stops_with_the_likely_cause(
    store: LightningStore, tmp_path: Path
) -> None:
    async with agents(store, calls=0):
        with pytest.raises(NoCallsError, match="no model call was recorded"):
            await finished(store, tmp_path)


async def test_the_share_of_rollouts_that_a_refused_call_ended_is_a_metric_of_the_step(
    store: LightningStore, tmp_path: Path
) -> None:
    async with agents(store, refused=lambda rollout: rollout.replica == 0):
        await loop(store, RememberingEngine(), tmp_path, val=[], on_failure="zero", steps=1).run(resume=False)
    assert [metric.value for metric in await store.metrics("run", "rollout/refused_share")] == [1 / GROUP]


@pytest.mark.parametrize("how", ["failed", "silent"])
async def test_a_step_that_came_to_nothing_is_tried_again_by_resume_and_its_rollouts_are_consumed(
    store: LightningStore, tmp_path: Path, how: str
) -> None:
    async with agents(store, calls=0 if how == "silent" else 1, broken=how == "failed"):
        with pytest.raises((NoCallsError, AgentError)):
            await loop(store, RememberingEngine(), tmp_path, val=[]).run(resume=False)
    async with agents(store):
        assert await loop(store, RememberingEngine(), tmp_path, val=[]).run(resume=True) == STEPS
    first, *others = await store.steps("run")
    rollouts = await store.rollouts(RolloutQuery(run_id="run", mode="train"))
    assert {rollout.outcome is None for rollout in rollouts} == {False}
    assert [consumed.outcome for consumed in first.consumed][: TASKS * GROUP] == ["invalid"] * TASKS * GROUP
    assert len(first.consumed) == 2 * TASKS * GROUP
    assert {len(step.consumed) for step in others} == {TASKS * GROUP}


@pytest.mark.parametrize("how", ["failed", "silent"])
async def test_an_evaluation_that_came_to_nothing_is_made_again_by_resume(
    store: LightningStore, tmp_path: Path, how: str
) -> None:
    async with agents(store, calls=0 if how == "silent" else 1, broken=how == "failed"):
        for resume in (False, True):  # agents that are still broken end the resumed run, too
            with pytest.raises((NoCallsError, AgentError)):
                await loop(store, RememberingEngine(), tmp_path).run(resume)
    async with agents(store):
        assert await loop(store, RememberingEngine(), tmp_path).run(resume=True) == STEPS
    greedy = await store.rollouts(RolloutQuery(run_id="run", mode="eval", step=0))
    assert [one.replica for one in greedy if one.group_id.startswith("eval:0:greedy")] == [0, 1, 2]


async def test_where_failures_count_as_zero_a_step_tried_again_samples_no_more_than_it_needs(
    store: LightningStore, tmp_path: Path
) -> None:
    algorithm = LightningRL(group_size=GROUP, minibatches=1, dynamic_sampling=True)

    def made() -> RLLoop:
        return loop(store, RememberingEngine(), tmp_path, val=[], algorithm=algorithm, on_failure="zero")

    async with agents(store, broken=True):
        with pytest.raises(AgentError):
            await made().run(resume=False)
    async with agents(store, reward_of=lambda claim: float(claim.rollout.replica)):
        assert await made().run(resume=True) == STEPS
    first, *others = await store.steps("run")
    assert len(first.consumed) == 2 * TASKS * GROUP  # those that failed, and as many in their place
    assert {len(step.consumed) for step in others} == {TASKS * GROUP}
