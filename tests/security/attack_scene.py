"""The scene of an attack: the server, what its owner knows, and the keys of two agents."""

from __future__ import annotations

from dataclasses import dataclass

import httpx
import psutil
from server_process import ServerProcess

from agentlightning.records import Claim, NewRollout, WorkerStatus
from agentlightning.store.client import LightningStoreClient

SERVER_KEY = "sk-agl-server-of-the-tests"
END = 2
DEADLINE_S = 600.0
"""Matters only where a test fails: the slowest machine has its time."""
HI = {"messages": [{"role": "user", "content": "hi"}]}


@dataclass
class Scene:
    """The server, what its owner knows, and the keys of two agents."""

    server: ServerProcess
    store: LightningStoreClient
    run_id: str
    mine: Claim
    other: Claim

    async def other_is_answered(self) -> None:
        """Whatever the attacker does, a call of the other agent is answered as ever."""
        async with httpx.AsyncClient(base_url=self.server.url, timeout=DEADLINE_S) as http:
            reply = await http.post(f"{path(self.other)}/v1/chat/completions", json=HI, headers=bearer(self.other.key))
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["content"] == "It is sunny."

    def memory(self) -> int:
        """Bytes that the server holds."""
        assert self.server.process is not None
        return psutil.Process(self.server.process.pid).memory_info().rss


def path(claim: Claim) -> str:
    return f"/r/{claim.rollout.id}/{claim.lease.attempt}"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def a_claim(store: LightningStoreClient, run_id: str, group: str) -> Claim:
    await store.enqueue([NewRollout(run_id=run_id, task={"secret": "of-the-task"}, group_id=group)])
    worker = WorkerStatus(id="w", run_id=run_id, host="h", pid=1, running=0, seen_ns=0)
    return (await store.claim(worker))[0]
