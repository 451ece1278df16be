"""``agl`` as a person uses it: as a process, in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from typer.testing import Result

from agentlightning.errors import AgentLightningError

DEADLINE_S = 600.0
"""Matters only where a test fails: the slowest machine has its time."""


class Folder:
    """A working directory, and the ``agl`` processes that were started in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._started: list[subprocess.Popen[str]] = []

    def write(self, name: str, text: str) -> Path:
        file = self.path / name
        file.write_text(text, encoding="utf-8")
        return file

    def start(self, *arguments: str, env: dict[str, str] | None = None, **popen: Any) -> subprocess.Popen[str]:
        """Start ``agl arguments…``; what it prints goes to pipes unless `popen` says otherwise."""
        plain = {name: value for name, value in os.environ.items() if not name.startswith("AGL_")}
        process = subprocess.Popen(
            [sys.executable, "-m", "agentlightning", *arguments],
            cwd=self.path,
            env={**plain, "COLUMNS": "240", **(env or {})},
            text=True,
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen},
        )
        self._started.append(process)
        return process

    def run(self, *arguments: str, env: dict[str, str] | None = None, **popen: Any) -> subprocess.CompletedProcess[str]:
        """Run ``agl arguments…`` to its end."""
        process = self.start(*arguments, env=env, **popen)
        out, err = process.communicate(timeout=DEADLINE_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def processes(self) -> list[psutil.Process]:
        """Every process that runs in this folder or was told of it, whoever its parent is now."""
        return [process for process, _ in self.commands()]

    def commands(self) -> list[tuple[psutil.Process, list[str]]]:
        """The same, oldest first, each with its command: it may end while others are looked at, and has none then."""
        found = []
        for process in psutil.process_iter():
            try:
                words, began = process.cmdline(), process.create_time()
                here = process.cwd() == str(self.path) or any(str(self.path) in word for word in words)
                if here and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                    found.append((began, process, words))
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return [(process, words) for _, process, words in sorted(found, key=lambda one: one[0])]

    def close(self) -> None:
        """Nothing of a failed test may run on beside the next one."""
        for started in self._started:
            if started.poll() is None:
                started.send_signal(signal.SIGKILL)
            started.communicate()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself, as the children of what was killed do
                process.kill()


def refused_at_once(result: Result, *words: str) -> None:
    """The command ended with the code of wrong input and one sentence that has these words."""
    error = result.exception
    assert isinstance(error, AgentLightningError), result.output
    assert error.exit_code == 2
    [sentence] = str(error).splitlines()
    for word in words:
        assert word in sentence


def until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll real processes until `condition` holds; fails the test with `what` did not happen."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {deadline_s:.0f} s"
        time.sleep(0.01)
