"""`agl worker` beside its server and its runs, in the folder that its agents may read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import pytest
from server_process import ServerProcess

from agentlightning.config_sandbox import SandboxConfig
from agentlightning.errors import ConfigError
from agentlightning.runner.sandbox.sandbox import Sandbox
from agentlightning.store.base import RolloutQuery
from agentlightning.store.client import LightningStoreClient
from agentlightning.types import NewRollout

LOOK = """
import glob
print(sorted(name for name in glob.glob("**", recursive=True) if name.endswith((".key", ".db", "-key", "tensors"))))
print(1)
"""


async def test_an_agent_reads_neither_the_store_nor_its_servers_key_nor_checkpoints_of_its_folder(
    tmp_path: Path,
) -> None:
    try:
        Sandbox(SandboxConfig(kind="bubblewrap", readable=(str(tmp_path),)), "sh").check()
    except ConfigError as refused:
        pytest.skip(str(refused))
    (tmp_path / "agent.py").write_text(LOOK)
    (tmp_path / "mine.db").touch()
    for folder in ("served", "runs"):  # the server's store, and what `agl train` leaves
        (tmp_path / folder).mkdir()
    (tmp_path / "runs" / "model.safetensors").touch()
    server = ServerProcess(f"sqlite:///{tmp_path}/served/agl.db", tmp_path / "log" / "server.log")
    server.log.parent.mkdir()
    state = {"XDG_STATE_HOME": str(server.log.parent / "state")}
    with contextlib.closing(server.start()):
        output = await _output_of_an_agent(server, tmp_path, state)
    assert output == "['mine.db']\n1\n"


async def _output_of_an_agent(server: ServerProcess, folder: Path, state: dict[str, str]) -> str | None:
    """The output of an agent of `agl worker` in this folder, of a run as `agl train --server` records it."""
    key = (folder / "served" / "agl.db.server-key").read_text().strip()
    async with LightningStoreClient(server.url, key) as store:
        config = {"sandbox": {"kind": "bubblewrap", "readable": ["."]}, "store": {"url": server.url}}
        run = await store.create_run("boxed", config)
        (queued,) = await store.enqueue([NewRollout(run_id=run.id, task={}, group_id="g")])
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agentlightning", "worker", f"{sys.executable} -S agent.py"),
            *("--server", server.url, "--run", run.id),
            cwd=folder,
            env={**{name: value for name, value in os.environ.items() if not name.startswith("AGL_")}, **state},
        )
        await store.wait(run.id, at_least=1, timeout_s=90)
        (rollout,) = await store.rollouts(RolloutQuery(ids=[queued.id]))
        (attempt,) = await store.attempts([queued.id])
        worker.terminate()
        assert await worker.wait() == 0
    assert rollout.state == "succeeded", attempt.error
    return attempt.output
