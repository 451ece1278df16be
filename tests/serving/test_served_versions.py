"""Versions that are served: what is kept from deletion, and from when."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from agentlightning.config.run import parse_config, run_record
from agentlightning.demo import tiny_model
from agentlightning.engines.base import Endpoints, Engine
from agentlightning.engines.setup import EngineSetup, make_engine
from agentlightning.engines.support import Support
from agentlightning.errors import ConflictError, EngineError
from agentlightning.serving.settings import ServeFile
from agentlightning.serving.versions import ServedVersions
from agentlightning.store.base import LightningStore
from agentlightning.store.model_versions import ModelVersion
from agentlightning.store.open import open_store


class EngineThatDoesNotStart:
    """Waits for `go`, then fails."""

    def __init__(self, support: Support, starting: asyncio.Event, go: asyncio.Event) -> None:
        self.support = support
        self.starting, self.go = starting, go

    async def start(self) -> dict[str, Endpoints]:
        self.starting.set()
        await self.go.wait()
        raise EngineError("no memory")


async def test_a_version_is_leased_while_its_engine_starts_and_is_renewed_no_longer_where_it_cannot(
    tmp_path: Path,
) -> None:
    starting, go = asyncio.Event(), asyncio.Event()

    def make(setup: EngineSetup) -> Engine:
        return cast(Engine, EngineThatDoesNotStart(make_engine(setup).support, starting, go))

    async with open_store("memory://") as store:
        await register(store, tmp_path / "model")
        serving = await store.create_run("serve tiny", {})
        versions = ServedVersions(store, serving.id, "tiny", ServeFile(), tmp_path / "runs", make)
        loading = asyncio.create_task(versions.load(1))
        async with asyncio.timeout(60):
            await starting.wait()
        assert (versions.leased, versions.numbers) == ({1}, set())
        with pytest.raises(ConflictError, match=f"leased by {serving.id}"):
            await store.delete_model("tiny", 1)
        go.set()
        with pytest.raises(EngineError, match="no memory"):
            await loading
        assert versions.leased == set()


async def register(store: LightningStore, model: Path) -> None:
    tiny_model.build(model, ["hello there"], vocabulary=60)
    table: dict[str, Any] = {
        "model": {"path": str(model)},
        "agent": {"run": "agent.py:solve"},
        "data": {"train": "train.jsonl"},
        "engine": {"device": "cpu"},
    }
    run = await store.create_run("train", run_record(parse_config(table, "test")))
    await store.register_model(
        ModelVersion(
            name="tiny",
            number=0,
            run_id=run.id,
            policy="default",
            step=1,
            resource_version=1,
            parent=None,
            base_model=str(model),
            weights={"kind": "full", "url": f"file://{model}", "manifest_hash": None, "bytes": 1},
        )
    )
