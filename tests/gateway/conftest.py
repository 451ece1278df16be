"""Fixtures of a gateway over a store in memory and a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from gateway_house import END, House
from scripted_engine import ScriptedEngine
from toy_model import write_tokenizer

from agentlightning.rendering.renderer import Renderer
from agentlightning.store.base import LightningStore
from agentlightning.store.sql.store import InMemoryLightningStore


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model") / "tokenizer")


@pytest.fixture(scope="session")
def renderer(tokenizer_folder: Path) -> Renderer:
    return Renderer(tokenizer_folder)


@pytest.fixture
async def engine(renderer: Renderer) -> AsyncIterator[ScriptedEngine]:
    engine = await ScriptedEngine(lambda _: [*renderer.encode("It is sunny."), END]).start()
    yield engine
    await engine.close()


@pytest.fixture
async def house(
    make_house: Callable[[LightningStore], Awaitable[House]],
) -> AsyncIterator[House]:
    async with InMemoryLightningStore() as store:
        house = await make_house(store)
        yield house
        await house.close()


@pytest.fixture
def make_house(
    engine: ScriptedEngine, renderer: Renderer, tokenizer_folder: Path
) -> Callable[[LightningStore], Awaitable[House]]:
    return lambda store: House(store, engine, renderer, tokenizer_folder).start()
