"""[limits.attempt] and [limits.run]: a budget that would have no effect is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.config.limits import LIMITS_RESOURCE
from agentlightning.config.run import Config, parse_config
from agentlightning.errors import ConfigError
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.processes import put_gateway_settings

LEAST: dict[str, Any] = {"model": {"path": "m"}, "agent": {"run": "a.py:f"}, "data": {"train": "t"}}
JUDGE = {"url": "https://h/v1", "models": ["x"]}
PRICES = {"input_cost_per_token": 1e-6, "output_cost_per_token": 4e-6}


def config(**tables: Any) -> Config:
    return parse_config({**LEAST, **tables})


def test_nothing_is_limited_unless_asked_for() -> None:
    limits = config().limits
    assert not limits.attempt.has_totals
    assert not limits.run.has_totals


@pytest.mark.parametrize(
    ("external", "sentence"),
    [
        ({}, r"limits\.run\.max_budget: has no effect without external models"),
        ({"judge": JUDGE}, r"external\.judge\.input_cost_per_token: is required by limits\.run\.max_budget"),
        (
            {"judge": {**JUDGE, **PRICES}, "free": {**JUDGE, "models": ["y"]}},
            r"external\.free\.input_cost_per_token: is required by limits\.run\.max_budget; 0 where",
        ),
    ],
)
def test_a_budget_wants_a_price_of_every_external_model(external: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config(external=external, limits={"run": {"max_budget": 5}})


def test_a_budget_with_prices_is_accepted() -> None:
    table = config(external={"judge": {**JUDGE, **PRICES}}, limits={"attempt": {"max_budget": 0.5}})
    assert table.limits.attempt.max_budget == 0.5


def test_one_price_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="input_cost_per_token, output_cost_per_token: give both"):
        config(external={"judge": {**JUDGE, "input_cost_per_token": 1}})


@pytest.mark.parametrize("limits", [{"attempt": {"max_calls": 0}}, {"run": {"max_budget": 0}}, {"run": {"tpm": 1}}])
def test_limits_that_are_none_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"limits\.(attempt|run)\."):
        config(limits=limits)


async def test_limits_are_a_resource_of_the_run_only_where_they_are_set_or_were() -> None:
    async with InMemoryLightningStore() as store:
        run_id = (await store.create_run("test", {})).id
        await put_gateway_settings(config(), run_id, store)
        assert await store.resources(run_id) == []
        for limits in ({"run": {"max_calls": 5}}, {"run": {"max_calls": 5}}, {}):
            await put_gateway_settings(config(limits=limits), run_id, store)
        first, second = await store.resources(run_id, LIMITS_RESOURCE, latest=False)
    assert (first.value["run"]["max_calls"], second.value["run"]["max_calls"]) == (5, None)
