"""A reader over a store that is filled once for a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from console_scene import fill

from agentlightning.console.reader import Reader
from agentlightning.store.sql.store import SqlLightningStore


@pytest.fixture
async def reader(tmp_path: Path) -> AsyncIterator[Reader]:
    async with SqlLightningStore(f"sqlite:///{tmp_path / 'agl.db'}") as store:
        await fill(store)
        reader = Reader(store, clock=lambda: 0.0)
        yield reader
        reader.close()
