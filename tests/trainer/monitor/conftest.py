"""A store with one run, for the tests of what becomes of its numbers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from agentlightning.store.sql.store import InMemoryLightningStore


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    async with InMemoryLightningStore() as opened:
        await opened.create_run("test", {}, "run")
        yield opened
