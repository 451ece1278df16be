"""The conformance suite runs on every kind of store: a new kind adds a parameter here and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from store_samples import Clock, Server, sql_store

from agentlightning.store.base import LightningStore
from agentlightning.store.open import open_store


@pytest.fixture
def clock() -> Clock:
    """The clock of the store under test."""
    return Clock()


@pytest.fixture(params=["memory", "sqlite", "http"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> AsyncIterator[LightningStore]:
    """An open, empty store of each kind."""
    if request.param == "memory":
        async with sql_store("memory://", clock) as memory:
            yield memory
    elif request.param == "sqlite":
        async with sql_store(f"sqlite:///{tmp_path}/agl.db", clock) as file:
            yield file
    else:
        async with (
            Server(sql_store("memory://", clock), server_key="secret") as server,
            open_store(server.url, "secret") as client,
        ):
            yield client
