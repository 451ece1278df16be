"""Tasks drawn by what is known of them: by learnability, exact on resume, the same however many workers there are."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from loop_doubles import EVERY, RememberingEngine, agents, answer, killed_and_resumed, loop, working

from agentlightning.config.run import DataConfig
from agentlightning.errors import AgentError, ConfigError
from agentlightning.records import Claim
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.summaries import task_key
from agentlightning.trainer.task_sampler import EXPLORED, SampledTasks, TaskRecord, learnability, load_sampler


def record(rewards: list[float], step: int = 1) -> TaskRecord:
    return TaskRecord(task={"n": len(rewards)}, tries=[(step, reward) for reward in rewards])


def test_tasks_are_drawn_by_the_variance_of_their_rewards_and_none_is_given_up() -> None:
    solved, open_, hopeless = record([1.0] * 16), record([0.0, 1.0] * 8), record([0.0] * 16)
    drawn = Counter(learnability([solved, open_, hopeless], 1, 1, random.Random(seed))[0] for seed in range(3000))
    assert drawn[1] > 0.7 * 3000
    assert min(drawn[0], drawn[2]) > 3000 * EXPLORED / 3 * 0.8


def test_old_evidence_fades_so_that_a_task_is_looked_at_again() -> None:
    rates = [record([0.0] * 8).pass_rate(step) for step in (1, 11, 41, 201)]
    assert rates == sorted(rates)
    assert rates[0] == 0.5 / 9
    assert rates[-1] == pytest.approx(0.5, abs=1e-4)


def test_a_step_draws_no_task_twice_before_it_has_drawn_all() -> None:
    records = [record([0.0, 1.0])] + [record([1.0] * 8)] * 3
    assert sorted(learnability(records, 4, 1, random.Random(0))) == [0, 1, 2, 3]
    assert sorted(learnability(records, 8, 1, random.Random(0))) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"train": "t.jsonl", "sampler": "hardest"}, "sampler: expected uniform, learnability or file.py:name"),
        ({"from_run": "r", "sampler": "learnability"}, "sampler: has no effect without train"),
    ],
)
def test_a_sampler_that_is_none_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        DataConfig(**given)


def test_a_sampler_of_ones_own_is_loaded_and_what_it_draws_is_checked(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def last(tasks, count, step, rng):\n    return [len(tasks) - 1] * count\ndef short(tasks):\n    return []\n"
    )
    found = load_sampler(f"{tmp_path}/own.py:last")
    assert found is not None
    assert found([record([])] * 5, 2, 1, random.Random(0)) == [4, 4]
    with pytest.raises(ConfigError, match=r"expected to be callable as \(tasks, count, step, rng\)"):
        load_sampler(f"{tmp_path}/own.py:short")


async def test_positions_that_no_task_has_are_an_error_that_says_what_was_expected(store: LightningStore) -> None:
    own = SampledTasks(store=store, run_id="run", tasks=[{"n": 0}], sampler=lambda *_: [1], seed=0)
    with pytest.raises(AgentError, match=r"data.sampler: expected 1 positions from 0 to 0, got \[1\]"):
        await own.draw(1, 1, 1)


STEPS = 4


def solved_by_task(claim: Claim) -> float:
    """Even tasks are solved by one replica of two, the others by both."""
    return float(claim.rollout.replica or claim.rollout.task["n"] % 2)


def curriculum(store: Any, engine: Any, folder: Path, run: str = "run", **trainer: Any) -> Any:
    made = loop(store, engine, folder, run, [], None, steps=STEPS, tasks_per_step=1, **trainer)
    made.scheduler.sampled = SampledTasks(
        store=store, run_id=run, tasks=made.train, sampler=learnability, seed=made.config.trainer.seed
    )
    return made


async def drawn(store: LightningStore, run: str = "run") -> list[int]:
    found = await store.rollouts(RolloutQuery(run_id=run, mode="train"))
    return [one.task["n"] for one in sorted(found, key=lambda one: one.step) if one.replica == 0]


async def test_evidence_is_what_earlier_steps_consumed_and_what_was_tried_before_training(
    store: LightningStore, tmp_path: Path
) -> None:
    async def probe() -> list[tuple[str, float | None]]:
        return [(task_key({"n": 4}), 1.0), (task_key({"n": 4}), None), (task_key({"n": 99}), 1.0)]

    async with agents(store, reward_of=solved_by_task):
        await curriculum(store, RememberingEngine(), tmp_path).run(resume=False)
    tasks = [{"n": number} for number in range(5)]
    known = SampledTasks(store=store, run_id="run", tasks=tasks, sampler=learnability, seed=0, before=probe)
    tries = {one.task["n"]: list(one.tries) for one in await known.records(STEPS + 1)}
    wanted: dict[int, list[tuple[int, float]]] = {number: [] for number in range(5)}
    wanted[4] = [(0, 1.0), (0, 0.0)]
    for step, number in enumerate(await drawn(store), 1):
        wanted[number] += [(step, float(replica or number % 2)) for replica in range(2)]
    assert {number: sorted(of_task) for number, of_task in tries.items()} == {
        number: sorted(of_task) for number, of_task in wanted.items()
    }


async def test_a_draw_is_the_same_whatever_finishes_first(store: LightningStore, tmp_path: Path) -> None:
    def slow_first(run: str) -> AbstractAsyncContextManager[None]:
        held: list[Claim] = []

        async def work(claim: Claim, waiting: asyncio.TaskGroup) -> None:
            held.append(claim)
            if len(held) == 2:  # both replicas are claimed; the second ends first
                for one in reversed(held):
                    await answer(store, one, 1, solved_by_task(one))
                held.clear()

        return working(store, run, work)

    async with agents(store, reward_of=solved_by_task):
        await curriculum(store, RememberingEngine(), tmp_path).run(resume=False)
    await store.create_run("test", {}, "other")
    async with slow_first("other"):
        await curriculum(store, RememberingEngine(), tmp_path, "other").run(resume=False)
    assert await drawn(store) == await drawn(store, "other")


@EVERY
async def test_a_run_that_is_killed_draws_the_tasks_that_it_would_have_drawn(
    store: LightningStore, tmp_path: Path, every: int
) -> None:
    whole = RememberingEngine()
    async with agents(store, reward_of=solved_by_task):
        await curriculum(store, whole, tmp_path / "whole").run(resume=False)
    runs = killed_and_resumed(
        store,
        8 * every,
        lambda *made: curriculum(*made[:2], tmp_path, made[2]),
        lambda run: agents(store, run=run, reward_of=solved_by_task),
    )
    async for run, engine in runs:
        assert engine.updates == whole.updates != [], run
        assert await drawn(store, run) == await drawn(store), run
