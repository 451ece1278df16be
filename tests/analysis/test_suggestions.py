"""Suggestions from runs that were planted with good and bad settings."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
from stored_runs import record
from typer.testing import CliRunner

from agentlightning.analysis.suggestions import Suggestions, suggest
from agentlightning.cli.app import app
from agentlightning.records import RunState
from agentlightning.store.base import LightningStore
from agentlightning.store.sql.store import InMemoryLightningStore, SqlLightningStore

HELD_OUT = "eval/greedy/reward_mean"
FALLING = "the reward was 0.5 up to step 9 and is 0.1: lower trainer.learning_rate, keep the policy near its reference"
GOOD, BAD = 2e-5, 1e-3


@pytest.fixture
async def store() -> AsyncIterator[LightningStore]:
    async with InMemoryLightningStore() as opened:
        yield opened


async def ran(
    store: LightningStore,
    run: str,
    rate: float,
    held_out: float | None,
    *,
    alarms: Mapping[str, str] | None = None,
    state: RunState = "finished",
    **tables: Any,
) -> None:
    tables["trainer"] = {"learning_rate": rate, **tables.get("trainer", {})}
    await store.create_run(run, record(**tables), run)
    summary = {"step": 9, "alarms": dict(alarms or {})} | ({} if held_out is None else {HELD_OUT: held_out})
    await store.update_run(run, state, summary)


async def planted(store: LightningStore, count: int) -> None:
    """Runs of alternately a good and a bad learning rate; clipping has nothing to do with the outcome."""
    dice = random.Random(0)
    for number in range(count):
        good = number % 2 == 0
        reward = (0.8 if good else 0.2) + dice.gauss(0, 0.02)
        clip = {"grad_clip": dice.choice((0.5, 1.0)), "seed": number}
        alarms = {} if good else {"reward_falling": FALLING}
        await ran(
            store,
            f"r{number:02}",
            (GOOD if good else BAD) * dice.uniform(0.8, 1.2),
            reward,
            alarms=alarms,
            trainer=clip,
        )


async def suggested(store: LightningStore, rate: float, **tables: Any) -> Suggestions:
    return await suggest(store, record(trainer={"learning_rate": rate}, **tables))


async def test_a_check_is_no_earlier_run(store: LightningStore) -> None:
    await ran(store, "trained", GOOD, 0.5)
    await ran(store, "check", GOOD, 0.9)

    found = await suggested(store, BAD)

    assert ([one.run_id for one in found.best], found.comparable) == (["trained"], 1)


async def test_settings_are_proposed_near_a_planted_good_learning_rate(store: LightningStore) -> None:
    pytest.importorskip("optuna")
    await planted(store, 14)
    found = await suggested(store, BAD)
    assert (found.finished, found.no_proposals) == (14, None)
    assert next(iter(found.importances)) == "trainer.learning_rate"
    rates = sorted(one["trainer.learning_rate"] for one in found.proposals)
    assert rates[len(rates) // 2] < 1e-4
    assert await suggested(store, BAD) == found


async def test_without_a_varied_setting_there_is_nothing_to_learn(store: LightningStore) -> None:
    for number in range(10):
        await ran(store, f"r{number:02}", GOOD, 0.5, trainer={"seed": number})
    found = await suggested(store, GOOD)
    assert found.no_proposals == "no setting was varied in the comparable runs"


async def test_an_alarm_that_a_setting_explains_is_a_rule_with_its_evidence(store: LightningStore) -> None:
    await planted(store, 4)
    (rule,) = (await suggested(store, 2 * BAD)).rules
    assert (rule.alarm, rule.setting) == ("reward_falling", "trainer.learning_rate")
    assert (sorted(rule.alarmed), sorted(rule.quiet)) == (["r01", "r03"], ["r00", "r02"])
    assert rule.text.startswith("trainer.learning_rate = 0.002: all 2 runs with ")
    assert rule.text.endswith(f"had the alarm, none of 2 others: {FALLING}")
    assert [one.setting for one in (await suggested(store, GOOD)).rules] == [
        None
    ]  # half of the runs had it all the same


async def test_while_an_alarm_is_active_nothing_else_is_suggested(store: LightningStore) -> None:
    await planted(store, 14)
    await ran(store, "now", 3e-4, 0.4, alarms={"reward_falling": FALLING}, state="running", trainer={"seed": 7})
    found = await suggested(store, 3e-4)
    assert [(one.run_id, one.name) for one in found.active] == [("now", "reward_falling")]
    assert (found.rules, found.best, found.proposals) == ([], [], [])
    assert found.no_proposals == "an alarm is active: resolve it first"
    assert (await suggested(store, GOOD)).active == []  # of other settings


async def test_only_runs_of_the_same_model_tasks_and_reward_are_compared(store: LightningStore) -> None:
    await ran(store, "same", GOOD, 0.5)
    await ran(store, "other-model", GOOD, 0.5, model={"path": "other"})
    await ran(store, "other-tasks", GOOD, 0.5, data={"train": "others.jsonl"})
    await store.create_run("imported", {}, "imported")
    found = await suggested(store, GOOD)
    assert (found.comparable, [(one.run_id, one.differs) for one in found.best]) == (1, [("same", [])])


async def test_without_the_extra_all_that_needs_none_is_said_and_the_extra_named(
    store: LightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)  # as where it is not installed
    await planted(store, 14)
    found = await suggested(store, BAD)
    assert len(found.best) == 5
    told = "optuna is not installed; install the extra suggest, in a clone: pip install '.[suggest]'"
    assert (found.no_proposals or "").startswith(told)


TOML = """
[model]
path = "m"
[agent]
run = "agent.py:solve"
[data]
train = "tasks.jsonl"
val = "held-out.jsonl"
[trainer]
learning_rate = 1e-3
"""


async def test_the_command_says_the_same(tmp_path: Path) -> None:
    url, config = f"sqlite:///{tmp_path}/agl.db", tmp_path / "train.toml"
    config.write_text(TOML)
    async with SqlLightningStore(url) as opened:
        await planted(opened, 3)

    async def agl(*words: str) -> str:
        done = await asyncio.to_thread(
            CliRunner().invoke, app, ["runs", "suggest", str(config), *words, "--store", url]
        )
        assert done.exit_code == 0, (done.output, done.exception)
        return done.output

    assert "no settings are suggested: not enough runs: 3 comparable ones have finished with a held-out" in await agl()
    assert orjson.loads(await agl("--json"))["comparable"] == 3
    assert "trainer.learning_rate = 0.9: all 1 runs with" in await agl("--set", "trainer.learning_rate=0.9")
