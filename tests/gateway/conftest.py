"""Fixtures of a gateway over a store in memory and a scripted engine, and of external models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx2
import pytest
from anthropic import AsyncAnthropic
from external_house import SECRET, serve
from external_server import ExternalServer
from gateway_house import END, House, path
from scripted_engine import ScriptedEngine
from toy_model import write_tokenizer

from agentlightning.records import Claim
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
async def engine(renderer: Renderer, tokenizer_folder: Path) -> AsyncIterator[ScriptedEngine]:
    engine = await ScriptedEngine(lambda _: [*renderer.encode("It is sunny."), END], tokenizer=tokenizer_folder).start()
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


@pytest.fixture(scope="session")
def sight_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from picture_requests import WORDS  # with Pillow and torch, which no other tests here need

    from agentlightning.demo import tiny_model, tiny_vision

    folder = tmp_path_factory.mktemp("sight")
    tiny_vision.write(folder, tiny_model.word_tokenizer([], WORDS, min_times_seen=1), hidden=16, layers=1)
    return folder


@pytest.fixture(scope="session")
def sight(sight_folder: Path) -> Renderer:
    return Renderer(sight_folder)


@pytest.fixture
async def sighted(sight: Renderer, sight_folder: Path) -> AsyncIterator[House]:
    from picture_requests import TOKENS

    end = sight.special_id("<|end|>")
    engine = await ScriptedEngine(lambda _: [*sight.encode("red"), end or 0]).start()
    placeholder = sight.images.placeholder_id if sight.images else -1
    engine.expand = lambda ids: [i for one in ids for i in ([one] * TOKENS if one == placeholder else [one])]
    async with InMemoryLightningStore() as store:
        house = await House(store, engine, sight, sight_folder).start()
        yield house
        await house.close()
    await engine.close()


@pytest.fixture
async def external(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ExternalServer]:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    server = await ExternalServer().start()
    yield server
    await server.close()


@pytest.fixture
async def claim(house: House, external: ExternalServer) -> Claim:
    """An attempt of a run with a judge that speaks OpenAI's protocols and a simulator that speaks Anthropic's."""
    await serve(house, "judge", url=external.url, models=["gpt-4o-mini", "gpt-5*"], key_env="JUDGE_KEY")
    await serve(house, "user", url=external.url, models=["claude-*"], key_env="JUDGE_KEY", protocol="anthropic")
    return await house.claim()


@pytest.fixture
async def claude(house: House, claim: Claim) -> AsyncIterator[AsyncAnthropic]:
    """The Anthropic SDK, pointed at the attempt."""
    transport = httpx2.ASGITransport(house.app, client=("127.0.0.1", 1))
    async with httpx2.AsyncClient(transport=transport) as http:
        yield AsyncAnthropic(
            base_url=f"http://gateway{path(claim)}", api_key=claim.key, http_client=http, max_retries=0
        )
