"""``agl tokens create --role client``: a key that has no limits, while others have, says so."""

from __future__ import annotations

import asyncio
from pathlib import Path

from typer.testing import CliRunner

from agentlightning.cli.app import app
from agentlightning.config.run import LIMITS_RESOURCE
from agentlightning.records import Resource
from agentlightning.store.open import open_store


def test_a_key_whose_name_has_no_limits_is_told_of(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/agl.db"

    async def make() -> None:
        async with open_store(url) as store:
            await store.create_run("serve support", {"serve": {"model": "support"}}, "served")
            value = {"keys": {"shop": {"max_calls": 1}}}
            await store.put_resources([Resource(run_id="served", name=LIMITS_RESOURCE, kind="limits", value=value)])

    asyncio.run(make())

    def told(name: str) -> str:
        words = ["tokens", "create", "--role", "client", "--run", "served", "--store", url, "--name", name]
        return CliRunner().invoke(app, words).stderr

    assert "--name: sohp has no limits; names with limits are shop" in told("sohp")
    assert "no limits" not in told("shop")
