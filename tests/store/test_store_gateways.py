"""`agl serve --gateways N`: gateway processes of one host that share a port and a database."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from store_samples import a_worker, some
from typer.testing import CliRunner

from agentlightning.cli.app import app
from agentlightning.errors import ConfigError
from agentlightning.records import Finish
from agentlightning.runtime.children import listen
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.server_keys import find_key

DEADLINE_S = 100.0


@pytest.fixture
def gateways(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, psutil.Process]]:
    """Three gateways, by their URL and the process that keeps them, which makes their key."""
    monkeypatch.delenv("AGL_SERVER_KEY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with listen("127.0.0.1", 0) as place:
        port = place.getsockname()[1]
    command = [sys.executable, "-m", "agentlightning", "serve", "--port", str(port), "--gateways", "3"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=tmp_path, env={**os.environ, "AGL_STORE": postgres_url}, stdout=log, stderr=log
        )
    try:
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


async def key_of(url: str) -> str:
    """The key that commands of this user find, once the gateways answer."""
    deadline = time.monotonic() + DEADLINE_S
    while (key := find_key(url)) is None:
        assert time.monotonic() < deadline, "no key is published"
        await asyncio.sleep(0.02)
    return key


async def gateway_pids(keeper: psutil.Process, but: set[int]) -> set[int]:
    """Process ids of the three gateways, once none of them is among `but`."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        found = {child.pid for child in keeper.children() if "agentlightning.gateway" in child.cmdline()}
        if len(found) == 3 and not found & but:
            return found
        assert time.monotonic() < deadline, f"{found} are no three gateways"
        await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_gateways_of_one_port_are_replaced_when_they_are_killed_and_end_when_they_are_told_to(
    gateways: tuple[str, psutil.Process],
) -> None:
    url, keeper = gateways
    async with LightningStoreClient(url, await key_of(url)) as store:
        run_id = (await store.create_run("several", {})).id
        await store.enqueue(some(run_id, 30))
        first = await gateway_pids(keeper, set())
        killed = {min(first)}
        os.kill(min(first), signal.SIGKILL)
        ended = 0
        for _ in range(30):
            [claim] = await store.claim(a_worker(run_id))
            ended += sum(await store.finish([Finish(lease=claim.lease, state="succeeded")]))
        assert ended == 30
        assert await store.count(run_id) == {("train", "succeeded"): 30}
        assert len(await gateway_pids(keeper, killed) - first) == 1
    keeper.terminate()
    assert await asyncio.to_thread(keeper.wait, DEADLINE_S) == 0
    assert not [pid for pid in first if psutil.pid_exists(pid)]


def test_several_gateways_of_a_store_with_one_server_are_refused() -> None:
    done = CliRunner().invoke(app, ["serve", "--gateways", "2", "--store", "sqlite:///agl.db"])
    assert isinstance(done.exception, ConfigError)
    assert re.match(r"--gateways: several need a store that processes share, .* got sqlite://$", str(done.exception))
