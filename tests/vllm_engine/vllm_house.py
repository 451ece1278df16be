"""A store with one run whose policy is served by a real vLLM, and a gateway over it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from agentlightning.gateway.app import App
from agentlightning.records import Call, Claim, NewRollout, Resource, Sampling, WorkerStatus
from agentlightning.store.base import LightningStore
from agentlightning.store.sql.store import InMemoryLightningStore


@dataclass
class VllmServer:
    """The server, and two models of one shape; it starts with the first."""

    url: str
    models: list[Path]

    async def post(self, path: str, body: dict[str, Any] | None = None) -> None:
        """An order to the server."""
        async with aiohttp.ClientSession() as session, session.post(self.url + path, json=body or {}) as answer:
            assert answer.status == 200, await answer.text()

    async def load(self, index: int, version: int) -> None:
        """Serve another model's weights from now on, calls in flight included."""
        kwargs = {"weights_path": str(self.models[index])}
        await self.post("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        await self.post("/update_weight_version", {"new_version": str(version)})
        await self.post("/reset_prefix_cache?reset_running_requests=true")

    async def metric(self, name: str) -> float:
        """A number of the server's metrics."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@dataclass
class VllmHouse:
    """Everything real."""

    server: VllmServer
    store: LightningStore
    app: App
    run_id: str
    _clients: list[httpx.AsyncClient] = field(default_factory=list)

    async def claim(self, group: str = "g", sampling: Sampling = Sampling()) -> Claim:
        rollout = NewRollout(run_id=self.run_id, task={}, group_id=group, replica=0, sampling=sampling)
        await self.store.enqueue([rollout])
        worker = WorkerStatus(id="w", run_id=self.run_id, host="h", pid=1, running=0, seen_ns=0)
        return (await self.store.claim(worker))[0]

    def openai(self, claim: Claim) -> AsyncOpenAI:
        client = self.http(claim)
        return AsyncOpenAI(base_url=str(client.base_url), api_key=claim.key, http_client=client, max_retries=0)

    def http(self, claim: Claim) -> httpx.AsyncClient:
        """A client whose paths begin under the attempt's /v1."""
        transport = httpx.ASGITransport(self.app, client=("127.0.0.1", 1))
        url = f"http://gateway/r/{claim.rollout.id}/{claim.lease.attempt}/v1/"
        headers = {"authorization": f"Bearer {claim.key}"}
        client = httpx.AsyncClient(transport=transport, base_url=url, headers=headers)
        self._clients.append(client)
        return client

    async def calls(self, claim: Claim) -> list[Call]:
        return await self.store.calls([claim.rollout.id])

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()
        await self.app.close()


@asynccontextmanager
async def open_house(
    server: VllmServer, logprobs: str | None = "raw", images: bool = False
) -> AsyncIterator[VllmHouse]:
    async with InMemoryLightningStore() as store:
        run = await store.create_run("vllm", {})
        value = {
            "model": "policy",
            "served_model": "tiny",
            "endpoints": [server.url],
            "tokenizer": str(server.models[0]),
        }
        value |= {"seed": None, "images": images}
        value |= {} if logprobs is None else {"logprobs": logprobs}
        await store.put_resources([Resource(run_id=run.id, name="default", kind="policy", value=value)])
        house = VllmHouse(server, store, App(store), run.id)
        try:
            yield house
        finally:
            await house.close()


def prompts(calls: list[Call]) -> dict[str, list[int]]:
    """The full prompt of every call."""
    found: dict[str, list[int]] = {}
    by_id = {call.id: call for call in calls}
    for call in calls:
        before = [] if call.parent_id is None else found[call.parent_id] + by_id[call.parent_id].sampled_ids
        found[call.id] = before + call.suffix_ids
    return found


def recomputed(model: Path, prompt: list[int], sampled: list[int]) -> list[float]:
    """Log-probabilities of sampled ids by transformers."""
    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        logits = network(torch.tensor([prompt + sampled])).logits[0]
    logprobs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    picked: list[float] = logprobs.gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()
    return picked
