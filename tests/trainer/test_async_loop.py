"""Rollouts ahead of the trainer: what a step takes, what is put away as stale or surplus, and kill -9 at every verb."""

from collections import Counter
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
    Gate,
    RememberingEngine,
    agents,
    killed_and_resumed,
    loop,
)

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.errors import AgentError, LearnerLostError
from agentlightning.records import Claim, NewRollout, Resource, Rollout
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.trainer.progress import Silent
from agentlightning.training_types import Loss

SIZE = TASKS * GROUP


async def trained(store: LightningStore, run: str = "run") -> list[Rollout]:
    return await store.rollouts(RolloutQuery(run_id=run, mode="train"))


async def outcomes(store: LightningStore, run: str = "run") -> list[Counter[str]]:
    """By step."""
    return [Counter(one.outcome for one in step.consumed) for step in await store.steps(run)]


async def check(store: LightningStore, engine: RememberingEngine, run: str = "run") -> None:
    """Every training rollout was consumed by one step, and the weights have had those that were trained, once."""
    steps, rollouts = await store.steps(run), await trained(store, run)
    assert [(step.step, step.state) for step in steps] == [(step, "closed") for step in range(1, STEPS + 1)]
    assert sorted(one.rollout_id for step in steps for one in step.consumed) == [rollout.id for rollout in rollouts]
    assert sorted(engine.learned) == [rollout.id for rollout in rollouts if rollout.outcome == "trained"]


class Looking(RememberingEngine):
    """Sees what is in the store whenever it learns, before any agent can go on."""

    def __init__(self, store: LightningStore) -> None:
        super().__init__()
        self._store = store
        self.outstanding: list[int] = []

    async def forward_backward(self, sequences: Any, loss: Loss, policy: str = "default") -> dict[str, float]:
        found = await self._store.rollouts(RolloutQuery(run_id="run", mode="train", unconsumed=True))
        self.outstanding.append(len(found))
        return await super().forward_backward(sequences, loss, policy)


@pytest.mark.parametrize("bound", [0, 2])
async def test_while_a_step_learns_the_groups_of_as_many_steps_as_the_bound_says_are_outstanding_and_no_more(
    store: LightningStore, tmp_path: Path, bound: int
) -> None:
    engine = Looking(store)
    async with agents(store):
        await loop(store, engine, tmp_path, max_staleness=bound, steps=6).run(resume=False)
    assert engine.outstanding[0] == max(engine.outstanding) == bound * SIZE
    assert all(rollout.outcome for rollout in await trained(store))


class OpensAt(RememberingEngine):
    """Opens the gate as it publishes this version; None: the first one."""

    def __init__(self, gate: Gate, version: int | None = None) -> None:
        super().__init__()
        self._gate, self._version = gate, version

    async def publish(self, version: int, policy: str = "default") -> None:
        if self._version in (None, version):
            self._gate.opened.set()
        await super().publish(version, policy)


class OpensWhenAwaited(Silent):
    """Opens the gate once the trainer waits for the last group of a step and no other."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def phase(self, name: str, done: int, total: int) -> None:
        if name == "collect" and done == total - GROUP:
            self._gate.opened.set()


@pytest.mark.parametrize("order", ["fifo", "first_finished"])
async def test_a_slow_group_is_waited_for_in_order_and_else_learned_from_later(
    store: LightningStore, tmp_path: Path, order: str
) -> None:
    gate = Gate(lambda rollout: rollout.group_id == "train:1:0")
    engine = RememberingEngine() if order == "fifo" else OpensAt(gate, 2)
    async with agents(store, gate=gate):
        running = loop(store, engine, tmp_path, val=[], max_staleness=2, batch_order=order)
        running.progress = OpensWhenAwaited(gate) if order == "fifo" else Silent()
        await running.run(resume=False)
    steps = [[one.rollout_id for one in step.consumed] for step in await store.steps("run")]
    groups = [{one.group_id for one in await store.rollouts(RolloutQuery(ids=ids))} for ids in steps]
    if order == "fifo":
        assert groups == [{f"train:{step}:{place}" for place in range(TASKS)} for step in range(1, STEPS + 1)]
    else:
        assert ["train:1:0" in of_step for of_step in groups].index(True) > 0
    await check(store, engine)


async def test_in_the_order_of_finishing_a_slow_group_holds_up_nobody_and_is_stale_in_the_end(
    store: LightningStore, tmp_path: Path
) -> None:
    gate, engine = Gate(lambda rollout: rollout.group_id == "train:1:0"), RememberingEngine()
    async with agents(store, gate=gate):
        await loop(store, engine, tmp_path, val=[], max_staleness=1, batch_order="first_finished").run(resume=False)
    slow = [rollout for rollout in await trained(store) if rollout.group_id == "train:1:0"]
    assert [(rollout.state, rollout.outcome) for rollout in slow] == [("cancelled", "stale")] * GROUP
    assert (await outcomes(store))[2][
        "stale"
    ] == GROUP  # step 3 updates the weights of step 2: those of step 0 are too old
    await check(store, engine)


def has_signal(claim: Claim) -> float:
    """Every third group in the order of the tasks has rewards that differ."""
    _, step, place = claim.rollout.group_id.split(":")
    number = (int(step) - 1) * TASKS + int(place)
    return float(claim.rollout.replica == 0 and number % 3 == 0)


@pytest.mark.parametrize("bound", [0, 1])
async def test_with_dynamic_sampling_groups_without_signal_are_made_up_for(
    store: LightningStore, tmp_path: Path, bound: int
) -> None:
    engine = RememberingEngine()
    algorithm = LightningRL(group_size=GROUP, minibatches=1, dynamic_sampling=True)
    running = loop(store, engine, tmp_path, val=[], algorithm=algorithm, max_staleness=bound)
    async with agents(store, reward_of=has_signal):
        await running.run(resume=False)
    assert [each["trained"] for each in await outcomes(store)] == [SIZE] * STEPS
    assert all(each["zero_variance"] >= SIZE for each in await outcomes(store))
    made_up = [metric.value for metric in await store.metrics("run", "rollout/resampled_groups")]
    assert len(made_up) == STEPS
    await check(store, engine)


ASYNC: list[dict[str, Any]] = [
    {"max_staleness": 1},
    {"max_staleness": 1, "batch_order": "first_finished"},
]


@EVERY
@pytest.mark.parametrize("settings", ASYNC, ids=str)
async def test_a_run_killed_at_any_verb_resumes_with_nothing_lost_and_nothing_trained_twice(
    store: LightningStore, tmp_path: Path, settings: dict[str, Any], every: int
) -> None:
    runs = killed_and_resumed(
        store, every, lambda *made: loop(*made[:2], tmp_path, made[2], **settings), lambda run: agents(store, run=run)
    )
    async for run, engine in runs:
        await check(store, engine, run)
        for each in await outcomes(store, run):
            learned = each["trained"] + each["zero_variance"]
            assert 0 < learned <= SIZE <= learned + each["stale"], run


async def test_what_was_sampled_with_weights_that_resuming_left_behind_is_stale_and_made_up_for(
    store: LightningStore, tmp_path: Path
) -> None:
    class Lost(RememberingEngine):
        async def publish(self, version: int, policy: str = "default") -> None:
            if version == 6:  # step 5
                raise Crash
            await super().publish(version, policy)

    settings: dict[str, Any] = {"max_staleness": 1, "steps": 6, "checkpoint_every": 100}
    gate = Gate(lambda rollout: rollout.step == 6)
    async with agents(store, gate=gate):
        with pytest.raises(Crash):
            await loop(store, Lost(), tmp_path, val=[], **settings).run(resume=False)
        resumed = loop(store, OpensAt(gate), tmp_path, val=[], **settings)
        await resumed.run(resume=True)
    last = (await outcomes(store))[-1]
    assert last["stale"] == SIZE
    assert last["trained"] + last["zero_variance"] == SIZE


async def test_what_was_sampled_within_the_bound_before_a_crash_is_learned_from_after_it(
    store: LightningStore, tmp_path: Path
) -> None:
    class Lost(RememberingEngine):
        async def publish(self, version: int, policy: str = "default") -> None:
            if version == 3:  # step 2; agents have done all that was queued for step 3
                while any(rollout.state != "succeeded" for rollout in await trained(store)):
                    await store.wait("run", timeout_s=0.01)
                raise Crash
            await super().publish(version, policy)

    settings: dict[str, Any] = {"max_staleness": 1, "checkpoint_every": 100}
    async with agents(store):
        with pytest.raises(Crash):
            await loop(store, Lost(), tmp_path, val=[], **settings).run(resume=False)
        engine = RememberingEngine()
        await loop(store, engine, tmp_path, val=[], **settings).run(resume=True)
    assert [each["stale"] for each in await outcomes(store)] == [0] * STEPS
    assert {metric.value for metric in await store.metrics("run", "rollout/staleness_max") if not metric.abandoned} == {
        0,
        1,
    }
    await check(store, engine)


async def test_a_learner_lost_at_any_verb_costs_no_rollout(store: LightningStore, tmp_path: Path) -> None:
    ticks = 1
    while True:
        run = f"run-{ticks}"
        await store.create_run("test", {}, run)
        countdown, engine = Countdown(ticks, LearnerLostError), RememberingEngine()
        async with agents(store, run=run):
            lost = Crashing(engine, countdown)
            assert await loop(store, lost, tmp_path, run, max_staleness=1).run(resume=False) == STEPS
        await check(store, engine, run)
        if countdown.left > 0:
            break
        ticks += 1
    assert ticks > 20


async def test_dynamic_sampling_makes_do_with_what_it_has_after_ten_times_as_many_groups(
    store: LightningStore, tmp_path: Path
) -> None:
    engine = RememberingEngine()
    algorithm = LightningRL(group_size=GROUP, minibatches=1, dynamic_sampling=True)
    async with agents(store, reward_of=lambda claim: 0.0):
        await loop(store, engine, tmp_path, val=[], algorithm=algorithm).run(resume=False)
    assert await outcomes(store) == [{"zero_variance": 10 * SIZE}] * STEPS
    await check(store, engine)


async def test_a_learner_lost_before_the_list_of_its_step_is_written_costs_no_rollout(
    store: LightningStore, tmp_path: Path
) -> None:
    class Valuing(RememberingEngine):
        lost = False

        async def values(self, sequences: Any, policy: str = "default") -> list[list[float]]:
            if not self.lost:
                self.lost = True
                raise LearnerLostError("the learner ended during values")
            return [[0.0] * len(row.tokens) for row in sequences]

    engine, algorithm = Valuing(), LightningRL(group_size=GROUP, minibatches=1, advantage="gae")
    async with agents(store):
        await loop(store, engine, tmp_path, val=[], algorithm=algorithm, max_staleness=1).run(resume=False)
    assert engine.lost
    await check(store, engine)


async def test_a_group_that_failed_is_not_replaced_while_its_step_may_come_to_something(
    store: LightningStore, tmp_path: Path
) -> None:
    await store.enqueue(
        [NewRollout(run_id="run", task={}, group_id="train:1:0", replica=replica, step=1) for replica in range(GROUP)]
    )
    async with agents(store, broken=True):
        while any(rollout.state != "failed" for rollout in await trained(store)):
            await store.wait("run", timeout_s=0.01)
    async with agents(store):
        await loop(store, RememberingEngine(), tmp_path, val=[]).run(resume=False)
    assert [sum(each.values()) for each in await outcomes(store)] == [SIZE] * STEPS


async def test_the_last_step_puts_away_what_an_earlier_process_had_queued_beyond_it(
    store: LightningStore, tmp_path: Path
) -> None:
    more = [
        NewRollout(run_id="run", task={"n": 0}, group_id=f"train:{step}:{place}", replica=replica, step=step)
        for step in range(1, STEPS + 2)
        for place in range(TASKS)
        for replica in range(GROUP)
    ]
    # Agents may be faster than the trainer: they have a policy to call, and nothing that they do becomes stale.
    await store.put_resources([Resource(run_id="run", name="default", kind="policy", value={})])
    await store.enqueue(more)
    engine = RememberingEngine()
    async with agents(store):
        await loop(store, engine, tmp_path, val=[], max_staleness=STEPS).run(resume=False)
    assert [each["overprovisioned"] for each in await outcomes(store)] == [0] * (STEPS - 1) + [SIZE]
    await check(store, engine)


@pytest.mark.parametrize("order", ["fifo", "first_finished"])
async def test_what_ran_ahead_and_failed_with_the_step_that_ended_the_run_is_put_away_by_resume(
    store: LightningStore, tmp_path: Path, order: str
) -> None:
    settings: dict[str, Any] = {"val": [], "max_staleness": 1, "batch_order": order}
    async with agents(store, broken=True):
        with pytest.raises(AgentError):
            await loop(store, RememberingEngine(), tmp_path, **settings).run(resume=False)
        while any(rollout.state != "failed" for rollout in await trained(store)):
            await store.wait("run", timeout_s=0.01)
    engine = RememberingEngine()
    async with agents(store):
        assert await loop(store, engine, tmp_path, **settings).run(resume=True) == STEPS
    first, *others = await outcomes(store)
    assert first["invalid"] == 2 * SIZE
    assert all(each["trained"] + each["zero_variance"] == SIZE for each in (first, *others))
    await check(store, engine)
