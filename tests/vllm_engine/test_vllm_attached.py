"""Engines whose sampler is a vLLM that runs already: weights by its own reload, or fetched from the trainer by HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from vllm_house import VllmServer
from vllm_process import PROCESSED, serving

from agentlightning.engines.base import DEFAULT_POLICY, Engine, make_engine
from agentlightning.engines.vllm.servers import VLLM_SIDE
from agentlightning.testing.contract_model import write_contract_model
from agentlightning.testing.engine_contract import SFT, LiveEndpoints, contract_setup, sequence

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.long]

TRANSFER = ["--worker-extension-cls", "agentlightning_vllm.worker.WeightsWorker"]
TRANSFER += ["--weight-transfer-config", json.dumps({"backend": "agentlightning"})]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    model = write_contract_model(tmp_path_factory.mktemp("attached") / "model", tied=False)
    with serving([model], *PROCESSED, *TRANSFER, "--max-model-len", "512", PYTHONPATH=str(VLLM_SIDE)) as server:
        yield server


@asynccontextmanager
async def attached(server: VllmServer, folder: Path, weights: str) -> AsyncIterator[tuple[Engine, LiveEndpoints]]:
    table = {"sampler": {"type": "vllm_server", "urls": [server.url], "weights": weights}}
    engine = make_engine(contract_setup(table, server.models[0], folder))
    try:
        served = (await engine.start())[DEFAULT_POLICY]
        async with aiohttp.ClientSession() as http:
            yield engine, LiveEndpoints(served, http)
    finally:
        await engine.close()


@pytest.mark.parametrize("weights", ["reload", "http://127.0.0.1"])
async def test_a_running_server_samples_with_the_learner_s_weights(
    server: VllmServer, tmp_path: Path, weights: str
) -> None:
    async with attached(server, tmp_path, weights) as (engine, sampler):
        assert engine.pids().keys() == {"learner"}
        await engine.publish(3)
        prompt = [4, 5, 6]
        for version in (4, 5):
            await engine.forward_backward([sequence([*prompt, 40, 41, 42, 1], [(3, 7)])], SFT)
            await engine.optim_step(1e-2, 1.0)
            await engine.publish(version)
            sampled = await sampler.sample(prompt, temperature=0.6, max_tokens=20)
            assert {span.version for span in sampled.versions} == {version}
            ids = [*prompt, *sampled.ids]
            (learned,) = await engine.logprobs([sequence(ids, [(3, len(ids))], temperature=0.6)])
            assert learned[3:] == pytest.approx(sampled.logprobs, abs=1e-4)


async def test_a_server_that_lost_its_weights_gets_them_again(server: VllmServer, tmp_path: Path) -> None:
    async with attached(server, tmp_path, "reload") as (engine, sampler):
        await engine.publish(8)
        await server.post(
            "/update_weight_version", {"new_version": "default"}
        )  # as a server that was started again says
        while (await sampler.sample([4, 5, 6], max_tokens=1)).versions[0].version != 8:
            pass
