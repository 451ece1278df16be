"""EngineRouter reach the gateway through the store before the first worker starts, and their keys are looked for."""

from typing import Any

import pytest

from agentlightning.config.run import Config, parse_config
from agentlightning.errors import ConfigError
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.processes import check_keys, put_gateway_settings


def config(**judge: Any) -> Config:
    judge = {"url": "https://h/v1", "models": ["gpt-5*"], "key_env": "JUDGE_KEY", **judge}
    table = {"model": {"path": "m"}, "agent": {"run": "a.py:f"}, "data": {"train": "t"}, "external": {"judge": judge}}
    return parse_config(table)


async def test_upstreams_are_resources_of_the_run_and_are_put_again_only_where_they_changed() -> None:
    async with InMemoryLightningStore() as store:
        run_id = (await store.create_run("test", {})).id
        for each in (config(), config(), config(max_retries=5)):
            await put_gateway_settings(each, run_id, store)
        first, second = await store.resources(run_id, "judge", latest=False)
    assert (first.kind, first.version, second.version) == ("external", 1, 2)
    assert first.value["models"] == ["gpt-5*"]
    assert (first.value["max_retries"], second.value["max_retries"]) == (2, 5)


def test_a_missing_key_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", " ")
    with pytest.raises(ConfigError, match=r"external\.judge\.key_env: the environment variable JUDGE_KEY is not set"):
        check_keys(config())
    monkeypatch.setenv("JUDGE_KEY", "secret")
    check_keys(config())
    monkeypatch.delenv("JUDGE_KEY")
    check_keys(config(key_env=None))
