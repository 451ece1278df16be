"""Runs side by side: settings, figures, paired differences, bands over seeds."""

from __future__ import annotations

from collections.abc import AsyncIterator

import orjson
import pytest
from stored_runs import Earned, add_fork, add_rollouts, log, record
from typer.testing import CliRunner

from agentlightning.analysis.compare import (
    compare_runs,
    near_best_step,
    paired_difference,
    run_figures,
)
from agentlightning.analysis.run_settings import differing, flat_settings
from agentlightning.cli.app import app
from agentlightning.errors import InputError, NotFoundError
from agentlightning.records import Metric, Run
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.sql.store import InMemoryLightningStore, SqlLightningStore

HELD_OUT = "eval/greedy/reward_mean"
TASKS = ("a", "b", "c", "d")


@pytest.fixture
async def store() -> AsyncIterator[LightningStore]:
    async with InMemoryLightningStore() as opened:
        yield opened


async def evaluated(store: LightningStore, run: str, rate: float, seed: int, rewards: tuple[float, ...]) -> None:
    """A run with an evaluation of 0 at step 0, and one with these rewards at step 10."""
    await store.create_run(run, record(trainer={"learning_rate": rate, "seed": seed}), run)
    for step, values in ((0, (0.0,) * 4), (10, rewards)):
        earned = [Earned(group=task, reward=value) for task, value in zip(TASKS, values, strict=True)]
        await add_rollouts(store, run, step, earned, "eval")
    await log(
        store, run, {HELD_OUT: {0: 0.0, 10: sum(rewards) / 4}, "train/reward_mean": {1: 0.1, 2: 0.2, 3: 0.3, 10: 1.0}}
    )


async def test_settings_figures_and_paired_differences_are_those_of_the_runs(store: LightningStore) -> None:
    await evaluated(store, "slow", 1e-5, 0, (0.0, 0.0, 1.0, 1.0))
    await evaluated(store, "fast", 1e-4, 0, (1.0, 0.0, 1.0, 1.0))
    found = await compare_runs(store, ["slow", "fast"])
    assert [(one.name, one.values) for one in found.settings] == [("trainer.learning_rate", [1e-5, 1e-4])]
    assert [(one.held_out, one.held_out_step, one.best, one.near_best_step) for one in found.figures] == [
        (0.5, 10, 0.5, 10),
        (0.75, 10, 0.75, 10),
    ]
    (difference,) = found.differences
    assert (difference.run_id, difference.baseline, difference.tasks) == ("fast", "slow", 4)
    assert difference.difference is not None
    assert difference.difference.value == 0.25
    assert difference.difference.low == 0.0  # one task of four: chance alone may do that
    assert not difference.difference.excludes_zero


async def test_a_failed_rollout_counts_as_0_and_a_repeated_evaluation_with_its_last_replica(
    store: LightningStore,
) -> None:
    await evaluated(store, "one", 1e-5, 0, (1.0, 1.0, 1.0, 1.0))
    await evaluated(store, "two", 1e-5, 1, (1.0, 1.0, 1.0, 1.0))
    again = [Earned(group="a", reward=0.5, replica=1), Earned(group="e", reward=None)]
    await add_rollouts(store, "two", 10, again, "eval")
    (difference,) = (await compare_runs(store, ["one", "two"])).differences
    assert difference.tasks == 4
    assert difference.difference is not None
    assert difference.difference.value == -0.125


async def test_a_fork_of_an_evaluation_s_rollout_counts_in_no_difference(store: LightningStore) -> None:
    await evaluated(store, "slow", 1e-5, 0, (0.0, 0.0, 1.0, 1.0))
    await evaluated(store, "fast", 1e-4, 0, (0.0, 0.0, 1.0, 1.0))
    [lost, *_] = await store.rollouts(RolloutQuery(run_id="fast", mode="eval", step=10))
    await add_fork(store, lost.id, 1.0)
    [difference] = (await compare_runs(store, ["slow", "fast"])).differences
    assert difference.difference is not None
    assert difference.difference.value == 0.0


async def test_what_a_crash_undid_is_in_no_figure(store: LightningStore) -> None:
    await evaluated(store, "one", 1e-5, 0, (1.0, 1.0, 1.0, 1.0))
    await evaluated(store, "two", 1e-5, 1, (1.0, 1.0, 1.0, 1.0))
    await store.log_metrics([Metric(run_id="two", step=12, name=HELD_OUT, value=9.0, abandoned=True)])
    found = await compare_runs(store, ["one", "two"])
    assert [one.best for one in found.figures] == [1.0, 1.0]


async def test_runs_that_differ_by_their_seed_alone_are_one_band(store: LightningStore) -> None:
    await evaluated(store, "a0", 1e-5, 0, (0.0, 0.0, 0.0, 1.0))
    await evaluated(store, "a1", 1e-5, 1, (0.0, 1.0, 1.0, 1.0))
    await evaluated(store, "b0", 1e-4, 0, (1.0, 1.0, 1.0, 1.0))
    found = await compare_runs(store, ["a0", "a1", "b0"])
    assert [band.run_ids for band in found.bands] == [["a0", "a1"], ["b0"]]
    last = found.bands[0].held_out[-1]
    assert (last.step, last.mean, last.low, last.high, last.runs) == (10, 0.5, 0.25, 0.75, 2)


def test_90_percent_of_the_best_is_of_the_rise_whatever_the_scale() -> None:
    assert near_best_step({0: -2.0, 5: -1.2, 10: -1.09, 15: -1.0}) == 10
    assert near_best_step({0: 0.5, 5: 0.4}) is None
    assert near_best_step({}) is None


def test_the_slope_is_of_the_last_20_steps() -> None:
    run = Run(id="r", name="r", state="running", config={}, created_ns=0, updated_ns=0)
    rising = {step: 0.0 if step <= 30 else 0.01 * (step - 30) for step in range(1, 51)}
    found = run_figures(run, {}, rising)
    assert found.slope is not None
    assert found.slope.value == pytest.approx(0.01)
    assert (found.slope.n, found.held_out, found.step) == (20, None, 50)


def test_a_default_that_is_given_is_no_difference_and_addresses_tags_and_alerts_are_none() -> None:
    plain, given = (
        record(),
        record(
            algorithm={"credit": "uniform"},
            store={"url": "memory://"},
            monitor={"tags": ["baseline"]},
            alerts={"command": ["mail"]},
        ),
    )
    assert differing([flat_settings(plain), flat_settings(given)]) == []


async def test_what_cannot_be_compared_is_named(store: LightningStore) -> None:
    await evaluated(store, "one", 1e-5, 0, (1.0, 1.0, 1.0, 1.0))
    with pytest.raises(InputError, match="expected 2 to 20 different runs, got 1"):
        await compare_runs(store, ["one", "one"])
    with pytest.raises(NotFoundError, match="none: no such run"):
        await compare_runs(store, ["one", "none"])


async def two_runs(url: str) -> None:
    async with SqlLightningStore(url) as opened:
        await evaluated(opened, "slow", 1e-5, 0, (0.0, 0.0, 0.0, 0.0))
        await evaluated(opened, "fast", 1e-4, 0, (1.0, 1.0, 1.0, 1.0))


async def test_the_command_prints_tables_and_json(tmp_path: object) -> None:
    import asyncio

    url = f"sqlite:///{tmp_path}/agl.db"
    await two_runs(url)
    told = await asyncio.to_thread(CliRunner().invoke, app, ["runs", "compare", "slow", "fast", "--store", url])
    assert told.exit_code == 0, told.output
    assert "trainer.learning_rate" in told.output
    assert "fast - slow: +1.000 [+1.000, +1.000] over 4 held-out tasks\n" in told.output
    as_json = ["runs", "compare", "slow", "fast", "--json", "--store", url]
    found = orjson.loads((await asyncio.to_thread(CliRunner().invoke, app, as_json)).output)
    assert found["differences"][0]["difference"]["n"] == 4


def test_the_difference_of_three_tasks_is_worked_by_hand() -> None:
    found = paired_difference("b", "a", {"x": 1.0, "y": 0.5, "only": 1.0}, {"x": 0.0, "y": 0.5})
    assert found.tasks == 2
    assert found.difference is not None
    assert (found.difference.value, found.difference.low, found.difference.high) == (0.5, 0.0, 1.0)
