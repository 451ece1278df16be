"""`agl worker` beside its server and its runs, in the folder that its agents may read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runner_bench import DEADLINE_S
from server_process import ServerProcess

from agentlightning.config.agent import Bubblewrap
from agentlightning.errors import ConfigError
from agentlightning.records import NewRollout
from agentlightning.runner.sandboxes import CommandAgent, check_sandbox
from agentlightning.store.base import RolloutQuery
from agentlightning.store.client import LightningStoreClient

LOOK = """
import glob
print(sorted(name for name in glob.glob("**", recursive=True) if name.endswith((".key", ".db", "-key", "tensors"))))
print(1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machine")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    """A server that makes its own key, with its store in a folder of `folder`."""
    for name in ("served", "log"):
        (folder / name).mkdir()
    server = ServerProcess(f"sqlite:///{folder}/served/agl.db", folder / "log" / "server.log")
    with contextlib.closing(server.start()):
        yield server


def with_key(server: ServerProcess) -> LightningStoreClient:
    return LightningStoreClient(
        server.url, Path(f"{server.store.removeprefix('sqlite:///')}.server-key").read_text().strip()
    )


async def start_worker(server: ServerProcess, run_id: str, folder: Path, agent: str) -> asyncio.subprocess.Process:
    """`agl worker` in this folder, which finds the server's key by itself."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("AGL_")}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentlightning", "worker", agent, "--server", server.url, "--run", run_id),
        cwd=folder,
        env={**plain, "XDG_STATE_HOME": str(server.log.parent / "state")},
    )


async def test_an_agent_reads_neither_the_store_nor_its_servers_key_nor_checkpoints_of_its_folder(
    server: ServerProcess, folder: Path
) -> None:
    try:
        settings = Bubblewrap(readable=(str(folder),))
        check_sandbox(CommandAgent(command="sh", sandbox=settings, server_url="http://127.0.0.1:1"))
    except ConfigError as refused:
        pytest.skip(str(refused))
    (folder / "agent.py").write_text(LOOK)
    (folder / "mine.db").touch()
    (folder / "runs").mkdir()
    (folder / "runs" / "model.safetensors").touch()  # what `agl train` leaves
    async with with_key(server) as store:
        # As `agl train --server` records it.
        config = {"sandbox": {"type": "bubblewrap", "readable": ["."]}, "store": {"url": server.url}}
        run = await store.create_run("boxed", config)
        (queued,) = await store.enqueue([NewRollout(run_id=run.id, task={}, group_id="g")])
        worker = await start_worker(server, run.id, folder, f"{sys.executable} -S agent.py")
        await store.wait(run.id, at_least=1, timeout_s=DEADLINE_S)
        (rollout,) = await store.rollouts(RolloutQuery(ids=[queued.id]))
        (attempt,) = await store.attempts([queued.id])
        worker.terminate()
        assert await worker.wait() == 0
    assert rollout.state == "succeeded", attempt.error
    assert attempt.output == "['mine.db']\n1\n"


async def test_tokens_of_workers_that_have_ended_are_revoked_when_another_starts(
    server: ServerProcess, folder: Path
) -> None:
    async with with_key(server) as store:
        run = await store.create_run("tokens", {})
        await store.create_token("agl worker on elsewhere, process 1", "worker", run.id)
        workers = []
        for ends in (False, True, False):
            workers.append(await start_worker(server, run.id, folder, "true"))
            deadline = time.monotonic() + DEADLINE_S
            while workers[-1].pid not in {one.pid for one in await store.workers(run.id)}:
                assert time.monotonic() < deadline, "it did not start"
                await asyncio.sleep(0.05)
            if ends:
                workers[-1].kill()
                await workers[-1].wait()
        live = [token.name.rpartition(" ")[2] for token in await store.tokens(run.id) if token.revoked_ns is None]
        assert live == ["1", str(workers[0].pid), str(workers[2].pid)]
        for worker in (workers[0], workers[2]):
            worker.terminate()
            assert await worker.wait() == 0
