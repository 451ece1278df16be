"""A real vLLM server on a tiny model, and a gateway in front of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import pytest
from tiny_llava import write_seeing_model
from tiny_qwen import CONTEXT, END, write_model
from vllm_house import VllmHouse, VllmServer, open_house
from vllm_process import PROCESSED, serving


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """Started once, with the raw log-probabilities that are its default."""
    folder = tmp_path_factory.mktemp("vllm")
    models = [write_model(folder / f"model-{seed}", seed) for seed in (0, 1)]
    with serving(models, "--max-model-len", str(CONTEXT)) as server:
        yield server


@pytest.fixture(scope="session")
def masked_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """Another one, as docs/structured-output.md has it started: log-probabilities after the mask, llguidance's masks."""
    folder = tmp_path_factory.mktemp("vllm-masked")
    models = [write_model(folder / "model", 0, ends=(3, END))]
    backend = json.dumps({"backend": "guidance"})
    options = [*PROCESSED, "--structured-outputs-config", backend]
    with serving(models, "--max-model-len", str(CONTEXT), *options) as server:
        yield server


@pytest.fixture(scope="session")
def seeing_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A third one, whose model has sight."""
    folder = tmp_path_factory.mktemp("vllm-sight")
    with serving([write_seeing_model(folder / "model")], "--max-model-len", "256", *PROCESSED) as server:
        yield server


@pytest.fixture
async def vllm_house(vllm_server: VllmServer) -> AsyncIterator[VllmHouse]:
    """A gateway over the server."""
    async with open_house(vllm_server) as house:
        yield house
