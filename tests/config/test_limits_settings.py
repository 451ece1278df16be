"""[limits.attempt] and [limits.run]: read, and put where the gateway finds them."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.config.run import LIMITS_RESOURCE, Config, parse_config
from agentlightning.errors import ConfigError
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.processes import put_gateway_settings

LEAST: dict[str, Any] = {"model": {"path": "m"}, "agent": {"run": "a.py:f"}, "data": {"train": "t"}}


def config(**tables: Any) -> Config:
    return parse_config({**LEAST, **tables})


def test_nothing_is_limited_unless_asked_for() -> None:
    limits = config().limits
    assert not limits.attempt.has_totals
    assert not limits.run.has_totals


@pytest.mark.parametrize("limits", [{"attempt": {"max_calls": 0}}, {"run": {"max_tokens": 0}}, {"run": {"tpm": 1}}])
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
