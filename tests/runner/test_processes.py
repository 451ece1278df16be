"""Ending a program with everything it started: which processes are waited for, and which are found."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from runner_bench import DEADLINE_S

from agentlightning.runner.processes import STARTCODE, in_exec, kill_marked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def says_where_code_is() -> bool:
    stat = Path("/proc/self/stat")
    return stat.exists() and stat.read_bytes().rpartition(b")")[2].split()[STARTCODE] != b"0"


@pytest.mark.skipif(not says_where_code_is(), reason="this kernel tells one from the other by nothing")
def test_a_process_that_was_started_without_an_environment_is_not_taken_for_one_in_exec() -> None:
    with subprocess.Popen(["sleep", "600"], env={}) as process:
        deadline = time.monotonic() + DEADLINE_S
        # for a moment it is, though Popen has returned
        while (taken := in_exec(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.01)
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        process.kill()
    assert (taken, environment) == (False, b"")


def test_a_process_is_found_however_often_it_becomes_another_program(tmp_path: Path) -> None:
    script = tmp_path / "again.sh"
    script.write_text('exec sh "$0"\n')
    with subprocess.Popen(["sh", str(script)], env={"MARK": str(tmp_path), "PATH": "/usr/bin:/bin"}) as process:
        assert kill_marked(f"MARK={tmp_path}") == 1
        assert process.wait(DEADLINE_S) == -9
