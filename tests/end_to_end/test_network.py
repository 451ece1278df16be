"""Several machines: store, gateway and workers on hosts of their own, cables that are pulled, clocks that disagree.

Everything is real but the model: processes in network namespaces, real links that go down, short leases. A cable is pulled
until the test has seen that leases ran out meanwhile, never for a time.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from network import Host, Network, missing
from scripted_engine import ScriptedEngine
from toy_model import write_tokenizer

from agentlightning.records import Attempt, NewRollout, Resource, RetryPolicy, Rollout
from agentlightning.rendering.renderer import Renderer
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.open import open_store

pytestmark = pytest.mark.slow

KEY, PORT, END, ROLLOUTS, CALLS = "key-of-the-tests", 8088, 2, 40, 2
LEASE_S, HEARTBEAT_INTERVAL_S, DEADLINE_S = 5.0, 0.5, 150.0

AGENT = f"""
import asyncio

from openai import AsyncOpenAI


async def solve(task, llm):
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, http_client=llm.http_client)
    messages = [{{"role": "user", "content": "How is it?"}}]
    for _ in range({CALLS}):
        reply = await client.chat.completions.create(model=llm.model, messages=messages)
        messages += [reply.choices[0].message.model_dump(exclude_none=True), {{"role": "user", "content": "And now?"}}]
        await asyncio.sleep(0.2)
    return 1.0
"""


@pytest.fixture
def network() -> Iterator[Network]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with Network() as made:
        yield made


class Hosts:
    """A store, a gateway over it and two workers on four hosts; trainer and model are on this one."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.store, self.gateway = network.host("store", folder), network.host("gateway", folder)
        self.workers = network.host("one", folder), network.host("two", folder)
        self.file = f"sqlite:///{folder}/agl.db"
        self.store_url, self.gateway_url = (f"http://{host.address}:{PORT}" for host in (self.store, self.gateway))
        self.run_id = ""
        (folder / "agent.py").write_text(AGENT)

    async def serve(self) -> None:
        """Start store and gateway."""
        for host, store, url in (
            (self.store, self.file, self.store_url),
            (self.gateway, self.store_url, self.gateway_url),
        ):
            arguments = ["--store", store, "--host", host.address, "--port", str(PORT)]
            server = host.start("agentlightning.gateway", *arguments, AGL_SERVER_KEY=KEY)
            await until(lambda url=url: _answers(url), f"{host.name} answers", host, server)  # type: ignore[misc]

    def work(self) -> None:
        """Start the workers."""
        for host in self.workers:
            arguments = ["--server", self.gateway_url, "--run", self.run_id, "--agent", "agent.py:solve"]
            arguments += ["--worker-id", host.name, "--concurrency", "4"]
            arguments += ["--lease-s", str(LEASE_S), "--heartbeat-s", str(HEARTBEAT_INTERVAL_S)]
            host.start("agentlightning.runner", *arguments, AGL_SERVER_KEY=KEY)


@asynccontextmanager
async def house(
    network: Network, folder: Path, wrong: str = "", ahead_s: float = 0.0
) -> AsyncIterator[tuple[Hosts, LightningStore]]:
    """Hosts at work on `ROLLOUTS` rollouts, and the trainer's store, over the network; the clock of one may be wrong."""
    hosts = Hosts(network, folder)
    for host in (hosts.store, hosts.gateway, *hosts.workers):
        host.clock_s = ahead_s if host.name == wrong else 0.0
    tokenizer = await asyncio.to_thread(write_tokenizer, folder / "tokenizer")
    engine = ScriptedEngine(lambda _: [*Renderer(tokenizer).encode("It is sunny."), END])
    await engine.start(network.address)
    value = {"model": "policy", "endpoints": [engine.url], "tokenizer": str(tokenizer), "seed": 7}
    try:
        await hosts.serve()
        async with LightningStoreClient(hosts.store_url, KEY) as store:
            hosts.run_id = (await store.create_run("network", {})).id
            await store.put_resources([Resource(run_id=hosts.run_id, name="default", kind="policy", value=value)])
            await enqueue(store, hosts.run_id, "first")
            hosts.work()
            yield hosts, store
    finally:
        await engine.close()


@pytest.mark.long
async def test_a_worker_that_the_network_leaves_loses_its_rollouts_and_works_again_when_it_is_back(
    network: Network, tmp_path: Path
) -> None:
    async with house(network, tmp_path) as (hosts, store):
        one = hosts.workers[0]
        await until(lambda: held(store, hosts.run_id, one), "a worker holds rollouts", one)
        one.down()
        await until(lambda: ended_as_lost(store, hosts.run_id, one), "its leases run out", one)
        await store.wait(hosts.run_id, at_least=ROLLOUTS, timeout_s=DEADLINE_S)  # the other one takes over
        away = await seen_ns(store, hosts.run_id, one)
        one.up()
        await until(lambda: seen_since(store, hosts.run_id, one, away), "it is seen again", one)
        await enqueue(store, hosts.run_id, "second")
        await until(lambda: held(store, hosts.run_id, one, "second", ended=True), "it works again", one)
        await check(store, hosts.run_id, 2 * ROLLOUTS)


async def test_while_the_store_is_away_everybody_waits_and_nothing_is_done_twice(
    network: Network, tmp_path: Path
) -> None:
    async with house(network, tmp_path) as (hosts, store), open_store(hosts.file) as file:
        trainer = asyncio.create_task(store.wait(hosts.run_id, at_least=ROLLOUTS, timeout_s=DEADLINE_S))
        await until(lambda: finished(file, hosts.run_id), "some have finished", hosts.store)
        hosts.store.down()
        await until(lambda: nobody_holds(file, hosts.run_id), "every lease runs out", hosts.store)
        hosts.store.up()
        assert len(await trainer) == ROLLOUTS
        await check(file, hosts.run_id, ROLLOUTS)


@pytest.mark.long
async def test_a_gateway_that_the_network_leaves_comes_back_with_every_rollout(
    network: Network, tmp_path: Path
) -> None:
    async with house(network, tmp_path) as (hosts, store):
        await until(lambda: finished(store, hosts.run_id), "some have finished", hosts.gateway)
        hosts.gateway.down()
        await until(lambda: nobody_holds(store, hosts.run_id), "every lease runs out", hosts.gateway)
        hosts.gateway.up()
        await check(store, hosts.run_id, ROLLOUTS)


@pytest.mark.long
@pytest.mark.parametrize(("wrong", "ahead_s"), [("store", -3600), ("gateway", 3600), ("one", -3600), ("one", 3600)])
async def test_leases_hold_and_run_out_whatever_the_clocks_say(
    network: Network, tmp_path: Path, wrong: str, ahead_s: float
) -> None:
    async with house(network, tmp_path, wrong, ahead_s) as (hosts, store):
        attempts = await check(store, hosts.run_id, ROLLOUTS)
        assert {attempt.state for attempt in attempts} == {"succeeded"}, "no lease ran out"
        await enqueue(store, hosts.run_id, "second")
        one = hosts.workers[0]
        await until(lambda: held(store, hosts.run_id, one, "second"), "a worker holds rollouts", one)
        one.down()
        await check(store, hosts.run_id, 2 * ROLLOUTS)
        assert await ended_as_lost(store, hosts.run_id, one), "its leases ran out"


# --- what is seen -------------------------------------------------------------------------------------------------------


async def check(store: LightningStore, run_id: str, count: int) -> list[Attempt]:
    """Every rollout finishes, once, with the calls of the attempt that finished it; returns the attempts."""
    await until(lambda: all_done(store, run_id, count), f"{count} rollouts have finished")
    rollouts = await store.rollouts(RolloutQuery(run_id=run_id))
    ids = [rollout.id for rollout in rollouts]
    attempts = await store.attempts(ids)
    assert [rollout.error for rollout in rollouts if rollout.state != "succeeded"] == []
    assert sorted(rollout.finished_seq or 0 for rollout in rollouts) == list(range(1, count + 1))
    assert Counter(attempt.rollout_id for attempt in attempts if attempt.state == "succeeded") == Counter(ids)
    assert {attempt.state for attempt in attempts} <= {"succeeded", "lost"}, "the network is not the agent's failure"
    assert Counter(call.rollout_id for call in await store.calls(ids)) == dict.fromkeys(ids, CALLS)
    return attempts


async def enqueue(store: LightningStore, run_id: str, group: str) -> None:
    retry = RetryPolicy(max_lost=50)
    new = [NewRollout(run_id=run_id, task={}, group_id=group, replica=n, retry=retry) for n in range(ROLLOUTS)]
    await store.enqueue(new)


async def of(store: LightningStore, run_id: str, group: str = "first") -> list[Rollout]:
    return await store.rollouts(RolloutQuery(run_id=run_id, group_ids=[group]))


async def held(store: LightningStore, run_id: str, host: Host, group: str = "first", ended: bool = False) -> bool:
    """True once it holds an attempt; with `ended`, also where that is over."""
    attempts = await store.attempts([rollout.id for rollout in await of(store, run_id, group)])
    return any(attempt.worker_id == host.name and (ended or attempt.state == "running") for attempt in attempts)


async def seen_ns(store: LightningStore, run_id: str, host: Host) -> int:
    return max(worker.seen_ns for worker in await store.workers(run_id) if worker.id == host.name)


async def seen_since(store: LightningStore, run_id: str, host: Host, then_ns: int) -> bool:
    return await seen_ns(store, run_id, host) > then_ns


async def ended_as_lost(store: LightningStore, run_id: str, host: Host) -> bool:
    attempts = await store.attempts([rollout.id for rollout in await store.rollouts(RolloutQuery(run_id=run_id))])
    return any(attempt.worker_id == host.name and attempt.state == "lost" for attempt in attempts)


async def finished(store: LightningStore, run_id: str) -> bool:
    counts = await store.count(run_id)
    return counts.get(("train", "succeeded"), 0) > 0 and counts.get(("train", "running"), 0) > 0


async def nobody_holds(store: LightningStore, run_id: str) -> bool:
    return ("train", "running") not in await store.count(run_id)


async def all_done(store: LightningStore, run_id: str, count: int) -> bool:
    counts = await store.count(run_id)
    return sum(number for (_, state), number in counts.items() if state not in ("queued", "running")) == count


async def _answers(url: str) -> bool:
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=2) as client:
            return (await client.get(f"{url}/healthz")).status_code == 200
    except httpx.TransportError:
        return False


async def until(
    condition: Callable[[], Awaitable[object]],
    what: str,
    host: Host | None = None,
    process: subprocess.Popen[bytes] | None = None,
) -> None:
    """Poll until the condition holds; fails with what the host's processes said."""
    end = time.monotonic() + DEADLINE_S
    while not await condition():
        said = host.log.read_text()[-3000:] if host is not None and host.log.exists() else ""
        assert process is None or process.poll() is None, f"{what}: its process ended\n{said}"
        assert time.monotonic() < end, f"{what}: not within {DEADLINE_S:.0f} s\n{said}"
        await asyncio.sleep(0.02)
