"""Engines that accept requests and never answer: calls leave them, busy ones are waited for."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any, cast

import httpx
import orjson
from gateway_house import House, path
from scripted_engine import ScriptedEngine

from agentlightning.gateway.app import App
from agentlightning.gateway.policy.engine_router import (
    Balancer,
    EngineCall,
    EngineHealth,
    EngineLoad,
    ProbeSettings,
)
from agentlightning.records import Claim
from agentlightning.runtime.background import BackgroundTasks

HI: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
DEADLINE_S = 90.0
"""Matters only where a test fails: the slowest machine has its time."""
SOON = ProbeSettings(after_s=0.2, timeout_s=0.5)


class StoppedEngine:
    """An engine in front of which requests wait, probes too, until it goes on: as one that was sent SIGSTOP."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.goes_on = asyncio.Event()
        self._engine = engine
        self.url = ""
        self.waiting = 0

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.waiting += 1
        await self.goes_on.wait()
        host, port = self._engine.url.removeprefix("http://").split(":")
        theirs, to_them = await asyncio.open_connection(host, int(port))
        await asyncio.gather(_copy(reader, to_them), _copy(theirs, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()


@asynccontextmanager
async def stopped(engine: ScriptedEngine) -> AsyncIterator[StoppedEngine]:
    hung = StoppedEngine(engine)
    server = await asyncio.start_server(hung._pass_on, "127.0.0.1", 0)
    hung.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield hung
    finally:
        server.close()


async def call(house: House, app: App, claim: Claim, **more: Any) -> httpx.Response:
    return await house.http(app).post(f"{path(claim)}/v1/chat/completions", json={**HI, **more})


async def metric(house: House, app: App, name: str) -> str:
    lines = (await house.metrics(app)).splitlines()
    return next(line.rpartition(" ")[2] for line in lines if line.startswith(name))


async def until_state(house: House, app: App, url: str, state: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while f'agl_engine_state{{state="{state}",url="{url}"}} 1.0' not in await house.metrics(app):
        assert time.monotonic() < deadline, f"{url} is not {state}"
        await asyncio.sleep(0.02)  # metrics that are cached let nothing else run: probes would be late for seconds


async def test_calls_leave_an_engine_that_hangs_and_it_takes_none_until_it_answers_a_probe(house: House) -> None:
    app = house.gateway(probe=SOON)
    async with stopped(house.engine) as hung:
        await house.serve_policy(endpoints=[hung.url, house.engine.url])
        claims = [await house.claim(replica=replica) for replica in range(4)]
        replies = await asyncio.gather(*(call(house, app, claim) for claim in claims))
        assert [reply.status_code for reply in replies] == [200] * 4
        assert hung.waiting > 0
        assert (await house.http(app).get("/readyz")).json() == {"status": "ready", "hung_engines": 1}
        assert await metric(house, app, "agl_engine_hangs_total") == "1.0"
        await until_state(house, app, hung.url, "hung")
        # Nobody is sent there any more, not even an attempt that began there.
        again = await asyncio.wait_for(asyncio.gather(*(call(house, app, claim) for claim in claims)), 30)
        assert [reply.status_code for reply in again] == [200] * 4
        hung.goes_on.set()
        await until_state(house, app, hung.url, "up")
        assert (await house.http(app).get("/readyz")).json() == {"status": "ready", "hung_engines": 0}


async def test_probes_of_an_engine_that_hangs_go_on_after_one_that_failed() -> None:
    class Client:
        """Gives no answer twice, then one that nobody expected, then the right one."""

        def __init__(self) -> None:
            self.asked = 0

        async def get(self, url: str, headers: Mapping[str, str]) -> Any:
            self.asked += 1
            if self.asked <= 2:
                raise TimeoutError
            if self.asked == 3:
                raise ValueError("no HTTP")
            return nullcontext(SimpleNamespace(status=200))

    background, balancer = BackgroundTasks(first_pause_s=0.01), Balancer()
    health = EngineHealth(cast(Any, Client()), balancer, SOON, lambda: None, background)
    engine = balancer.choose(["http://a", "http://b"], "one")
    probing = health.start_probes(engine, {})
    async with asyncio.timeout(DEADLINE_S):
        await probing
    assert (engine.hung, background.failures.total()) == (False, 1)
    await health.close()
    await background.stop()


async def test_a_call_with_little_patience_is_looked_after_while_one_with_more_is_under_way() -> None:
    background, balancer = BackgroundTasks(), Balancer()
    health = EngineHealth(cast(Any, None), balancer, ProbeSettings(), lambda: None, background)
    engine = balancer.choose(["http://a"], "one")
    async with asyncio.timeout(DEADLINE_S) as deadline:
        health.watch(_under_way(engine, deadline, stall_s=math.inf))
        await asyncio.sleep(0)  # the loop waits for the end of that one's patience
        hanging = _under_way(engine, asyncio.timeout(None), stall_s=0.001)
        with suppress(TimeoutError):
            async with hanging.timeout:
                health.watch(hanging)
                await asyncio.Event().wait()
    assert hanging.reason == "gave nothing for 0.001 s"
    await background.stop()


def _under_way(engine: EngineLoad, timeout: asyncio.Timeout, stall_s: float) -> EngineCall:
    now = asyncio.get_running_loop().time()
    return EngineCall(engine, {}, stall_s, may_leave=lambda: False, timeout=timeout, heard_s=now)


async def test_an_engine_that_is_late_and_answers_probes_is_waited_for(house: House) -> None:
    app = house.gateway(probe=SOON)
    other = await ScriptedEngine(house.engine.answers).start()
    house.engine.gate, house.engine.hold_whole = asyncio.Event(), True
    await house.serve_policy(endpoints=[house.engine.url, other.url])
    claim = await house.claim()
    waiting = asyncio.create_task(call(house, app, claim))
    async with asyncio.timeout(30):
        for _ in range(3):
            await house.engine.probes.get()
    assert not waiting.done()
    house.engine.gate.set()
    assert (await waiting).status_code == 200
    assert other.requests == []
    await other.close()


async def test_the_only_engine_is_waited_for_even_where_it_hangs(house: House) -> None:
    app = house.gateway(probe=SOON)
    async with stopped(house.engine) as hung:
        await house.serve_policy(endpoints=[hung.url])
        waiting = asyncio.create_task(call(house, app, await house.claim()))
        await until_state(house, app, hung.url, "hung")
        hung.goes_on.set()
        assert (await waiting).status_code == 200
        await until_state(house, app, hung.url, "up")


async def test_a_stream_that_stops_in_an_engine_that_hangs_ends_as_one_whose_engine_died(house: House) -> None:
    app = house.gateway(probe=SOON)
    house.say("It is sunny today.")
    house.engine.gate = asyncio.Event()
    house.engine.hangs = True
    claim = await house.claim()
    reply = await call(house, app, claim, stream=True)
    assert "was lost in the middle of a completion" in reply.text
    house.engine.hangs = False
    house.engine.gate.set()
    assert (await call(house, app, claim, stream=True)).text.endswith("data: [DONE]\n\n")


async def test_a_policy_may_say_how_long_an_engine_may_be_silent_although_it_answers_probes(house: House) -> None:
    app = house.gateway()
    other = await ScriptedEngine(house.engine.answers).start()
    house.engine.gate, house.engine.hold_whole = asyncio.Event(), True
    await house.serve_policy(endpoints=[house.engine.url, other.url], stall_timeout_s=0.2)
    replies = await asyncio.gather(*[call(house, app, await house.claim(replica=replica)) for replica in range(4)])
    assert [reply.status_code for reply in replies] == [200] * 4
    assert len(other.requests) == 4
    house.engine.gate.set()
    await other.close()


async def test_a_slow_reader_is_no_silent_engine(house: House) -> None:
    """The agent takes the first token late: meanwhile nothing is asked of the engine."""
    app = house.gateway(probe=ProbeSettings(after_s=0.05, timeout_s=0.05))
    house.say("It is sunny today.")
    house.engine.hangs = True
    claim = await house.claim()
    taken = asyncio.Event()
    sent: list[Any] = []

    async def send(event: Any) -> None:
        sent.append(event)
        if event["type"] == "http.response.body" and not taken.is_set():
            await asyncio.wait([asyncio.create_task(taken.wait())], timeout=0.5)
            taken.set()

    body = orjson.dumps({**HI, "stream": True})
    scope = {
        "type": "http", "method": "POST", "path": f"{path(claim)}/v1/chat/completions", "scheme": "http",
        "headers": [(b"content-length", str(len(body)).encode()), (b"authorization", f"Bearer {claim.key}".encode())],
        "client": ("127.0.0.1", 1),
    }  # fmt: skip
    received = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return received.pop() if received else await asyncio.Event().wait()

    await app(scope, receive, send)
    assert b"[DONE]" in b"".join(event.get("body", b"") for event in sent)
