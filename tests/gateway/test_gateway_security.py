"""Who may do what: keys, other people's web pages, limits on what a request may hold, and nothing that leaks."""

from __future__ import annotations

import asyncio
import re
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from gateway_house import SERVER_KEY, House, path
from server_process import ServerProcess
from typer.testing import Result

import build
from agentlightning.errors import ConfigError
from agentlightning.gateway.access import Authentication, Permissions, cross_site_reason
from agentlightning.gateway.app import App
from agentlightning.gateway.store_rpc import ApiHooks, StoreRpc
from agentlightning.records import Finish
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.server_keys import (
    find_key,
    find_key_file,
    is_loopback,
    key_path,
    load_or_create_key,
    published,
)
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.store.tokens import is_token

HI = {"messages": [{"role": "user", "content": "hi"}]}
HOME = {"host": "127.0.0.1:8088"}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# --- keys of attempts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [{}, {"agent": {}}, {"agent": {"reward": [{"run": "a.py:f"}]}}, {"agent": 3}])
async def test_an_agent_sets_no_reward_unless_the_run_says_so(house: House, config: dict[str, Any]) -> None:
    house.run_id = (await house.store.create_run("strict", config)).id
    claim = await house.claim()
    reply = await house.http().post("/v1/reward", json={"value": 1}, headers=bearer(claim.key))
    assert reply.status_code == 403
    assert "it has a reward function" in reply.json()["error"]["message"]
    assert await house.store.rewards([claim.rollout.id]) == []


async def test_a_key_opens_its_own_attempt_only_and_only_while_it_runs(house: House) -> None:
    mine, other = await house.claim("a"), await house.claim("b")
    http = house.http(address="10.0.0.5", adds_keys=False)
    url = f"{path(other)}/v1/chat/completions"
    assert (await http.post(url, json=HI, headers=bearer(mine.key))).status_code == 403
    assert (await http.post(url, json=HI)).status_code == 401
    assert (await http.post(url, json=HI, headers=bearer(SERVER_KEY))).status_code == 401
    assert (await http.post(url, json=HI, headers={"x-api-key": other.key})).status_code == 200
    await house.store.finish([Finish(lease=mine.lease, state="failed", error="x")])
    reply = await house.http(house.gateway()).post("/v1/chat/completions", json=HI, headers=bearer(mine.key))
    assert (reply.status_code, reply.json()["error"]["code"]) == (410, "attempt_over")


@pytest.mark.parametrize("verb", ["runs", "signing_secret", "claim", "append_calls"])
async def test_a_key_of_an_attempt_opens_nothing_of_the_store(house: House, verb: str) -> None:
    claim = await house.claim()
    reply = await house.http().post(f"/api/{verb}", json={}, headers=bearer(claim.key))
    assert reply.status_code == 401
    assert set(reply.json()) == {"error"}


# --- the server key ---------------------------------------------------------------------------------------------------


def test_a_server_key_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    file = key_path(f"sqlite:///{tmp_path}/runs/agl.db")
    assert file == tmp_path / "runs" / "agl.db.server-key"
    key = load_or_create_key(file)
    assert key.startswith("sk-agl-server-")
    assert len(key) > 40
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert load_or_create_key(file) == key
    assert load_or_create_key(tmp_path / "other") != key


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_server_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    load_or_create_key(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(ConfigError, match="can be read by others; remove the file"):
        load_or_create_key(tmp_path / "key")


def test_an_empty_file_and_a_link_are_no_server_key(tmp_path: Path) -> None:
    (tmp_path / "empty").touch(0o600)
    with pytest.raises(ConfigError, match="expected the server key, found nothing"):
        load_or_create_key(tmp_path / "empty")
    load_or_create_key(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="cannot be kept there"):
        load_or_create_key(tmp_path / "link")


def test_stores_without_a_file_keep_their_key_in_the_folder_for_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert key_path("memory://") == key_path("http://store:1") == tmp_path / "agentlightning" / "server-key"


async def test_only_the_whole_key_opens() -> None:
    async with InMemoryLightningStore() as store:
        authentication = Authentication(store, "secret")
        for value in (b"Bearer secret", b"bearer secret"):
            assert (await authentication.caller([(b"authorization", value)])).role == "admin"
        for value in (b"Bearer secre", b"Bearer secrets", b"Basic secret", b"secret", b"", b"Bearer s\xc3\xa9cret"):
            with pytest.raises(ConfigError, match="server key: missing or wrong"):
                await authentication.caller([(b"authorization", value)])
        with pytest.raises(ConfigError, match="server key: missing or wrong"):
            await authentication.caller([])


# --- web pages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "ours"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("::1234", False),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
        ("127.0.0.1.nip.io", False),
        ("", False),
    ],
)
def test_loopback_is_told_from_the_rest(address: str, ours: bool) -> None:
    assert is_loopback(address) is ours


@pytest.mark.parametrize(
    ("method", "headers", "field"),
    [
        ("GET", HOME, None),
        ("GET", {"host": "localhost"}, None),
        ("GET", {"host": "[::1]:80"}, None),
        ("POST", {**HOME, "content-type": "application/json; charset=utf-8"}, None),
        ("GET", {**HOME, "origin": "http://127.0.0.1:8088", "sec-fetch-site": "same-origin"}, None),
        ("GET", {**HOME, "sec-fetch-site": "none"}, None),
        ("GET", {"host": "rebound.example.com:8088"}, "Host"),
        ("GET", {}, "Host"),
        ("GET", {**HOME, "origin": "https://example.com"}, "Origin"),
        ("GET", {**HOME, "origin": "http://127.0.0.1:3000"}, "Origin"),
        ("GET", {**HOME, "origin": "null"}, "Origin"),
        ("GET", {**HOME, "sec-fetch-site": "cross-site"}, "Sec-Fetch-Site"),
        ("GET", {**HOME, "sec-fetch-site": "same-site"}, "Sec-Fetch-Site"),
        ("POST", HOME, "Content-Type"),
        ("POST", {**HOME, "content-type": "text/plain"}, "Content-Type"),
        ("POST", {**HOME, "content-type": "application/x-www-form-urlencoded"}, "Content-Type"),
    ],
)
def test_a_page_of_another_site_is_told_from_a_program(method: str, headers: dict[str, str], field: str | None) -> None:
    why = cross_site_reason(method, [(name.encode(), value.encode()) for name, value in headers.items()])
    assert (why or "").partition(":")[0] == (field or "")


async def test_a_server_without_a_key_answers_programs_and_no_pages(house: House) -> None:
    app = App(house.store)
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8088") as http:
        assert (await http.get("/api/runs")).status_code == 200
        assert (await http.post("/api/runs", json={})).status_code == 200
        assert (await http.get("/api/runs", headers={"origin": "https://example.com"})).status_code == 403
        reply = await http.post("/api/runs", content="{}", headers={"content-type": "text/plain"})
        assert (reply.status_code, reply.json()["error"]["type"]) == (403, "InputError")
        assert (await http.get("/api/runs", headers={"host": "evil.example.com"})).status_code == 403
    await app.close()


async def test_a_server_without_a_key_gives_its_secret_to_its_own_machine_only(house: House) -> None:
    app = App(house.store)
    for client, status in (("127.0.0.1", 200), ("10.0.0.5", 401)):
        transport = httpx.ASGITransport(app, client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            assert (await http.post("/api/signing_secret", json={})).status_code == status
    await app.close()


# --- limits -----------------------------------------------------------------------------------------------------------


async def small_edge(
    send: Callable[[], AsyncIterator[bytes]] | None = None, body_s: float = 60.0, **headers: str
) -> httpx.Response:
    """A POST to an application behind an edge that takes 100 bytes within `body_s` seconds."""

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    store = InMemoryLightningStore()
    edge = StoreRpc(
        store,
        echo,
        Permissions(store),
        Authentication(store, None),
        boot="boot",
        hooks=ApiHooks(),
        stopping=asyncio.Event(),
    )
    edge.max_body_bytes, edge.body_timeout_s = 100, body_s
    transport = httpx.ASGITransport(edge)
    content = send() if send is not None else b"{}"
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        return await http.post("/", content=content, headers={"content-type": "application/json", **headers})


@pytest.mark.parametrize("length", ["101", "9" * 5000, "-1", "1e3", "0x10"])
async def test_a_body_that_announces_too_much_is_not_read(length: str) -> None:
    async def never() -> AsyncIterator[bytes]:
        raise AssertionError("it was read")
        yield b""

    reply = await small_edge(never, **{"content-length": length})
    assert reply.status_code == 413
    assert reply.json()["error"]["message"] == "the body is larger than 100 bytes"


async def test_a_body_that_grows_too_large_is_refused() -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 10

    assert (await small_edge(parts)).status_code == 413


async def test_a_body_that_does_not_arrive_is_refused() -> None:
    async def stuck() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    reply = await small_edge(stuck, body_s=0.05)
    assert (reply.status_code, reply.json()["error"]["message"]) == (408, "the body did not arrive within 0 s")


@pytest.mark.parametrize("depth", [300, 2000, 100_000])
async def test_a_body_nested_without_end_is_refused_everywhere(house: House, depth: int) -> None:
    claim = await house.claim()
    deep = "[" * depth + "]" * depth
    http = house.http()
    headers = {**bearer(SERVER_KEY), "content-type": "application/json"}
    reply = await http.post("/api/create_run", content=f'{{"name": "x", "config": {{"a": {deep}}}}}', headers=headers)
    assert 400 <= reply.status_code < 500, reply.text
    reply = await http.post(f"{path(claim)}/v1/chat/completions", content=f'{{"messages": {deep}}}')
    assert 400 <= reply.status_code < 500, reply.text


@pytest.mark.parametrize("depth", [200, 300, 900, 50_000])
async def test_maps_nested_without_end_are_refused_in_msgpack_too(house: House, depth: int) -> None:
    def text(given: str) -> bytes:
        return bytes([0xA0 + len(given)]) + given.encode()

    claim, http = await house.claim(), house.http()
    headers = {**bearer(SERVER_KEY), "content-type": "application/msgpack"}
    deep = (b"\x81" + text("a")) * depth + b"\xc0"
    run, rollout = text("run_id") + msgspec.msgpack.encode(claim.rollout.run_id), b"\x83" + text("task") + deep
    rollout += text("group_id") + text("g") + text("run_id") + msgspec.msgpack.encode(claim.rollout.run_id)
    bodies = {
        "create_run": b"\x82" + text("name") + text("x") + text("config") + deep,
        "update_run": b"\x82" + run + text("summary") + deep,
        "enqueue": b"\x81" + text("rollouts") + b"\x91" + rollout,
        "append_calls": b"\x81" + text("calls") + b"\x91" + msgspec.msgpack.encode(b"\x91\x91" + deep),
        "batch": b"\x91\x93" + text("create_run") + text("key") + deep,
    }
    for name, body in bodies.items():
        reply = await http.post(f"/api/{name}", content=body, headers=headers)
        assert reply.status_code in ((400,) if depth == 50_000 else (200, 400, 422)), (name, reply.text)


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        (
            '{"messages": [' + '{"role": "user", "content": "hi"},' * 60_000 + "0]}",
            400,
            "messages.*at most 50000 objects",
        ),
        ('{"tools": [' + "[],{}," * 30_000 + "0]}", 400, "tools.*at most 50000 objects and lists"),
        ('{"messages": [' + "{}," * 1_100_000 + "0]}", 413, "at most 2000000 commas, braces and brackets"),
    ],
)
async def test_a_request_of_too_many_parts_is_refused(house: House, content: str, status: int, said: str) -> None:
    claim = await house.claim()
    for route in ("chat/completions", "messages/count_tokens"):
        reply = await house.http().post(f"{path(claim)}/v1/{route}", content=content)
        assert reply.status_code == status, reply.text
        assert re.search(said, reply.json()["error"]["message"])


# --- nothing leaks ----------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(f"sqlite:///{tmp_path}/agl.db", tmp_path / "log", key="server-secret-1234")
    process.environment["AGL_LOG_LEVEL"] = "debug"
    yield process.start()
    process.close()


async def test_no_key_is_in_the_log_or_in_an_answer(server: ServerProcess, house: House) -> None:
    assert server.key is not None
    said: list[str] = []
    async with (
        LightningStoreClient(server.url, server.key) as store,
        httpx.AsyncClient(base_url=server.url, timeout=30) as http,
    ):
        remote = House(store, house.engine, house.renderer, house.folder)
        remote.run_id = (await store.create_run("leak", {})).id
        await remote.serve_policy(endpoints=["http://127.0.0.1:1/?key=sk-upstream-0123456789"])
        claims = [await remote.claim(group) for group in "abc"]
        await store.finish([Finish(lease=claims[2].lease, state="failed", error="x")])
        keys = [claim.key for claim in claims]
        secret = (await store.signing_secret()).hex()
        for key in (*keys, keys[0][:-2] + "xx", server.key, f"{server.key}x", "sk-of-somebody-0123456789"):
            for header in (bearer(key), {"x-api-key": key}, {"authorization": key}):
                for url in ("/v1/reward", f"{path(claims[1])}/v1/nothing", f"/v1/models?key={key}", "/r/x/y/v1/models"):
                    said.append((await http.post(url, json={"value": "x"}, headers=header)).text)
                said.append((await http.post(f"/api/claim?key={key}", json={"worker": 3}, headers=header)).text)
                said.append((await http.post("/api/nothing", json={}, headers=header)).text)
                said.append((await http.get("/metrics", headers=header)).text)
    server.signal()
    assert server.end() == 0
    everything = "\n".join([*said, server.said()])
    assert "reward" in everything
    for key in (*keys, server.key, secret, "sk-of-somebody", "sk-upstream"):
        assert key not in everything


def test_a_server_without_a_key_makes_one_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    server = ServerProcess(f"sqlite:///{tmp_path}/agl.db", tmp_path / "log").start("0.0.0.0")
    try:
        file = tmp_path / "agl.db.server-key"
        key = file.read_text().strip()
        assert str(file) in server.said()
        assert key not in server.said()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert httpx.get(f"{server.url}/api/runs", timeout=60).status_code == 401
        assert httpx.get(f"{server.url}/api/runs", headers=bearer(key), timeout=60).json() == []
        assert find_key(server.url) == key
        commands_find_the_key(server.url, monkeypatch)
    finally:
        server.close()  # by SIGKILL: its port may be anybody's now
    assert list((tmp_path / "state/agentlightning/servers").iterdir())
    assert find_key(server.url) is None


def commands_find_the_key(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the server's user on its machine."""

    def agl(*arguments: str) -> Result:
        return build.agl(*arguments, "--store", url)

    made = agl("tokens", "create", "--role", "reader", "--name", "me", "--expires", "7d")
    assert (made.exit_code, is_token(made.stdout.strip())) == (0, True), made.output
    listed = agl("tokens", "list")
    [line] = [line for line in listed.stdout.splitlines() if "me" in line.split()]
    assert line.endswith("valid")
    assert made.stdout.strip() not in listed.stdout
    assert "is revoked since 20" in agl("tokens", "revoke", line.split()[0]).stdout
    monkeypatch.setenv("AGL_SERVER_KEY", made.stdout.strip())
    assert "revoked at" in str(agl("runs", "list").exception)
    monkeypatch.delenv("AGL_SERVER_KEY")


def test_a_key_goes_to_the_address_of_its_server_and_to_no_other_with_that_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    key = load_or_create_key(tmp_path / "key")
    names = {str(found[4][0]) for found in socket.getaddrinfo("localhost", None)}
    opened: dict[str, list[str]] = {
        "127.0.0.1": ["127.0.0.1"],
        "0.0.0.0": ["127.0.0.1", "127.9.9.9"],
        "::1": ["[::1]"],
        "::": ["[::1]"],
        "192.0.2.7": [],
    }
    for address, hosts in opened.items():
        with published(address, 8088, tmp_path / "key"):
            found = [host for host in ("127.0.0.1", "127.9.9.9", "[::1]") if find_key(f"http://{host}:8088") == key]
            assert found == hosts, address
            reached = names <= {host.strip("[]") for host in hosts}
            assert find_key("http://localhost:8088") == (key if reached else None), address
            assert find_key_file("http://localhost:8088") == tmp_path / "key"


def test_makers_of_a_key_at_the_same_time_have_the_same_one(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        for number in range(20):
            path = tmp_path / f"{number}.server-key"
            assert len(set(threads.map(lambda _, path=path: load_or_create_key(path), range(8)))) == 1
    assert len(list(tmp_path.iterdir())) == 20


def test_a_maker_that_ended_in_the_middle_leaves_no_half_key(tmp_path: Path) -> None:
    path = tmp_path / "agl.db.server-key"
    program = (
        "import resource, sys; from pathlib import Path; from agentlightning.store.server_keys import load_or_create_key\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); load_or_create_key(Path(sys.argv[1]))"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False)
    assert "the server key cannot be kept there" in ended.stderr
    assert load_or_create_key(path) == load_or_create_key(path) != ""
