"""The split of new sessions between two versions, and the roll-back of a canary that is worse, over a real store."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from uuid_utils import uuid7

from agentlightning.errors import ConfigError
from agentlightning.records import Finish, NewRollout, Reward
from agentlightning.serving.run import ServedModel, ServingRun
from agentlightning.serving.settings import ServeConfig, ServeFile
from agentlightning.serving.split import (
    CanaryEvidence,
    SessionResult,
    Split,
    choose_version,
    put_split,
    read_evidence,
    read_trial,
    weigh,
)
from agentlightning.store.base import LightningStore
from agentlightning.store.open import open_store

CANARY = Split(stable=40, canary=50, weight=0.5)
SETTINGS = ServeConfig(alpha=0.05)
WEIGHTS = st.floats(0, 1)


def canary(weight: float) -> Split:
    return Split(stable=40, canary=50, weight=weight)


@given(st.text(), WEIGHTS, WEIGHTS)
def test_a_session_keeps_its_version_and_a_larger_weight_keeps_those_of_the_smaller_one(
    session: str, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    assert choose_version(session, canary(low)) == choose_version(session, canary(low))
    if choose_version(session, canary(low)) == 50:
        assert choose_version(session, canary(high)) == 50
    assert choose_version(session, canary(0.0)) == 40
    assert choose_version(session, canary(1.0)) == 50


def test_the_weight_is_the_share_of_sessions() -> None:
    chosen = [choose_version(f"session-{number}", canary(0.1)) for number in range(10_000)]
    assert 900 < chosen.count(50) < 1100  # three standard deviations are 90


def test_a_weight_without_a_canary_is_an_error() -> None:
    with pytest.raises(ConfigError, match="weight: has no effect without canary"):
        Split(stable=40, weight=0.5)


# --- evidence ---------------------------------------------------------------------------------------------------------


def alternating(stable: float, canary: float, measure: Any = "reward", pairs: int = 100) -> CanaryEvidence:
    """The evidence after pairs of a stable and a canary session of these results."""
    results = [
        SessionResult(2 * number + arm, bool(arm), measure, (stable, canary)[arm])
        for number in range(pairs)
        for arm in (0, 1)
    ]
    return weigh(results, 0.05)


@pytest.mark.parametrize("measure", ["reward", "error"])
def test_a_canary_that_always_fails_is_worse_in_that_measure_after_a_few_sessions(measure: str) -> None:
    found = alternating(1.0, 0.0, measure)
    assert found.worse == measure
    figures = found.figures[measure]
    assert figures["canary"]["mean"] == 0.0
    assert figures["canary"]["sessions"] < 10  # what comes after the decision counts no more
    assert figures["wealth"] >= figures["bound"] == 40


@pytest.mark.parametrize(("stable", "canary"), [(0.0, 1.0), (0.5, 0.5)])
def test_a_canary_that_is_no_worse_stays(stable: float, canary: float) -> None:
    assert alternating(stable, canary).worse is None


@pytest.mark.slow
@pytest.mark.parametrize("stable", [0.9, 0.5])
def test_one_worse_by_15_is_rolled_back_in_19_of_20_trials_and_an_equal_one_in_1_of_20(stable: float) -> None:
    def rolled_back(success: float, seed: int) -> bool:
        draw = random.Random(seed)
        results = []
        for number in range(3000):
            of_canary = draw.random() < 0.2
            value = float(draw.random() < (success if of_canary else stable))
            results.append(SessionResult(number, of_canary, "reward", value))
        return weigh(results, 0.05).worse is not None

    assert sum(rolled_back(stable - 0.15, seed) for seed in range(20)) >= 19
    assert sum(rolled_back(stable, seed) for seed in range(20)) <= 1


# --- from the store ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(split: Split) -> AsyncIterator[tuple[LightningStore, str]]:
    async with open_store("memory://") as store:
        run = await store.create_run("serve support", {})
        await put_split(store, run.id, split)
        yield store, run.id


async def session(
    store: LightningStore, run_id: str, name: str, *rewards: float, split: Split = CANARY, ends: bool = True
) -> int:
    """A session with these rewards; returns its version."""
    number = choose_version(name, split)
    task = {"session": name, "key": "k", "model": f"support@{number}"}
    new = NewRollout(run_id=run_id, task=task, group_id=f"session:k:{name}", step=number)
    claim = await store.open_session(new, 600.0)
    for value in rewards:
        posted = Reward(
            id=str(uuid7()),
            run_id=run_id,
            rollout_id=claim.rollout.id,
            attempt=1,
            value=value,
            source="posted",
            created_ns=time.time_ns(),
        )
        await store.record_feedback([posted])
    if ends:
        await store.finish([Finish(lease=claim.lease, state="succeeded")])
    return number


async def test_of_each_session_of_the_trial_the_first_reward_counts() -> None:
    async with serving(Split(stable=40)) as (store, run_id):
        await session(store, run_id, "before", 1.0, split=Split(stable=40))
        await put_split(store, run_id, CANARY)
        versions = [await session(store, run_id, f"s{number}", 0.5, 0.0) for number in range(12)]
        await session(store, run_id, "without feedback")
        figures = (await read_evidence(store, run_id, await read_trial(store, run_id), SETTINGS)).figures
    assert figures["reward"]["canary"] == {"sessions": versions.count(50), "mean": 0.5}
    assert figures["reward"]["stable"] == {"sessions": versions.count(40), "mean": 0.5}
    assert figures["error"]["stable"]["sessions"] + figures["error"]["canary"]["sessions"] == 13


async def test_the_reward_of_a_session_that_is_still_open_counts() -> None:
    async with serving(canary(1.0)) as (store, run_id):
        await session(store, run_id, "open", 0.5, split=canary(1.0), ends=False)
        figures = (await read_evidence(store, run_id, await read_trial(store, run_id), SETTINGS)).figures
    assert figures["reward"]["canary"] == {"sessions": 1, "mean": 0.5}


async def test_rewards_are_scaled_into_their_range() -> None:
    settings = ServeConfig(reward_range=(-1.0, 3.0))
    async with serving(Split(stable=40, canary=50, weight=1.0)) as (store, run_id):
        for number, reward in enumerate((-2.0, 1.0, 9.0)):
            await session(store, run_id, f"s{number}", reward, split=canary(1.0))
        figures = (await read_evidence(store, run_id, await read_trial(store, run_id), settings)).figures
    assert figures["reward"]["canary"] == {"sessions": 3, "mean": 0.5}


def serving_run(store: LightningStore, run_id: str, folder: Path) -> ServingRun:
    served = ServedModel.of("support@production", ServeFile(serve=SETTINGS), folder, run_id)
    return ServingRun(store, served, lambda _: None)


async def test_a_canary_that_fails_is_rolled_back_once_with_its_numbers(tmp_path: Path) -> None:
    async with serving(CANARY) as (store, run_id):
        before = (await read_trial(store, run_id)).version
        for number in range(60):
            version = choose_version(f"s{number}", CANARY)
            await session(store, run_id, f"s{number}", float(version == 40))
        runs = [serving_run(store, run_id, tmp_path) for _ in range(2)]
        await asyncio.gather(*(run._judge() for run in runs))
        trial = await read_trial(store, run_id)
        assert (trial.split.stable, trial.split.canary, trial.version) == (40, None, before + 1)
        assert (trial.split.reason["canary"], trial.split.reason["worse"]) == ("support@50", "reward")
        assert trial.split.reason["figures"]["reward"]["canary"]["mean"] == 0.0
        assert await runs[0]._judge() is None  # there is no canary any more


async def test_a_canary_that_is_no_worse_keeps_its_share(tmp_path: Path) -> None:
    async with serving(CANARY) as (store, run_id):
        for number in range(20):
            await session(store, run_id, f"s{number}", 1.0)
        await serving_run(store, run_id, tmp_path)._judge()
        assert (await read_trial(store, run_id)).split == CANARY
