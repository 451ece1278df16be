"""Ending a program with everything it started.

A program runs in a process group of its own; descendants that left the group (setsid, daemons) are found by a variable of
their environment, on Linux. Run as a file, this is the guardian of a worker: it ends the programs of a worker that was
SIGKILLed. Only the standard library and nothing of ours, so that a guardian costs 15 ms.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

MAX_SCANS = 200
"""Scans at most until nothing is found: a process that forks while it is being looked for is found by the next scan."""
EXEC_S = 0.01
"""Pause before the next scan where what was killed is not gone yet, or a process is in the middle of exec, which shows no
environment for a moment: one that lasts where the processor or the disk is busy."""
VSIZE, STARTCODE = 20, 23
"""Places in /proc/PID/stat after the name (proc(5): fields 23 and 26)."""
BIRTH_S = 0.5
"""A program that the worker was just starting when it was killed shows its environment by then."""


def kill_group(group: int, sign: signal.Signals = signal.SIGKILL) -> bool:
    """Signal a process group; False where none of it is left."""
    try:
        os.killpg(group, sign)
    except (ProcessLookupError, PermissionError):  # macOS says EPERM of a group of zombies
        return False
    return True


def kill_marked(*marks: str) -> int:
    """SIGKILL every process whose environment at its start had all of `marks` ('NAME=value'); returns how many."""
    if sys.platform != "linux":
        return 0
    wanted = {mark.encode() for mark in marks}
    killed: set[int] = set()
    for _ in range(MAX_SCANS):
        environments = {pid: _environment(pid) for pid in _processes()}
        found = {pid for pid, environment in environments.items() if environment and wanted <= environment}
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        new, killed = found - killed, killed | found
        if new:
            continue
        if not found and not any(in_exec(pid) for pid, environment in environments.items() if environment == set()):
            break
        time.sleep(EXEC_S)
    return len(killed)


def _processes() -> list[int]:
    own = os.getpid()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != own]


def _environment(pid: int) -> set[bytes] | None:
    """The environment a process was started with; empty for a zombie and in exec, None for one gone or somebody else's."""
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")) - {b""}
    except OSError:
        return None


def in_exec(pid: int) -> bool:
    """Returns whether a process that showed no environment is in the middle of exec, or just was. It then has memory,
    which a zombie has not, and no address of its code, which comes last and which one that was started without an
    environment has."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    memory, code = fields[VSIZE] != b"0", fields[STARTCODE] != b"0"
    return memory and (not code or bool(_environment(pid)))


def guard() -> None:
    """Wait until the worker is gone, then end what it left.

    Standard input is a pipe from the worker: lines ``+GROUP`` and ``-GROUP`` say which process groups run; end of file means
    that the worker is gone. The argument is the mark of its processes.
    """
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        kill_group(group)
    kill_marked(sys.argv[1])
    time.sleep(BIRTH_S)
    kill_marked(sys.argv[1])


if __name__ == "__main__":
    guard()
