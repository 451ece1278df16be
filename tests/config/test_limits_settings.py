"""[limits.attempt] and [limits.run]: read, and put where the gateway finds them."""

from __future__ import annotations

from typing import Any

from agentlightning.config.run import LIMITS_RESOURCE, Config, parse_config
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.processes import put_gateway_settings

LEAST: dict[str, Any] = {"model": {"path": "m"}, "agent": {"run": "a.py:f"}, "data": {"train": "t"}}


def config(**tables: Any) -> Config:
    return parse_config({**LEAST, **tables})


async def test_limits_are_a_resource_of_the_run_only_where_they_are_set_or_were() -> None:
    async with InMemoryLightningStore() as store:
        run_id = (await store.create_run("test", {})).id
        await put_gateway_settings(config(), run_id, store)
        assert await store.resources(run_id) == []
        for limits in ({"run": {"max_calls": 5}}, {"run": {"max_calls": 5}}, {}):
            await put_gateway_settings(config(limits=limits), run_id, store)
        first, second = await store.resources(run_id, LIMITS_RESOURCE, latest=False)
    assert (first.value["run"]["max_calls"], second.value["run"]["max_calls"]) == (5, None)
