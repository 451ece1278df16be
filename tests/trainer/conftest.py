"""A store with one run, "run", for the tests of the training loop and its parts."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from agentlightning.store.sql.store import InMemoryLightningStore


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    async with InMemoryLightningStore() as opened:
        await opened.create_run("test", {}, "run")
        yield opened
