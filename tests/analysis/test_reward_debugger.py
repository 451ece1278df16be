"""The calculation of a reward in words and numbers, and a stored step under other rules."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from stored_runs import Earned, add_rollouts, record
from typer.testing import CliRunner

from agentlightning.analysis.reward_debugger import RewardChange, WhatIfReport, explain_rollout, what_if
from agentlightning.cli.app import app
from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.records import Consumed, ConsumedInputs
from agentlightning.store.base import LightningStore
from agentlightning.store.sql.store import InMemoryLightningStore, SqlLightningStore

GROUP = [Earned(group="a", replica=place, reward=float(place == 0), calls=(2, 3)) for place in range(4)]
"""Rewards 1, 0, 0, 0: mean 0.25, deviation 0.5, advantages 1.5 and -0.5 by GRPO (less by its epsilon)."""
GRPO = (0.75 / 0.5001, -0.25 / 0.5001)


@pytest.fixture
async def store() -> AsyncIterator[LightningStore]:
    async with InMemoryLightningStore() as opened:
        yield opened


async def made(store: LightningStore, earned: list[Earned] = GROUP, **tables: Any) -> list[str]:
    tables = {"algorithm": {"group_size": 4}, **tables}
    await store.create_run("run", record(**tables), "run")
    return await add_rollouts(store, "run", 1, earned)


async def changed(store: LightningStore, **change: Any) -> WhatIfReport:
    return await what_if(store, "run", 1, RewardChange(**change))


async def test_a_reward_is_explained_from_record_to_advantage(store: LightningStore) -> None:
    first, *_ = await made(store)
    found = await explain_rollout(store, first)
    assert [(one.credit, one.tokens) for one in found.rollout.calls] == [(1.0, 2), (1.0, 3)]
    assert [one.advantage for one in found.rollout.calls] == pytest.approx([GRPO[0]] * 2)
    assert sorted(found.group.values(), key=str) == [0.0, 0.0, 0.0, 1.0]
    told = "\n".join(found.lines)
    assert "reward: 1\n" in told
    assert "rewards 1, 0, 0, 0; mean 0.25, standard deviation 0.5" in told
    assert "credit uniform: R for each transition" in told
    assert "advantage grpo: (credit - mean of the rewards) / (standard deviation of the rewards + 1e-4)" in told
    assert "call 2: +1.5 on each of 3 trained tokens" in told
    assert told.endswith("outcome: trained, if the step were learned from as it is now")


async def test_a_rule_whose_credit_is_a_difference_is_explained_by_the_numbers_that_it_compares(
    store: LightningStore,
) -> None:
    """Returns 1 and -0.2: mean 0.4, deviation 0.8485; the first call earned 0.6 more than expected, the last 0.5."""
    settings = {"group_size": 2, "credit": {"type": "grouped_gae", "lam": 1.0}}
    earned = [
        Earned(group="a", reward=1.0, calls=(2, 3)),
        Earned(group="a", replica=1, reward=0.0, calls=(2, 3), step_rewards={0: -0.2}),
    ]
    first, _ = await made(store, earned, algorithm=settings)
    found = await explain_rollout(store, first)
    assert [(one.share, one.advantage) for one in found.rollout.calls] == [
        (0.0, pytest.approx(0.6 / (0.848528 + 1e-4))),
        (0.0, pytest.approx(0.5 / (0.848528 + 1e-4))),
    ]
    told = "\n".join(found.lines)
    assert "instead of rewards: 1, -0.2; mean 0.4, standard deviation 0.8485" in told
    assert "call 1: credit 0.6, from which no mean is subtracted" in told


async def test_a_consumed_rollout_is_explained_from_its_steps_list(store: LightningStore) -> None:
    ids = await made(store)
    inputs = [ConsumedInputs(attempt=1, calls=[f"{key}-0"], rewards=[f"{key}-reward-None"]) for key in ids]
    listed = [Consumed(rollout_id=key, outcome="trained", inputs=one) for key, one in zip(ids, inputs, strict=True)]
    await store.open_step("run", 3, listed)
    found = await explain_rollout(store, ids[1])
    assert (found.step, found.consumed) == (3, True)
    assert [one.call_id for one in found.rollout.calls] == [f"{ids[1]}-0"]  # the step had not read the second one


async def test_named_rewards_are_weighed_in_the_explanation(store: LightningStore) -> None:
    earned = [
        Earned(group="a", replica=place, reward=0.0, named={"answer": float(place == 0), "format": 0.5})
        for place in range(4)
    ]
    first, *_ = await made(store, earned, algorithm={"group_size": 4, "reward_weights": {"answer": 1.0, "format": 0.2}})
    found = await explain_rollout(store, first)
    assert found.rollout.reward == pytest.approx(1.1)
    assert found.lines[0] == "reward: 1 × answer 1 + 0.2 × format 0.5 = 1.1"


async def test_another_credit_rule_changes_the_calls_that_it_credits_otherwise(store: LightningStore) -> None:
    ids = await made(store)
    found = await changed(store, credit="last")
    assert (found.before["credit"], found.after["credit"]) == ("uniform", "last")
    of_first = [one for one in found.calls if one.rollout_id == ids[0]]
    assert [(one.credit_before, one.credit_after) for one in of_first] == [(1.0, 0.0), (1.0, 1.0)]
    assert [one.advantage_before for one in of_first] == pytest.approx([GRPO[0]] * 2)
    assert [one.advantage_after for one in of_first] == pytest.approx([0.0, GRPO[0]])
    assert found.turned == 0.5  # every first call loses its sign
    assert found.tokens_turned == 4 * 2


async def test_what_takes_a_model_is_refused_by_name(store: LightningStore) -> None:
    ids = await made(store)
    with pytest.raises(ConfigError, match="advantage: 'gae' takes a critic's values, which is in no store"):
        await changed(store, advantage="gae")
    with pytest.raises(ConfigError, match="credit: 'judge' asks a model"):
        await changed(store, credit="judge", credit_settings={"model": "m", "url": "http://h/v1"})
    with pytest.raises(ConfigError, match="credit: 'forked' needs forks that were sampled for the step"):
        await changed(store, credit="forked")
    with pytest.raises(ConfigError, match=r"weights: expected names of .*, got sytle, which no rollout has"):
        await changed(store, weights={"sytle": 1.0})
    with pytest.raises(ConfigError, match="gamma"):
        await changed(store, credit="discounted", credit_settings={"gamma": 2.0})
    with pytest.raises(ConfigError, match="what-if: expected a credit rule"):
        await changed(store)
    with pytest.raises(NotFoundError, match="no rollout of step 7 has finished"):
        await what_if(store, "run", 7, RewardChange(credit="last"))
    with pytest.raises(ConfigError, match="policy: expected one of default, got 'writer'"):
        await explain_rollout(store, ids[0], "writer")


async def test_the_commands_explain_and_try(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/agl.db"
    async with SqlLightningStore(url) as opened:
        first, *_ = await made(opened)

    async def agl(*words: str) -> str:
        done = await asyncio.to_thread(CliRunner().invoke, app, ["rewards", *words, "--store", url])
        assert done.exit_code == 0, (done.output, done.exception)
        return done.output

    assert "call 1: +1.5 on each of 2 trained tokens" in await agl("explain", first)
    assert orjson.loads(await agl("explain", first, "--json"))["rollout"]["outcome"] == "trained"
    told = await agl("what-if", "run", "--step", "1", "--credit", "last")
    assert "credit: uniform -> last" in told
    assert "4 of 8 calls change; 50.0% turn" in told.splitlines()[0]
    told = await agl("what-if", "run", "--step", "1", "--credit", "discounted", "--credit-set", "gamma=0.5")
    assert "1.000 -> 0.500" in told
    assert "reward_weights: None -> {'reward': 2.0}" in await agl(
        "what-if", "run", "--step", "1", "--weights", "reward=2"
    )
