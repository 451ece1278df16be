"""An SQLite file has one server at a time: real processes, ended and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess

import build
from agentlightning.errors import ConflictError, StoreError
from agentlightning.gateway.server import AgentLightningServer
from agentlightning.store.server_keys import ServerLock

START_S = 100


def refused(store: str) -> str:
    """What a further server on the store says; it must end by itself."""
    command = [sys.executable, "-m", "agentlightning.gateway", "--store", store, "--port", "0"]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("AGL_")}
    ended = subprocess.run(command, capture_output=True, text=True, env=plain, timeout=START_S, check=False)
    assert ended.returncode == 1
    return ended.stderr


@pytest.mark.slow
def test_a_second_server_on_a_file_is_refused_and_takes_over_when_the_first_was_killed(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/agl.db"
    first = ServerProcess(store, tmp_path / "first.log").start()
    assert first.process is not None
    (tmp_path / "link.db").symlink_to(tmp_path / "agl.db")
    said = refused(f"sqlite:///{tmp_path}/link.db?timeout=1")
    assert f"process {first.process.pid} serves it already" in said
    assert "start `agl serve` once and give its URL to each run (--server" in said
    assert "Traceback" not in said
    with pytest.raises(ConflictError, match="an SQLite file has one server"):
        AgentLightningServer(store).start()
    assert httpx.get(f"{first.url}/readyz", timeout=60).status_code == 200
    for command in (("runs", "list"), ("runs", "list", "--queue")):  # who looks is in nobody's way
        done = build.agl(*command, "--store", store)
        assert done.exit_code == 0, done.output
    first.signal(signal.SIGKILL)
    first.process.wait()
    with AgentLightningServer(store) as second:
        assert httpx.get(f"{second.url}/readyz", timeout=60).status_code == 200


def test_a_server_that_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/agl.db"
    with ServerLock(store) as ending:
        ending.ending()
        program = (
            "import sys; from agentlightning.store.server_keys import ServerLock as L\n"
            "print('begins', flush=True)\nwith L(sys.argv[1]): print('has it', flush=True)"
        )
        next_one = subprocess.Popen([sys.executable, "-c", program, store], stdout=subprocess.PIPE, text=True)
        assert next_one.stdout is not None
        assert next_one.stdout.readline() == "begins\n"
        assert next_one.poll() is None
    with next_one:
        assert next_one.stdout.readline() == "has it\n"
    assert next_one.returncode == 0


def test_stores_that_servers_share_are_not_locked(tmp_path: Path) -> None:
    for url in ("memory://", "postgresql://u@h/d", "redis://h/0", "http://127.0.0.1:1"):
        with ServerLock(url), ServerLock(url):
            pass
    with ServerLock("sqlite:////nowhere/agl.db"):  # opening that store says what is wrong
        pass


def test_a_lock_that_cannot_be_opened_is_no_permission_to_serve(tmp_path: Path) -> None:
    (tmp_path / "agl.db.server-lock").mkdir()  # stands for a file of another user, which root may open
    with (
        pytest.raises(StoreError, match=r"agl\.db\.server-lock: cannot be opened"),
        ServerLock(f"sqlite:///{tmp_path}/agl.db"),
    ):
        pass
