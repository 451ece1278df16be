"""An agent that turns against the server over HTTP: it gets nothing of others, and their calls are answered meanwhile.

What one part alone refuses is tested with it: idle connections and slow heads in test_gateway_connections.py, memory of an
agent in test_gateway_memory.py, nesting and sizes in test_gateway_security.py, spans of others in test_gateway_traces.py.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import itertools
import re
from urllib.parse import urlsplit

import httpx
from attack_scene import DEADLINE_S, HI, SERVER_KEY, Scene, bearer, path

from agentlightning.records import Finish
from agentlightning.store.base import RolloutQuery

GIGABYTE = 1 << 30
MEGABYTE = 1 << 20


async def raw(scene: Scene, request: bytes) -> bytes:
    """What the server answers to these very bytes until it closes the connection, or says nothing for a while."""
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(scene.server.url).port)
    answer = b""
    try:
        writer.write(request)
        async with asyncio.timeout(DEADLINE_S):
            answer = await reader.read(65536)
        async with asyncio.timeout(3):  # another answer would come at once
            while more := await reader.read(65536):
                answer += more
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
    return answer


async def nothing_of_the_other(scene: Scene) -> None:
    """Nothing was recorded for the other agent, and it goes on."""
    ids = [scene.other.rollout.id]
    assert await scene.store.calls(ids) == []
    assert await scene.store.rewards(ids) == []
    assert await scene.store.spans(ids) == []
    await scene.other_is_answered()


def changed(key: str) -> list[str]:
    """Keys near a real one: each part of it changed, cut, doubled, re-encoded."""
    head, tail = key[: len(key) // 2], key[len(key) // 2 :]
    return [
        key[:-1] + ("A" if key[-1] != "A" else "B"),
        key[:-1],
        key + "A",
        head + ("A" if tail[0] != "A" else "B") + tail[1:],
        head,
        key[:7] + key[7:].swapcase(),
        f"{key}\u00a0",
        key[:8] + base64.urlsafe_b64encode(b"\0" * 48).decode(),
        "sk-agl-",
        "sk-proj-a-key-of-another-service",
    ]


async def test_only_the_very_key_of_an_attempt_opens_it(scene: Scene, http: httpx.AsyncClient) -> None:
    chat = f"{path(scene.other)}/v1/chat/completions"
    for key in (*changed(scene.other.key), scene.mine.key, SERVER_KEY):
        for name, value in (("authorization", f"Bearer {key}"), ("x-api-key", key)):
            reply = await http.post(chat, json=HI, headers=[(name.encode(), value.encode())])
            assert reply.status_code in (401, 403), (key, reply.text)
            assert scene.other.key not in reply.text
    assert (await http.post(chat, json=HI)).status_code == 401  # without any, from the server's own machine
    await nothing_of_the_other(scene)


async def test_the_path_of_another_rollout_opens_nothing_with_ones_own_key(
    scene: Scene, http: httpx.AsyncClient
) -> None:
    mine, root = bearer(scene.mine.key), path(scene.other)
    for verb, body in (
        ("chat/completions", HI),
        ("completions", {"prompt": "hi"}),
        ("responses", {"input": "hi"}),
        ("embeddings", {"input": "hi"}),
        ("reward", {"value": 1}),
    ):
        reply = await http.post(f"{root}/v1/{verb}", json=body, headers=mine)
        assert reply.status_code == 403, (verb, reply.text)
    spans = {"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "0" * 31 + "1", "spanId": "0" * 15 + "1"}]}]}]}
    await http.post(f"{root}/v1/traces", json=spans, headers=mine)
    await nothing_of_the_other(scene)


async def test_a_key_opens_nothing_once_its_attempt_has_ended(scene: Scene, http: httpx.AsyncClient) -> None:
    ids = [scene.mine.rollout.id]
    await scene.store.finish([Finish(lease=scene.mine.lease, state="failed", error="over")])
    reply = await http.post(f"{path(scene.mine)}/v1/chat/completions", json=HI, headers=bearer(scene.mine.key))
    assert reply.status_code == 410
    await http.post(f"{path(scene.mine)}/v1/reward", json={"value": 1}, headers=bearer(scene.mine.key))
    assert await scene.store.calls(ids) == []
    (rollout,) = await scene.store.rollouts(RolloutQuery(ids=ids))
    assert rollout.reward is None
    await nothing_of_the_other(scene)


async def test_no_admin_route_opens_to_an_agent(scene: Scene, http: httpx.AsyncClient) -> None:
    described = (await http.get("/api/openapi.json", headers=bearer(SERVER_KEY))).json()["paths"]
    assert len(described) > 30
    key = scene.mine.key
    ways: list[dict[str, str]] = [
        {},
        bearer(key),
        {"x-api-key": key},
        {"cookie": f"key={key}"},
        {"authorization": "Bearer"},
    ]
    ways.append({"x-forwarded-for": "127.0.0.1", "x-real-ip": "127.0.0.1", "forwarded": "for=127.0.0.1"})
    opened = []
    for (route, verbs), headers in itertools.product(described.items(), ways):
        url = route if route.startswith("/api") else f"/api{route}"
        for verb in verbs:
            reply = await http.request(verb, re.sub(r"\{.*?\}", scene.other.rollout.id, url), headers=headers)
            opened += [(verb, url, headers)] if reply.status_code not in (401, 403) else []
            assert "of-the-task" not in reply.text
    assert opened == []
    for url in (
        "/api",
        "/api/",
        "/api/batch",
        "//api/runs",
        "/api/../api/runs",
        "/r/x/1/../../../api/runs",
        "/%61pi/runs",
    ):
        reply = await http.get(url, headers=bearer(key))
        assert reply.status_code in (400, 401, 403, 404, 405), url
        assert scene.run_id not in reply.text
    await nothing_of_the_other(scene)


async def test_a_body_of_a_gigabyte_is_refused_before_it_is_read(scene: Scene) -> None:
    before = scene.memory()
    for route in (f"{path(scene.mine)}/v1/chat/completions", f"{path(scene.mine)}/v1/traces", "/api/enqueue"):
        head = f"POST {route} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {scene.mine.key}\r\n"
        head += "content-type: application/json\r\n"
        answer = await raw(scene, f"{head}content-length: {GIGABYTE}\r\n\r\n".encode() + b" " * MEGABYTE)
        assert re.match(rb"HTTP/1.1 4(13|01|03) ", answer), (route, answer[:300])
        await scene.other_is_answered()
    assert scene.memory() - before < 100 * MEGABYTE


async def test_a_body_without_an_end_is_cut_off(scene: Scene) -> None:
    before = scene.memory()
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(scene.server.url).port)
    head = (
        f"POST {path(scene.mine)}/v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {scene.mine.key}\r\n"
    )
    writer.write(f"{head}content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n".encode())
    sent, chunk = 0, b"%x\r\n%s\r\n" % (MEGABYTE, b" " * MEGABYTE)
    answering = asyncio.ensure_future(reader.read(65536))
    try:
        while sent < GIGABYTE and not answering.done():
            writer.write(chunk)
            await asyncio.wait_for(writer.drain(), 20)
            sent += MEGABYTE
            if sent % (64 * MEGABYTE) == 0:
                await scene.other_is_answered()
        async with asyncio.timeout(30):
            answer = await answering
        assert b" 413 " in answer.split(b"\r\n")[0]
    except (ConnectionError, TimeoutError):
        pass  # closed, or read no further
    finally:
        answering.cancel()
        writer.transport.abort()
    assert sent < GIGABYTE
    assert scene.memory() - before < 300 * MEGABYTE
    await scene.other_is_answered()


async def test_a_small_body_that_unpacks_to_a_gigabyte_is_refused(scene: Scene, http: httpx.AsyncClient) -> None:
    before = scene.memory()
    bomb = gzip.compress(bytes(16 * MEGABYTE)) * 64  # members follow each other
    headers = {**bearer(scene.mine.key), "content-encoding": "gzip", "content-type": "application/json"}
    for route in ("traces", "chat/completions"):
        reply, _ = await asyncio.gather(
            http.post(f"{path(scene.mine)}/v1/{route}", content=bomb, headers=headers), scene.other_is_answered()
        )
        assert 400 <= reply.status_code < 500, reply.text
    assert scene.memory() - before < 200 * MEGABYTE


async def test_what_could_be_read_as_two_requests_is_refused(scene: Scene) -> None:
    root, key = path(scene.mine), scene.mine.key
    head = f"POST {root}/v1/reward HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
    inner = f"GET /api/runs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n"
    for extra in (
        "content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        "content-length: 4\r\ncontent-length: 90\r\n\r\nnull",
        "content-length: +4\r\n\r\nnull",
        "x-a: b\nauthorization: Bearer sk-agl-other\r\ncontent-length: 4\r\n\r\nnull",
        "x-a: b\r\n folded: c\r\ncontent-length: 4\r\n\r\nnull",
        "x-a: b\0c\r\ncontent-length: 4\r\n\r\nnull",
    ):
        answer = await raw(scene, (head + extra + inner).encode())
        statuses = re.findall(rb"HTTP/1.1 (\d+)", answer)
        assert statuses, extra
        assert set(statuses) <= {b"400", b"401", b"403", b"422"}, (extra, statuses)
    await nothing_of_the_other(scene)


async def test_what_a_caller_sends_is_in_no_header_of_the_response(scene: Scene, http: httpx.AsyncClient) -> None:
    nasty = "a%0d%0aset-cookie:%20x=1"
    for url in (f"/{nasty}", f"/r/{nasty}/1/v1/chat/completions", f"{path(scene.mine)}/v1/{nasty}", f"/api/{nasty}"):
        reply = await http.post(url, json={**HI, "model": "m\r\nset-cookie: x=1"}, headers=bearer(scene.mine.key))
        assert "set-cookie" not in reply.headers
        assert 400 <= reply.status_code < 500
    await nothing_of_the_other(scene)


async def test_names_that_lead_to_other_places_are_names_of_nothing(scene: Scene, http: httpx.AsyncClient) -> None:
    rollout = scene.mine.rollout.id
    for name in ("..", "../..", "..%2f..%2fetc%2fpasswd", f"{rollout}%00", f"{rollout}%2f..", "%2e%2e", "\u2025"):
        reply = await http.post(f"/r/{name}/1/v1/chat/completions", json=HI, headers=bearer(scene.mine.key))
        assert reply.status_code in (400, 401, 403, 404), name
        assert "root:" not in reply.text
        looked = await http.get(f"/api/rollouts/{name}", headers=bearer(SERVER_KEY))
        if name == "../..":  # the client itself makes the server's root of it, a base URL: who looks is told nothing
            assert (looked.status_code, looked.url.path, looked.json()) == (200, "/", {"status": "ok"})
        else:
            assert looked.status_code in (400, 401, 404), name
    for run_id in ("../../x", "/etc/x", "a/b", "..", "a\\b", "a\0b", ".", "-x", "a\n"):
        body = {"name": "n", "config": {}, "run_id": run_id}
        reply = await http.post("/api/create_run", json=body, headers=bearer(SERVER_KEY))
        assert reply.status_code in (400, 422), run_id
    await nothing_of_the_other(scene)


async def test_a_reward_that_is_no_number_is_none(scene: Scene, http: httpx.AsyncClient) -> None:
    headers = {**bearer(scene.mine.key), "content-type": "application/json"}
    for value in (b"NaN", b"Infinity", b"1e999", b"null", b'"1"', b"[1]", b"9" * 5000):
        reply = await http.post(f"{path(scene.mine)}/v1/reward", content=b'{"value": %s}' % value, headers=headers)
        assert 400 <= reply.status_code < 500, (value, reply.text)
    assert await scene.store.rewards([scene.mine.rollout.id]) == []


async def test_control_characters_of_a_caller_are_not_in_the_log(scene: Scene, http: httpx.AsyncClient) -> None:
    nasty = "\x1b[2J\x1b]0;owned\x07\r\nCRITICAL forged line"
    for body in ({**HI, "model": nasty}, {"messages": nasty}, {"messages": [{"role": nasty, "content": nasty}]}):
        await http.post(f"{path(scene.mine)}/v1/chat/completions", json=body, headers=bearer(scene.mine.key))
    escaped = "%1b%5b2J%0d%0aCRITICAL%20forged%20line"
    for url in (f"/{escaped}", f"/r/{escaped}/1/v1/models", f"/api/{escaped}", f"{path(scene.mine)}/v1/{escaped}"):
        for key in (scene.mine.key, SERVER_KEY):
            await http.get(url, headers=bearer(key))
    await http.post("/api/create_run", json={"name": nasty, "config": {}, "run_id": nasty}, headers=bearer(SERVER_KEY))
    said = scene.server.said()
    assert "\x1b" not in said
    assert "\x07" not in said
    assert not [line for line in said.splitlines() if line.startswith("CRITICAL forged")]
    await scene.other_is_answered()
