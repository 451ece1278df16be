"""Groups that are sampled as trees: forked in rounds, whatever happens, and each sampled call learned from once."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loop_doubles import EVERY, STEPS, TASKS, WORKER, RememberingEngine, agents, answer, killed_and_resumed, loop

from agentlightning.algorithms.credit.tree import RolloutTree
from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.config.run import parse_config
from agentlightning.engines.base import Metrics
from agentlightning.errors import ConfigError
from agentlightning.records import NewRollout, Resource, Rollout
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.trainer.scheduler import TreeSampler
from agentlightning.trainer.schedules import schedules_of
from agentlightning.training_types import Loss, TrainingSequence

CALLS, SIZE, BRANCHES = 3, 6, 1
FORM = RolloutTree(roots=2, rounds=2)
TREES = LightningRL(group_size=SIZE, minibatches=1, rollouts=FORM)


class CallKeepingEngine(RememberingEngine):
    """Remembers which calls it was trained on, too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    async def forward_backward(self, sequences: Any, loss: Loss, policy: str = "default") -> Metrics:
        row: TrainingSequence
        for row in sequences:
            self.calls += row.calls
        return await super().forward_backward(sequences, loss, policy)


async def total(store: LightningStore, metric: str) -> float:
    return sum(one.value for one in await store.metrics("run", metric))


async def rollouts_by_group(store: LightningStore, run: str = "run") -> dict[str, list[Rollout]]:
    found: defaultdict[str, list[Rollout]] = defaultdict(list)
    for one in await store.rollouts(RolloutQuery(run_id=run, mode="train")):
        found[one.group_id].append(one)
    return {group: sorted(members, key=lambda one: one.replica) for group, members in found.items()}


def shape(members: list[Rollout]) -> list[tuple[int, int] | None]:
    """The place at which each rollout of a group was forked, by replica, without ids."""
    replicas = {one.id: one.replica for one in members}
    return [one.fork and (replicas[one.fork.rollout_id], one.fork.calls) for one in members]


async def test_groups_are_sampled_in_rounds_of_forks_and_each_sampled_call_is_trained_once(
    store: LightningStore, tmp_path: Path
) -> None:
    engine = CallKeepingEngine()
    with_kl = replace(TREES, entropy=0.1)  # so that rollouts without a signal are trained, too
    async with agents(store, CALLS):
        await loop(store, engine, tmp_path, algorithm=with_kl).run(resume=False)
    groups = await rollouts_by_group(store)
    assert len(groups) == STEPS * TASKS
    for members in groups.values():
        assert [one.replica for one in members] == list(range(SIZE))
        assert [one.outcome for one in members if one.outcome == "invalid"] == []
        for tree in range(FORM.roots):
            root, *forks = [members[each] for each in FORM.replicas(tree, SIZE)]
            assert root.fork is None
            older = {root.id}
            for start in range(0, len(forks), BRANCHES):
                for fork in forks[start : start + BRANCHES]:
                    assert fork.fork is not None
                    assert fork.fork.rollout_id in older  # of its own tree, and of an earlier round
                    assert fork.fork.root_id == root.id
                    assert 1 <= fork.fork.calls < CALLS
                older |= {one.id for one in forks[start : start + BRANCHES]}
    everyone = [one for members in groups.values() for one in members]
    calls = await store.calls([one.id for one in everyone])
    assert sorted(engine.calls) == sorted(call.id for call in calls if call.replayed_id is None)
    replayed = sum(call.replayed_id is not None for call in calls)
    assert replayed == sum(one.fork.calls for one in everyone if one.fork)
    assert await total(store, "tree/forks") == (SIZE - FORM.roots) * TASKS * STEPS
    assert await total(store, "tree/replay_ended_share") == 0.0
    assert await total(store, "tree/replayed_tokens") == 2.0 * replayed  # of two tokens each
    assert await total(store, "cost/sampled_tokens") == 2.0 * (len(calls) - replayed)
    shared = [one.value for one in await store.metrics("run", "tree/shared_share")]
    assert sum(shared) / STEPS == pytest.approx(replayed / len(calls))  # every step has as many calls
    consumed = [one.rollout_id for step in await store.steps("run") for one in step.consumed]
    assert Counter(consumed) == Counter(one.id for one in everyone)


@EVERY
async def test_a_run_killed_at_any_verb_forks_nothing_twice_and_ends_as_one_that_was_not(
    store: LightningStore, tmp_path: Path, every: int
) -> None:
    steps = {"steps": 2, "tasks_per_step": 1}
    trees = replace(TREES, group_size=3, rollouts=RolloutTree(roots=1, rounds=2))
    whole = RememberingEngine()
    async with agents(store, 2):
        await loop(store, whole, tmp_path, "run", (), trees, **steps).run(resume=False)
    shapes = {group: shape(members) for group, members in (await rollouts_by_group(store)).items()}
    runs = killed_and_resumed(
        store,
        3 * every,
        lambda *made: loop(*made[:2], tmp_path, made[2], (), trees, **steps),
        lambda run: agents(store, 2, run),
    )
    async for run, engine in runs:
        assert engine.updates == whole.updates, run
        found = {group: shape(members) for group, members in (await rollouts_by_group(store, run)).items()}
        assert found == shapes, run


async def test_trees_that_a_step_samples_besides_are_whole_or_discarded(store: LightningStore, tmp_path: Path) -> None:
    small = LightningRL(group_size=4, minibatches=1, rollouts="tree", dynamic_sampling=True)
    async with agents(store, 2, reward_of=lambda claim: float(claim.rollout.task["n"] > 1 > claim.rollout.replica)):
        one = loop(store, RememberingEngine(), tmp_path, algorithm=small, val=(), steps=2)
        assert await one.run(resume=False) == 2
    groups = await rollouts_by_group(store)
    assert len(groups) > 2 * TASKS
    for members in groups.values():
        assert len(members) == 4 or {one.outcome for one in members} == {"overprovisioned"}
        assert None not in {one.outcome for one in members}


def a_sampler(store: LightningStore) -> TreeSampler:
    return TreeSampler(store=store, tree=RolloutTree(roots=2, rounds=2), group_size=6, seed=0)


WANTED = [NewRollout(run_id="run", task={}, group_id="train:1:0", replica=each, step=1) for each in range(6)]


async def test_calls_are_forked_after_where_they_were_sampled_each_once_first(store: LightningStore) -> None:
    four = TreeSampler(store=store, tree=RolloutTree(roots=1, rounds=1), group_size=5, seed=0)
    await store.put_resources([Resource(run_id="run", name="default", kind="policy", value={"model": "m"})])
    await store.enqueue(WANTED[:1])
    [claim] = await store.claim(WORKER, limit=1)
    await answer(store, claim, 4, 1.0)
    [root] = (await rollouts_by_group(store))["train:1:0"]
    places = [one.fork.calls for one in await four.next_round([root], WANTED[:5]) if one.fork]
    assert sorted(places[:3]) == [1, 2, 3]
    assert places[3:] == places[:1]


async def test_a_fork_whose_replay_ended_is_learned_from_as_a_rollout_of_its_own(
    store: LightningStore, tmp_path: Path
) -> None:
    engine = CallKeepingEngine()
    one = LightningRL(group_size=4, minibatches=1, rollouts="tree", entropy=0.1)
    async with agents(store, 2, forgets=lambda rollout: rollout.replica == 2):
        await loop(store, engine, tmp_path, algorithm=one, steps=1).run(resume=False)
    ids = {each.id: each.replica for members in (await rollouts_by_group(store)).values() for each in members}
    trained = Counter(ids[call_id.rpartition("-")[0]] for call_id in engine.calls)
    assert trained == {0: 2 * TASKS, 1: 2 * TASKS, 2: 2 * TASKS, 3: TASKS}
    assert await total(store, "tree/replay_ended_share") == 0.5
    assert await total(store, "tree/shared_share") == 1 / 8


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"trainer": {"max_staleness": 1}}, "trainer.max_staleness: expected 0 with algorithm.rollouts = 'tree'"),
        (
            {"algorithm": {"schedule": [{"from_step": 2, "rollouts": "independent"}]}},
            "algorithm.schedule: rollouts: are sampled in one way throughout a run, expected 'tree' of 2 roots and 1 rounds",
        ),
    ],
)
def test_settings_of_the_run_that_do_not_go_with_trees_are_refused_by_name(
    tables: dict[str, dict[str, Any]], sentence: str
) -> None:
    whole: dict[str, Any] = {"model": {"path": "m"}, "agent": {"run": "a.py:f"}, "data": {"train": "t"}}
    whole["algorithm"] = {"rollouts": "tree"} | tables.pop("algorithm", {})
    with pytest.raises(ConfigError, match=sentence):
        schedules_of(parse_config(whole | tables))


async def whole_group(store: LightningStore, calls: list[int], failed: int) -> list[Rollout]:
    """A group of two trees, with the number of calls and the one that fails by replica."""
    await store.put_resources([Resource(run_id="run", name="default", kind="policy", value={"model": "m"})])
    new = WANTED[:2]
    while new:
        await store.enqueue(new)
        for claim in await store.claim(WORKER, limit=10):
            replica = claim.rollout.replica
            await answer(store, claim, calls[replica], 1.0, failed=replica == failed)
        [group] = (await rollouts_by_group(store)).values()
        new = await a_sampler(store).next_round(group, WANTED)
    return group


async def test_trees_without_a_call_to_fork_after_go_on_with_independent_rollouts(store: LightningStore) -> None:
    members = await whole_group(store, [1, 3, 2, 1, 3, 3], failed=1)
    *found, last = shape(members)
    assert found == [None, None, None, (2, 1), None]  # one call of replica 0, and replica 1 failed
    assert last is not None
    assert last[0] == 4
