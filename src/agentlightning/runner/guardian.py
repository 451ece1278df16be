"""Guardian: the worker's end of a process that ends what the worker cannot end itself.

The guardian (`processes.py`, run as a file) is told which programs run and until when their leases last. A worker that is
killed leaves programs behind, and one that stands still (Ctrl-Z, a debugger, `SIGSTOP`) lets them act beyond their leases.
Told by the command runner and the heartbeat; knows nothing of either.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentlightning.errors import ConfigError
from agentlightning.records import Lease
from agentlightning.runner.processes import kill_marked
from agentlightning.runtime.clock import elapsed_s

MARK = "AGL_WORKER_MARK"
"""Variable that every process which agents of one worker start inherits, to find those that they leave behind."""
PROGRAM = (sys.executable, "-I", "-S", str(Path(__file__).with_name("processes.py")))
ENVIRONMENT = {"AGL_GUARDIAN": "1"}
"""Of the guardian. Not empty: a process without an environment is taken for one in exec."""


@dataclass(slots=True)
class _Program:
    """The program of an attempt."""

    marks: Sequence[str]
    lease_ends: float
    group: int | None


class Guardian:
    """Starts with the first thing that it is told. With a `user` agents run as that user and so does it: only that user, or
    one who may trace everything, finds processes by their environment."""

    def __init__(self, user: int | None = None) -> None:
        self.user = user
        value = secrets.token_hex(8)
        self.mark = f"{MARK}={value}"
        self.environment = {MARK: value}
        """Variables for all that the worker's agents start, by which it is found."""
        self._process: subprocess.Popen[bytes] | None = None
        self._programs: dict[Lease, _Program] = {}
        self._lock = threading.Lock()
        """The worker's loop tells of programs, its heartbeat's thread of leases."""

    def begins(self, lease: Lease, lease_ends: float, marks: Sequence[str]) -> None:
        """A program is about to start, which may run until this time of `clock.elapsed_s`: told before it does, since the
        worker may be killed or stopped at any moment. It and its descendants have `marks` in their environment."""
        with self._lock:
            self._programs[lease] = _Program(marks, lease_ends, None)
            self._tell(self._about(lease))

    def runs(self, lease: Lease, group: int) -> None:
        """The program runs in this process group."""
        with self._lock:
            self._programs[lease].group = group
            self._tell(self._about(lease))

    def renewed(self, lease: Lease, lease_ends: float) -> None:
        """Its program, where it has one, may run until then."""
        with self._lock:
            if (program := self._programs.get(lease)) is not None:
                program.lease_ends = lease_ends
                self._tell(self._about(lease))

    def ended(self, lease: Lease) -> None:
        """Nothing of the program is left."""
        with self._lock:
            if self._programs.pop(lease, None) is not None:
                self._tell({"ended": _name(lease)})

    def kill_left(self, *marks: str) -> None:
        """SIGKILL every process that the worker's agents started and left behind; of one attempt, by its marks."""
        if self.user is None:
            kill_marked(self.mark, *marks)
        else:
            subprocess.run(self._words("--kill", self.mark, *marks), env=ENVIRONMENT, check=False)

    def as_agent(self, program: Sequence[str]) -> Sequence[str]:
        """A program's words, by which it runs as the agents' user."""
        return program if self.user is None else self._words("--run", *program)

    def check(self) -> None:
        """ConfigError where no program can be run as the agents' user."""
        tried = self._words("--kill", self.mark)
        if subprocess.run(tried, env=ENVIRONMENT, check=False, capture_output=True).returncode:
            raise ConfigError(
                f"--agent-user: no program can be run as user {self.user} here; expected a worker that may change its user "
                "(CAP_SETUID, CAP_SETGID) and end what others run (CAP_KILL)"
            )

    def _words(self, *words: str) -> list[str]:
        return [*PROGRAM, *([] if self.user is None else ["--as", str(self.user)]), *words]

    def close(self) -> None:
        """End it; for those who go on living without it."""
        with self._lock:
            self._stop()

    def _about(self, lease: Lease) -> dict[str, Any]:
        program = self._programs[lease]
        lease_s = program.lease_ends - elapsed_s()
        return {"program": _name(lease), "lease_s": lease_s, "group": program.group, "marks": program.marks}

    def _tell(self, what: dict[str, Any]) -> None:
        """Say it, to another one where this one was killed or stopped: agents of the same user can do that."""
        try:
            self._write(what)
        except OSError:
            self._stop()
            for each in map(self._about, list(self._programs)):
                with contextlib.suppress(OSError):  # it was killed at once; the next word finds out
                    self._write(each)

    def _write(self, what: dict[str, Any]) -> None:
        # One write of less than PIPE_BUF is whole or refused, so that no line is ever half there.
        os.write(self._ensure_started(), json.dumps(what).encode() + b"\n")

    def _ensure_started(self) -> int:
        if self._process is None:
            self._process = subprocess.Popen(
                self._words(self.mark),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-Z in a terminal stops the worker alone
                env=ENVIRONMENT,
            )
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    def _stop(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.kill()
            self._process.stdin.close()
            self._process.wait()
            self._process = None


def _name(lease: Lease) -> str:
    return f"{lease.rollout_id} {lease.attempt}"
