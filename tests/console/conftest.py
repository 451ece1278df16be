"""A store that is filled once, and a reader over a copy of it for each test."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from console_scene import fill
from rewards_scene import fill_rewards

from agentlightning.console.reader import Reader
from agentlightning.store.sql.store import SqlLightningStore


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the store's file."""
    folder = tmp_path_factory.mktemp("scene")

    async def filled() -> None:
        async with SqlLightningStore(f"sqlite:///{folder / 'agl.db'}") as store:
            await fill_rewards(store)
            await fill(store)

    asyncio.run(filled())
    return folder


@pytest.fixture
async def reader(scene: Path, tmp_path: Path) -> AsyncIterator[Reader]:
    shutil.copytree(scene, tmp_path / "copy")
    async with SqlLightningStore(f"sqlite:///{tmp_path / 'copy' / 'agl.db'}") as store:
        reader = Reader(store, clock=lambda: 0.0)
        yield reader
        reader.close()
