"""Real processes: what was acknowledged survives SIGKILL, and processes that share a store never claim a rollout twice."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import pytest
from store_samples import Clock, Server, a_call, a_worker, claimed, some, sql_store

from agentlightning.errors import StoreError
from agentlightning.records import Metric, NewRollout, Resource
from agentlightning.store.base import LightningStore
from agentlightning.store.open import open_store

KEY = "key-of-the-tests"
PROCESSES = 8
AT_ONCE = 2048
DEADLINE_S = 300.0
"""Matters only where a test fails."""

APPENDER = """
import asyncio, sys
from store_samples import Clock, a_call, sql_store
from agentlightning.records import Claim, Lease

async def append_for_ever(store, rollout, number):
    lease = Lease(rollout_id=rollout.id, attempt=1, token="")
    while True:
        call = a_call(Claim(rollout=rollout, lease=lease, key=""))
        await store.append_calls([call])
        sys.stdout.write(call.id + "\\n")
        sys.stdout.flush()

async def main(url, rollout_id):
    from agentlightning.store.base import RolloutQuery
    async with sql_store(url, Clock()) as store:
        [rollout] = await store.rollouts(RolloutQuery(ids=[rollout_id]))
        await asyncio.gather(*[append_for_ever(store, rollout, number) for number in range(8)])

asyncio.run(main(*sys.argv[1:]))
"""

CLAIMER = """
import asyncio, sys
from agentlightning.store.open import open_store
from agentlightning.records import Finish, WorkerStatus

async def main(url, key, run_id, worker_id):
    worker = WorkerStatus(id=worker_id, run_id=run_id, host=worker_id, pid=1, running=0, seen_ns=0)
    async with open_store(url, key) as store:
        await store.count(run_id)
        print("ready", flush=True)
        sys.stdin.readline()
        while claims := await store.claim(worker, limit=16, lease_s=600):
            print(*[claim.rollout.id for claim in claims], sep="\\n", flush=True)
            assert all(await store.finish([Finish(lease=claim.lease, state="failed") for claim in claims]))

asyncio.run(main(*sys.argv[1:]))
"""


@contextmanager
def python(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs the program; it is gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


PUSHING = ["postgres", "redis", "http", "gateways of postgres", "gateways of redis"]
"""Kinds of store in which one process hears of another's changes; an SQLite file has one owner, which serves the others."""


KINDS = ["sqlite", *PUSHING]


@pytest.fixture(params=KINDS)
async def urls(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[list[str]]:
    """URLs under which one store is reached: by itself, by a server, by several servers."""
    owner, _, kind = request.param.rpartition(" of ")
    file = f"sqlite:///{tmp_path}/agl.db?timeout=100"  # its lock is not given in turn
    url = file if kind in ("sqlite", "http") else request.getfixturevalue(f"{kind}_url")
    async with AsyncExitStack() as stack:
        count = 3 if owner else int(kind == "http")
        servers = [await stack.enter_async_context(Server(open_store(url), server_key=KEY)) for _ in range(count)]
        yield [server.url for server in servers] or [url]


@pytest.mark.slow
async def test_every_call_that_was_acknowledged_survives_a_sigkill(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/agl.db"
    async with sql_store(url, Clock()) as store:
        [claim] = await claimed(store)
    with python(APPENDER, url, claim.rollout.id) as appender:
        assert appender.stdout is not None
        acknowledged = [await asyncio.to_thread(appender.stdout.readline) for _ in range(200)]
        appender.send_signal(signal.SIGKILL)
        acknowledged += [line for line in appender.stdout.readlines() if line.endswith("\n")]
    async with sql_store(url, Clock()) as store:
        recorded = {call.id for call in await store.calls([claim.rollout.id])}
    assert {line.strip() for line in acknowledged} <= recorded


@pytest.mark.slow
async def test_processes_that_share_a_store_never_claim_a_rollout_twice(urls: list[str]) -> None:
    await never_twice(urls, rollouts=400, processes=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "urls",
    ["postgres", *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind != "postgres")],
    indirect=True,
)
async def test_eight_processes_claim_ten_thousand_rollouts_none_twice(urls: list[str]) -> None:
    await never_twice(urls, rollouts=10_000, processes=PROCESSES)


async def never_twice(urls: list[str], rollouts: int, processes: int) -> None:
    """Processes claim all rollouts of a run; each is claimed by one of them."""
    async with open_store(urls[0], KEY) as store, AsyncExitStack() as stack:
        run_id = (await store.create_run("shared", {})).id
        await enqueue(store, run_id, rollouts)
        claimers = [
            stack.enter_context(python(CLAIMER, urls[number % len(urls)], KEY, run_id, f"w{number}"))
            for number in range(processes)
        ]
        for claimer in claimers:
            assert claimer.stdout is not None
            assert await asyncio.to_thread(claimer.stdout.readline) == "ready\n"
        outputs = await asyncio.gather(*[asyncio.to_thread(claimer.communicate, "go\n") for claimer in claimers])
        assert [claimer.returncode for claimer in claimers] == [0] * processes
        taken = [rollout_id for output, _ in outputs for rollout_id in output.split()]
        assert len(taken) == len(set(taken)) == rollouts
        assert await store.count(run_id) == {("train", "failed"): rollouts}
        assert await order(store, run_id) == list(range(1, rollouts + 1))


async def order(store: LightningStore, run_id: str) -> list[int]:
    """The positions at which the rollouts of a run finished."""
    found: list[int] = []
    while news := await store.wait(run_id, after=len(found), timeout_s=0):
        found += [rollout.finished_seq or 0 for rollout in news]
    return found


async def enqueue(store: LightningStore, run_id: str, count: int) -> None:
    new = [NewRollout(run_id=run_id, task={"n": n}, group_id=str(n // 8), replica=n % 8) for n in range(count)]
    for start in range(0, count, AT_ONCE):
        await store.enqueue(new[start : start + AT_ONCE])


@pytest.mark.parametrize("urls", PUSHING, indirect=True)
async def test_what_one_gateway_of_a_store_does_wakes_and_fences_at_the_others(urls: list[str]) -> None:
    async with open_store(urls[0], KEY) as one, open_store(urls[-1], KEY) as other, asyncio.timeout(DEADLINE_S):
        run_id = (await one.create_run("shared", {})).id
        waiting = asyncio.create_task(other.claim(a_worker(run_id), wait_s=DEADLINE_S))
        resources = asyncio.create_task(other.wait_resources(run_id, {}, timeout_s=DEADLINE_S))
        metrics = asyncio.create_task(other.follow_metrics(run_id, timeout_s=DEADLINE_S))
        [rollout] = await one.enqueue([NewRollout(run_id=run_id, task={}, group_id="g")])
        [claim] = await waiting
        assert claim.rollout.id == rollout.id
        await one.append_calls([a_call(claim)])
        assert [call.rollout_id for call in await other.calls([rollout.id])] == [rollout.id]
        finishing = asyncio.create_task(one.wait(run_id, timeout_s=DEADLINE_S))
        assert await other.cancel([rollout.id]) == 1
        assert [each.state for each in await finishing] == ["cancelled"]
        assert await one.heartbeat(a_worker(run_id), [claim.lease]) == [False]
        await one.put_resources([Resource(run_id=run_id, name="policy", kind="policy", value={"n": 1})])
        await one.log_metrics([Metric(run_id=run_id, step=1, name="loss", value=1.0)])
        assert [resource.version for resource in await resources] == [1]
        assert [metric.value for metric in await metrics] == [1.0]
        assert await one.signing_secret() == await other.signing_secret()


@pytest.mark.parametrize("urls", ["sqlite", "postgres", "redis"], indirect=True)
async def test_a_store_that_is_not_open_says_so_and_closing_finishes_what_was_accepted(urls: list[str]) -> None:
    store = open_store(urls[0])
    with pytest.raises(StoreError, match="not open"):
        await store.runs()
    await store.open()
    await store.open()
    run_id = (await store.create_run("closed", {})).id
    accepted = [asyncio.create_task(store.enqueue(some(run_id, 5, group_id=str(n)))) for n in range(10)]
    await asyncio.sleep(0)
    await store.close()
    await store.close()
    assert [len(rollouts) for rollouts in await asyncio.gather(*accepted)] == [5] * 10
    with pytest.raises(StoreError, match="not open"):
        await store.create_run("late", {})
    async with open_store(urls[0]) as again:
        assert await again.count(run_id) == {("train", "queued"): 50}
