"""A real server process with a server key over a scripted engine, and two attempts: an attacker's and somebody else's."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

for shared in ("analysis", "frameworks", "gateway", "runner", "sdk"):
    sys.path.append(str(Path(__file__).parents[1] / shared))

from attack_scene import DEADLINE_S, END, SERVER_KEY, Scene, a_claim  # noqa: E402 - what these import is found by the lines above
from scripted_engine import ScriptedEngine  # noqa: E402
from server_process import ServerProcess  # noqa: E402
from toy_model import write_tokenizer  # noqa: E402

from agentlightning.records import Resource  # noqa: E402
from agentlightning.rendering.renderer import Renderer  # noqa: E402
from agentlightning.store.client import LightningStoreClient  # noqa: E402


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("attacked")
    server = ServerProcess(f"sqlite:///{folder}/agl.db", folder / "server.log", SERVER_KEY).start()
    yield server
    server.close()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model") / "tokenizer")


@pytest.fixture
async def scene(server: ServerProcess, tokenizer: Path) -> AsyncIterator[Scene]:
    """One server for all tests: what one attack leaves behind, the next one meets."""
    renderer = Renderer(tokenizer)
    engine = await ScriptedEngine(lambda _: [*renderer.encode("It is sunny."), END], tokenizer=tokenizer).start()
    async with LightningStoreClient(server.url, SERVER_KEY) as store:
        run = await store.create_run("attacked", {"agent": {"reward": []}})
        value = {"model": "policy", "endpoints": [engine.url], "tokenizer": str(tokenizer), "seed": 7}
        await store.put_resources([Resource(run_id=run.id, name="default", kind="policy", value=value)])
        mine, other = await a_claim(store, run.id, "mine"), await a_claim(store, run.id, "other")
        yield Scene(server, store, run.id, mine, other)
    await engine.close()


@pytest.fixture
async def http(scene: Scene) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=scene.server.url, timeout=DEADLINE_S) as client:
        yield client
