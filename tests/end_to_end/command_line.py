"""``agl`` as a person uses it: as a process, in a folder of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

DEADLINE_S = 60.0


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
        found = []
        for process in psutil.process_iter():
            try:
                here = process.cwd() == str(self.path) or any(str(self.path) in word for word in process.cmdline())
                if here and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def close(self) -> None:
        """Nothing of a failed test may run on beside the next one."""
        for started in self._started:
            if started.poll() is None:
                started.send_signal(signal.SIGKILL)
            started.communicate()
        for process in self.processes():
            process.kill()


def until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll real processes until `condition` holds; fails the test with `what` did not happen."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {deadline_s:.0f} s"
        time.sleep(0.01)
