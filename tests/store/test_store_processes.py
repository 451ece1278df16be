"""Real processes: what was acknowledged survives SIGKILL, and processes that share a file never claim a rollout twice."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

from store_samples import Clock, claimed, some, sql_store

APPENDER = """
import asyncio, sys
from store_samples import Clock, a_call, sql_store
from agentlightning.types import Claim, Lease

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
from store_samples import Clock, a_worker, sql_store

async def main(url, run_id, worker_id):
    async with sql_store(url, Clock()) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        while claims := await store.claim(a_worker(run_id, worker_id), limit=3):
            for claim in claims:
                print(claim.rollout.id)

asyncio.run(main(*sys.argv[1:]))
"""


def python(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


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


async def test_processes_that_share_a_file_never_claim_a_rollout_twice(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/agl.db"
    async with sql_store(url, Clock()) as store:
        run_id = (await store.create_run("shared", {})).id
        await store.enqueue(some(run_id, 120))
    claimers = [python(CLAIMER, url, run_id, f"w{number}") for number in range(3)]
    for claimer in claimers:
        assert claimer.stdout is not None
        assert await asyncio.to_thread(claimer.stdout.readline) == "ready\n"
    outputs = await asyncio.gather(*[asyncio.to_thread(claimer.communicate, "go\n") for claimer in claimers])
    taken = [rollout_id for output, _ in outputs for rollout_id in output.split()]
    assert len(taken) == len(set(taken)) == 120
