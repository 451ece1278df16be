"""Distributions and disagreements of rewards, and hacks that were planted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
from stored_runs import Earned, add_fork, add_rollouts, log, record
from typer.testing import CliRunner

from agentlightning.analysis.reward_statistics import (
    distributions,
    find_hacks,
    latest_steps,
    moves_against,
    read_rewarded,
    trend,
)
from agentlightning.analysis.step_record import read_step
from agentlightning.cli.app import app
from agentlightning.errors import NotFoundError
from agentlightning.records import Reward
from agentlightning.store.base import LightningStore
from agentlightning.store.sql.store import InMemoryLightningStore, SqlLightningStore

TRAIN, HELD_OUT = "train/reward_mean", "eval/greedy/reward_mean"


@pytest.fixture
async def store() -> AsyncIterator[LightningStore]:
    async with InMemoryLightningStore() as opened:
        yield opened


async def test_distributions_are_by_reward_step_and_call(store: LightningStore) -> None:
    await store.create_run("run", record(), "run")
    earned = [Earned(group="a", replica=n, reward=float(n), calls=(1, 1), step_rewards={1: 0.5}) for n in range(5)]
    await add_rollouts(store, "run", 1, earned)
    final, step = distributions(await read_rewarded(store, "run", [1], calls=True))
    assert (final.name, final.call, final.n, final.mean) == ("reward", None, 5, 2.0)
    assert final.deviation == pytest.approx(2.5**0.5)
    assert final.quartiles == (0.0, 1.0, 2.0, 3.0, 4.0)
    assert [at for at, count in enumerate(final.bins) if count] == [0, 5, 10, 15, 19]
    assert (step.name, step.call, step.n, step.mean, step.bins[0]) == ("reward", 2, 5, 0.5, 5)


async def test_a_fork_of_a_step_s_rollout_is_none_of_the_step_s(store: LightningStore) -> None:
    await store.create_run("run", record(), "run")
    [rollout_id] = await add_rollouts(store, "run", 1, [Earned(group="a", reward=0.0)])
    await add_fork(store, rollout_id, 1.0)
    assert [one.rollout_id for one in await read_rewarded(store, "run", [1])] == [rollout_id]
    assert list((await read_step(store, "run", 1)).rollouts) == [rollout_id]


async def test_rescored_rewards_are_read_too(store: LightningStore) -> None:
    await store.create_run("run", record(), "run")
    ids = await add_rollouts(store, "run", 1, [Earned(group="a", replica=n, reward=float(n)) for n in range(4)])
    again = [
        Reward(
            id=f"again-{at}",
            run_id="run",
            rollout_id=key,
            attempt=1,
            value=-float(at),
            name="strict",
            source="rescored",
        )
        for at, key in enumerate(ids)
    ]
    await store.record_rewards(again)
    assert [one.rewards["strict"] for one in await read_rewarded(store, "run", [1])] == [0.0, -1.0, -2.0, -3.0]


async def test_steps_of_a_run_are_its_last_or_spread_over_it(store: LightningStore) -> None:
    await store.create_run("run", record(), "run")
    with pytest.raises(NotFoundError, match="run: has no training step yet"):
        await latest_steps(store, "run", 3)
    await log(store, "run", {TRAIN: dict.fromkeys(range(1, 42), 0.0)})
    assert await latest_steps(store, "run", 3) == [39, 40, 41]
    assert await latest_steps(store, "run", 5, spread=True) == [1, 11, 21, 31, 41]


async def planted(store: LightningStore, run: str, by_length: bool) -> None:
    """Six steps of six groups of six rollouts whose reward is their length, with noise, or has nothing to do with it."""
    dice = random.Random(1)
    await store.create_run(run, record(), run)
    for step in range(1, 7):
        earned = []
        for place in range(36):
            length = dice.randint(5, 60)
            reward = length / 60 + dice.gauss(0, 0.05) if by_length else float(dice.random() < 0.5)
            earned.append(Earned(group=str(place // 6), replica=place % 6, reward=reward, calls=(length,)))
        await add_rollouts(store, run, step, earned)
    rising = {step: 0.1 * step + 0.01 * (step % 2) for step in range(1, 7)}
    curves = {TRAIN: rising, HELD_OUT: rising, "rollout/count": dict.fromkeys(rising, 36.0)}
    await log(store, run, {**curves, "train/tokens_sampled": dict.fromkeys(rising, 36 * 30.0)})


async def test_a_reward_that_grows_with_length_is_named(store: LightningStore) -> None:
    await planted(store, "hacked", by_length=True)
    report = await find_hacks(store, "hacked")
    (hack,) = report.hacks
    assert (hack.kind, hack.reward, len(hack.evidence)) == ("length_explains", "reward", 3)
    assert "over 180 rollouts" in hack.text
    assert report.steps == [2, 3, 4, 5, 6]
    (length,) = report.lengths
    assert length.correlation is not None
    assert length.correlation.low > 0.9


async def test_a_clean_run_is_not_named(store: LightningStore) -> None:
    await planted(store, "clean", by_length=False)
    report = await find_hacks(store, "clean")
    assert report.hacks == []
    assert {one.name: one.direction for one in report.trends}[TRAIN] == 1
    (length,) = report.lengths
    assert length.correlation is not None
    assert abs(length.correlation.value) < 0.3


async def test_longer_because_of_more_calls_is_no_hack(store: LightningStore) -> None:
    """Tasks that are solved take more calls, of noisy lengths: the number of calls explains what length seems to."""
    dice = random.Random(2)
    await store.create_run("run", record(), "run")
    earned = []
    for place in range(120):
        solved = dice.random() < 0.5
        calls = tuple(dice.randint(8, 12) for _ in range(4 if solved else 1))
        earned.append(Earned(group=str(place // 6), replica=place % 6, reward=float(solved), calls=calls))
    await add_rollouts(store, "run", 1, earned)
    await log(store, "run", {TRAIN: {1: 0.5}})
    report = await find_hacks(store, "run")
    assert report.hacks == []
    (length,) = report.lengths
    assert length.correlation is not None
    assert length.correlation.low > 0.9


def curve(first: float, last: float, points: int = 12) -> dict[int, float]:
    return {step: first + (last - first) * step / (points - 1) + 0.01 * (-1) ** step for step in range(points)}


@pytest.mark.parametrize(
    ("curves", "kinds"),
    [
        ({TRAIN: (0.2, 0.9), HELD_OUT: (0.6, 0.3)}, {"held_out_falls"}),
        ({TRAIN: (0.2, 0.9), HELD_OUT: (0.2, 0.8), "rewards/format/mean": (0.9, 0.1)}, {"other_reward_falls"}),
        ({TRAIN: (0.2, 0.9), HELD_OUT: (0.5, 0.5), "tokens per rollout": (50, 400)}, {"length_grows"}),
        ({TRAIN: (0.2, 0.9), HELD_OUT: (0.2, 0.9), "tokens per rollout": (50, 400)}, set()),
        ({TRAIN: (0.9, 0.2), HELD_OUT: (0.9, 0.2), "rewards/format/mean": (0.9, 0.1)}, set()),
        ({TRAIN: (0.5, 0.5), HELD_OUT: (0.6, 0.3)}, set()),
    ],
)
def test_what_moves_against_a_rising_reward_is_named(curves: dict[str, tuple[float, float]], kinds: set[str]) -> None:
    trends = {name: found for name, ends in curves.items() if (found := trend(name, curve(*ends))) is not None}
    assert len(trends) == len(curves)
    assert {one.kind for one in moves_against(trends)} == kinds


async def test_the_commands_print_them(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/agl.db"
    async with SqlLightningStore(url) as opened:
        await planted(opened, "hacked", by_length=True)

    async def agl(*words: str) -> str:
        done = await asyncio.to_thread(
            CliRunner().invoke, app, ["runs", "show", "hacked", "--rewards", *words, "--store", url]
        )
        assert done.exit_code == 0, (done.output, done.exception)
        return done.output

    assert "length_explains: reward is higher for longer rollouts of the same task" in await agl()
    assert orjson.loads(await agl("--json"))["hacks"]["rollouts"] == 180
    assert (await agl()).splitlines().index("") == 1 + 6
