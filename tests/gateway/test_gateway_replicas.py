"""Several gateways over one store: what one recorded, another continues; and a cache of conversations that is bounded."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_house import SERVER_KEY, House
from server_process import ServerProcess

from agentlightning.gateway.attempts import AttemptCache, TrackedAttempt
from agentlightning.protocols.base import ApiError
from agentlightning.records import Call, Claim, Finish, NewRollout, WorkerStatus
from agentlightning.store.client import LightningStoreClient

SYSTEM = {"role": "system", "content": "You know the weather."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def turn(http: httpx.AsyncClient, server: str, claim: Claim, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """One call of an agent; its answer as a message."""
    url, headers = f"{server}/v1/chat/completions", {"authorization": f"Bearer {claim.key}"}
    reply = await http.post(url, json={"messages": messages}, headers=headers)
    assert reply.status_code == 200, reply.text
    message: dict[str, Any] = reply.json()["choices"][0]["message"]
    return {"role": "assistant", "content": message["content"]}


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    """The server that owns the store, and two gateways over it."""
    started = [ServerProcess(f"sqlite:///{tmp_path}/agl.db", tmp_path / "store.log", key=SERVER_KEY).start()]
    try:
        for name in ("a", "b"):
            started.append(ServerProcess(started[0].url, tmp_path / f"{name}.log", key=SERVER_KEY).start())
        yield started
    finally:
        for server in reversed(started):
            server.close()


@pytest.mark.slow
async def test_turns_that_alternate_between_gateways_never_fork_and_a_stopped_agent_is_refused_by_each(
    servers: list[ServerProcess], house: House, tmp_path: Path
) -> None:
    owner, first, second = servers
    async with LightningStoreClient(owner.url, SERVER_KEY) as store, httpx.AsyncClient(timeout=60) as http:
        remote = House(store, house.engine, house.renderer, house.folder)
        remote.run_id = (await store.create_run("replicas", {})).id
        await remote.serve_policy()
        claims = [await remote.claim(group) for group in ("x", "y")]
        messages = {claim.key: [SYSTEM] for claim in claims}
        turns = [first, second, owner, second, first, owner, first, second]
        for number, server in enumerate(turns):
            for claim in claims:
                history = messages[claim.key]
                history.append(user(f"question {number}"))
                history.append(await turn(http, server.url, claim, history))
        first.signal(signal.SIGKILL)
        first.end()
        for number in range(4):
            for claim in claims:
                history = messages[claim.key]
                history.append(user(f"another {number}"))
                history.append(await turn(http, (second, owner)[number % 2].url, claim, history))
        for claim in claims:
            calls = await store.calls([claim.rollout.id])
            assert len(calls) == len(turns) + 4
            assert [call.fork_cause for call in calls] == [None] * len(calls)
            assert [call.parent_id for call in calls] == [None, *(call.id for call in calls[:-1])]
        claim = await remote.claim("stopped")  # not seen before: what ran is believed for seconds
        await store.cancel([claim.rollout.id])
        headers = {"authorization": f"Bearer {claim.key}"}
        reply = await http.post(f"{second.url}/v1/chat/completions", json={"messages": [user("hi")]}, headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (410, "attempt_over")
        changed = "A" if claim.key[-8] != "A" else "B"
        wrong = {"authorization": f"Bearer {claim.key[:-8]}{changed}{claim.key[-7:]}"}
        reply = await http.post(f"{second.url}/v1/chat/completions", json={"messages": [user("hi")]}, headers=wrong)
        assert reply.status_code == 401
    stranger = ServerProcess(owner.url, tmp_path / "stranger.log", key="not the key")
    with pytest.raises(AssertionError, match="server key: missing or wrong"):
        await asyncio.to_thread(stranger.start)
    assert "not the key" not in stranger.said()
    stranger.close()


# --- what a gateway knows ---------------------------------------------------------------------------------------------


async def claimed(house: House, groups: int) -> list[Claim]:
    worker = WorkerStatus(id="w", run_id=house.run_id, host="h", pid=1, running=0, seen_ns=0)
    await house.store.enqueue([NewRollout(run_id=house.run_id, task={}, group_id=str(n)) for n in range(groups)])
    return await house.store.claim(worker, limit=groups)


async def known(attempts: AttemptCache, claim: Claim) -> TrackedAttempt:
    return await attempts.running((claim.rollout.id, claim.lease.attempt))


async def recorded(house: House, claim: Claim, text: str = "hi") -> Call:
    """A call of the attempt that some gateway answered."""
    http = house.http(house.gateway())
    await turn(http, "http://gateway", claim, [user(text)])
    return (await house.store.calls([claim.rollout.id]))[-1]


async def test_what_another_gateway_recorded_is_read_when_it_is_missed(house: House) -> None:
    (claim,) = await claimed(house, 1)
    attempts = AttemptCache(house.store, shared=True)
    attempt = await known(attempts, claim)
    conversation = await attempts.conversation(attempt, house.renderer)
    call = await recorded(house, claim)
    assert call.id not in conversation
    await attempts.refresh(attempt)
    assert call.id in conversation


async def test_a_crowd_that_misses_the_same_call_reads_once(house: House) -> None:
    (claim,) = await claimed(house, 1)

    class Counting(LightningStoreClient):
        """Counts the readings of a real store."""

        reads = 0

        async def calls(self, rollout_ids: Any, attempt: int | None = None) -> list[Call]:
            self.reads += 1
            await asyncio.sleep(0)
            return await house.store.calls(rollout_ids, attempt)

        async def rollouts(self, query: Any) -> Any:
            return await house.store.rollouts(query)

    store = Counting("http://nowhere")
    attempts = AttemptCache(store, shared=True)
    attempt = await known(attempts, claim)
    await attempts.conversation(attempt, house.renderer)
    await asyncio.gather(*(attempts.refresh(attempt) for _ in range(50)))
    assert store.reads <= 3  # the building, the reading under way, and one for those who came during it


async def test_states_of_many_attempts_are_read_together(house: House) -> None:
    claims = await claimed(house, 30)
    sizes = []

    class Counting(LightningStoreClient):
        """Counts the readings of a real store."""

        async def rollouts(self, query: Any) -> Any:
            sizes.append(len(query.ids))
            return await house.store.rollouts(query)

    attempts = AttemptCache(Counting("http://nowhere"), shared=True)
    found = await asyncio.gather(*(known(attempts, claim) for claim in claims))
    assert [attempt.rollout.id for attempt in found] == [claim.rollout.id for claim in claims]
    assert sizes == [30]


async def test_conversations_are_bounded_by_what_they_keep(house: House) -> None:
    claims = await claimed(house, 5)
    for claim in claims:
        await recorded(house, claim, "a long question " * 100)
    attempts = AttemptCache(house.store, max_bytes=10_000)
    for claim in claims:
        await attempts.conversation(await known(attempts, claim), house.renderer)
    kept = [attempt.conversations.get("default") for attempt in [await known(attempts, claim) for claim in claims]]
    assert kept[0] is None
    assert kept[-1] is not None
    assert sum(one.size for one in kept if one is not None) <= 10_000 + kept[-1].size
    again = await attempts.conversation(await known(attempts, claims[0]), house.renderer)
    assert again.size == kept[-1].size


async def test_an_attempt_that_ends_while_its_state_is_read_is_not_taken_to_run_on(house: House) -> None:
    (claim,) = await claimed(house, 1)

    class Slow(LightningStoreClient):
        """Hands on what it read only when it is told to."""

        async def rollouts(self, query: Any) -> Any:
            found = await house.store.rollouts(query)
            has_read.set()
            await hand_on.wait()
            return found

    has_read, hand_on = asyncio.Event(), asyncio.Event()
    attempts = AttemptCache(Slow("http://nowhere"))
    reading = asyncio.create_task(known(attempts, claim))
    await has_read.wait()
    await house.store.finish([Finish(lease=claim.lease, state="succeeded")])
    attempts.forget({claim.rollout.id})
    hand_on.set()
    await reading  # came before the end
    with pytest.raises(ApiError, match="is over"):
        await known(attempts, claim)


async def test_the_next_attempt_of_a_rollout_ends_the_one_before(house: House) -> None:
    (first,) = await claimed(house, 1)
    attempts = AttemptCache(house.store)
    attempts.expect([first])
    restarted = WorkerStatus(id="w", run_id=house.run_id, host="h", pid=2, running=0, seen_ns=0)
    (second,) = await house.store.claim(restarted)
    attempts.expect([second])
    assert await known(attempts, second)
    with pytest.raises(ApiError, match="is over"):
        await known(attempts, first)
