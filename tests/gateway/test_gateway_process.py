"""The server as a process: a real socket, signals, a port in use."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from gateway_house import SERVER_KEY, House, path

from agentlightning.runtime.children import listen, start_child
from agentlightning.store.client import LightningStoreClient

HI = {"messages": [{"role": "user", "content": "hi"}]}

Start = Callable[..., subprocess.Popen[bytes]]

PATIENCE_S = 100.0
"""For a server that starts, or ends, at once: bounds that count only where it does not."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(listener) runs a server over the same SQLite file on that socket."""
    children: list[subprocess.Popen[bytes]] = []

    def run(listener: socket.socket) -> subprocess.Popen[bytes]:
        arguments = ["agentlightning.gateway", "--store", f"sqlite:///{tmp_path}/a.db", "--fd", str(listener.fileno())]
        secrets = {"AGL_SERVER_KEY": SERVER_KEY}
        child = start_child(arguments, secrets=secrets, pass_fds=[listener.fileno()], log=tmp_path / "log")
        children.append(child)
        return child

    yield run
    for child in children:
        if child.stdin is not None:
            child.stdin.close()
        child.kill()
        child.wait()


async def test_a_killed_server_comes_back_on_its_port_with_everything(start: Start, house: House) -> None:
    listener = listen("127.0.0.1", 0)
    server = f"http://127.0.0.1:{listener.getsockname()[1]}"
    child = start(listener)
    async with LightningStoreClient(server, SERVER_KEY) as store, httpx.AsyncClient(timeout=PATIENCE_S) as http:
        remote = House(store, house.engine, house.renderer, house.folder)
        remote.run_id = (await store.create_run("process", {})).id
        await remote.serve_policy()
        claim = await remote.claim()
        url = f"{server}{path(claim)}/v1/chat/completions"
        first = await http.post(url, json=HI, headers={"authorization": f"Bearer {claim.key}"})
        child.kill()
        child.wait()
        child = start(listener)
        messages = [*HI["messages"], first.json()["choices"][0]["message"], {"role": "user", "content": "and?"}]
        second = await http.post(url, json={"messages": messages}, headers={"authorization": f"Bearer {claim.key}"})
        assert second.status_code == 200, second.text
        assert second.headers["x-agl-boot"] != first.headers["x-agl-boot"]
        calls = await store.calls([claim.rollout.id])
        assert [call.parent_id for call in calls] == [None, calls[0].id]
        assert [call.fork_cause for call in calls] == [None, None]
    child.send_signal(signal.SIGTERM)
    assert child.wait(PATIENCE_S) == 0
    listener.close()


async def test_the_server_ends_with_its_parent_and_a_long_poll_does_not_hold_it_up(start: Start) -> None:
    listener = listen("127.0.0.1", 0)
    server = f"http://127.0.0.1:{listener.getsockname()[1]}"
    child = start(listener)
    key = {"authorization": f"Bearer {SERVER_KEY}"}
    sent = asyncio.Event()

    async def trace(event: str, _: object) -> None:
        if event == "http11.send_request_body.complete":
            sent.set()

    async with httpx.AsyncClient(timeout=PATIENCE_S, headers=key) as http:
        run = (await http.post(f"{server}/api/create_run", json={"name": "x", "config": {}})).json()
        body = {"run_id": run["id"], "timeout_s": 3600}
        waiting = asyncio.create_task(http.post(f"{server}/api/wait", json=body, extensions={"trace": trace}))
        await sent.wait()
        for _ in range(3):  # by then the poll, which was sent first, is under way
            await http.get(f"{server}/healthz")
        assert child.stdin is not None
        child.stdin.close()
        reply = await waiting
    assert reply.status_code == 503
    assert child.wait(PATIENCE_S) == 0
    listener.close()


def run_server(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agentlightning.gateway", "--store", "memory://", *arguments]
    plain = {name: value for name, value in os.environ.items() if name != "AGL_SERVER_KEY"}
    return subprocess.run(
        command, capture_output=True, text=True, env={**plain, **env}, timeout=PATIENCE_S, check=False
    )


def test_a_port_in_use_is_one_sentence() -> None:
    listener = listen("127.0.0.1", 0)
    port = str(listener.getsockname()[1])
    ended = run_server("--port", port)
    assert ended.returncode == 1
    assert ended.stderr == f"port {port} of 127.0.0.1 is in use; choose another with --port\n"
    listener.close()


@pytest.mark.slow  # it waits for the store for half a minute
def test_a_gateway_over_a_store_that_is_away_is_one_sentence() -> None:
    with socket.socket() as unused:  # bound, not listening
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        ended = run_server("--store", url, "--port", "0")
    assert ended.returncode == 1
    assert f"the server at {url} cannot be reached" in ended.stderr
