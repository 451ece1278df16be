"""Stored rollouts under another reward function."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import build
from agentlightning.adapters.trajectories import named_rewards, trajectories
from agentlightning.errors import NotFoundError
from agentlightning.records import Finish, NewRollout, WorkerStatus
from agentlightning.runner.scoring import FunctionScorer, Score, read_score
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.traces.importer import TraceImport
from agentlightning.trainer.data.rescore import RescoredRollout, Rescoring, compare

REWARDS = (0.0, 1.0, 1.0, 0.5)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LightningStore]:
    """A run of four rollouts of two tasks."""
    rows = [
        {
            "messages": [{"role": "user", "content": str(n // 2)}, {"role": "assistant", "content": str(n)}],
            "reward": reward,
        }
        for n, reward in enumerate(REWARDS)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with InMemoryLightningStore() as opened:
        await TraceImport(store=opened, run_id="run").read([path], "rows", lambda _: None)
        yield opened


async def rescored(store: LightningStore, function: Any, **options: Any) -> Rescoring:
    with ThreadPoolExecutor(2) as threads:
        done = Rescoring(store=store, run_id="run", scorer=FunctionScorer(function, threads), **options)
        await done.score()
        return done


async def test_old_and_new_rewards_are_compared_and_nothing_is_kept_unless_asked_for(store: LightningStore) -> None:
    before = await records(store)
    done = await rescored(store, lambda task, result: 1.0 if result.answer in "02" else 0.0)
    assert [(one.old, one.new) for one in done.found] == [(0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (0.5, 0.0)]
    told = compare(done.found)
    assert (told.rollouts, told.scored, told.failed, told.changed) == (4, 4, 0, 3)
    assert (told.old_mean, told.new_mean) == (0.625, 0.5)
    assert told.correlation == pytest.approx(-0.3015, abs=1e-4)
    assert told.order_kept == 0.5  # the first task's pair is turned round, the second's is not
    assert await records(store) == before


async def records(store: LightningStore) -> list[Any]:
    rollouts = await store.rollouts(RolloutQuery(run_id="run"))
    return await store.rewards([one.id for one in rollouts])


async def test_what_is_kept_has_a_name_of_its_own_and_disturbs_nothing_that_was_trained(store: LightningStore) -> None:
    rollouts = await store.rollouts(RolloutQuery(run_id="run"))
    ids = [one.id for one in rollouts]
    calls = await store.calls(ids)
    before = trajectories(rollouts, calls, await store.rewards(ids), keep_unrewarded=True)
    await rescored(store, lambda task, result: {"reward": 0.25, "f1": 0.5, "steps": [0.75]}, keep_as="strict")
    after = await store.rollouts(RolloutQuery(run_id="run"))
    assert [one.reward for one in after] == list(REWARDS)
    told = await store.rewards(ids)
    assert {(one.name, one.value, one.call_id is None) for one in told if one.source == "rescored"} == {
        ("strict", 0.25, True),
        ("strict.f1", 0.5, True),
        ("strict", 0.75, False),
    }
    assert trajectories(after, calls, told, keep_unrewarded=True) == before
    assert set(named_rewards(told, "strict").values()) == {0.25}


async def test_what_was_interrupted_goes_on_where_it_was(store: LightningStore) -> None:
    judge = SilentAtTheThird()
    interrupted = asyncio.create_task(Rescoring(store=store, run_id="run", scorer=judge, keep_as="strict").score())
    while len(kept := [one.value for one in await records(store) if one.name == "strict"]) < 2:
        pass  # each look gives the other its turn
    interrupted.cancel()
    with pytest.raises(asyncio.CancelledError):
        await interrupted
    assert kept == [0.25, 0.25]
    judge.silence.set()
    done = Rescoring(store=store, run_id="run", scorer=judge, keep_as="strict")
    await done.score()
    assert judge.asked == ["0", "1", "2", "2", "3"]
    assert [one.stood for one in done.found] == [True, True, False, False]
    assert [one.new for one in done.found] == [0.25] * 4
    told = [(one.name, one.value) for one in await records(store) if one.source == "rescored"]
    assert sorted(told) == [("strict", 0.25)] * 4 + [("strict.f1", 0.5)] * 4


class SilentAtTheThird:
    """A judge that is asked of one rollout at a time, and does not answer the third before it may."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.turn = asyncio.Lock()
        self.silence = asyncio.Event()

    async def score(self, task: Any, result: Any) -> Score:
        async with self.turn:
            self.asked.append(result.answer)
            if len(self.asked) == 3:
                await self.silence.wait()
            return read_score({"reward": 0.25, "f1": 0.5}, result.calls)


def test_pairs_that_the_new_rewards_do_not_tell_apart_count_half() -> None:
    # Of one group (0, 1, 2) -> (0, 0, 1): the first pair is level, the others are in order; other groups are no pairs.
    drawn = [("a", 0.0, 0.0), ("a", 1.0, 0.0), ("a", 2.0, 1.0), ("b", 9.0, -9.0)]
    found = [
        RescoredRollout(build.rollout(str(at), old, group_id=group), Score(finals={"reward": new}))
        for at, (group, old, new) in enumerate(drawn)
    ]
    assert compare(found).order_kept == pytest.approx(2.5 / 3)


async def test_a_function_that_fails_on_some_rollouts_is_told_with_them(store: LightningStore) -> None:
    def score(task: Any, result: Any) -> float:
        return 1 / int(result.answer)

    done = await rescored(store, score)
    assert [one.problem.splitlines()[0] if one.problem else "" for one in done.found][1:] == [""] * 3
    assert "division by zero" in done.found[0].problem
    assert (compare(done.found).failed, compare(done.found).scored) == (1, 3)


async def test_two_that_keep_at_the_same_time_keep_once(store: LightningStore) -> None:
    await asyncio.gather(
        *(
            rescored(store, lambda task, result, value=value: {"reward": value, "steps": [value]}, keep_as="strict")
            for value in (0.25, 0.75)
        )
    )
    told = [one for one in await records(store) if one.source == "rescored"]
    assert sorted(one.call_id is None for one in told) == [False] * 4 + [True] * 4


async def test_a_step_reward_of_the_same_name_is_not_taken_for_what_was_written(store: LightningStore) -> None:
    [rollout, *_] = await store.rollouts(RolloutQuery(run_id="run"))
    [call] = await store.calls([rollout.id])
    await store.record_rewards([build.reward(rollout, id="own", name="strict", call_id=call.id, source="emitted")])
    done = await rescored(store, lambda task, result: 0.25, keep_as="strict")
    assert [one.stood for one in done.found] == [False] * 4


async def test_the_rollouts_can_be_chosen(store: LightningStore) -> None:
    assert len((await rescored(store, lambda task, result: 0, limit=3)).found) == 3
    assert len((await rescored(store, lambda task, result: 0, mode="train", step=0)).found) == 4
    with pytest.raises(NotFoundError, match="no rollout that succeeded matches"):
        await rescored(store, lambda task, result: 0, mode="eval")
    nobody = Rescoring(store=store, run_id="other", scorer=FunctionScorer(print, ThreadPoolExecutor(1)))
    with pytest.raises(NotFoundError, match="no such run"):
        await nobody.score()
    # one that did not succeed is not scored
    await store.enqueue([NewRollout(run_id="run", task={}, group_id="late", replica=0)])
    [claim] = await store.claim(WorkerStatus(id="w", run_id="run", host="h", pid=1, running=0, seen_ns=0), limit=1)
    await store.finish([Finish(lease=claim.lease, state="failed", error="no")])
    assert (await store.rollouts(RolloutQuery(ids=[claim.rollout.id])))[0].state == "failed"
    assert claim.rollout.id not in [one.rollout.id for one in (await rescored(store, lambda task, result: 0)).found]
