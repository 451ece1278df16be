"""Ending a program with everything it started.

A program runs in a process group of its own; descendants that left the group (setsid, daemons) are found by a variable of
their environment, on Linux. Run as a file, this is the guardian of a worker (`guardian.py` is the worker's end): it ends
the programs of a worker that was SIGKILLed, and those whose leases end while the worker stands still. ``--kill MARK…`` ends
what has the marks, ``--run PROGRAM…`` becomes a program; ``--as UID`` before any of them changes the user. Only the standard
library and nothing of ours, so that a guardian costs 15 ms.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import sys
import time
from pathlib import Path

STDERR = 2
MAX_SCANS = 200
"""Scans at most until nothing is found: a process that forks while it is being looked for is found by the next scan."""
EXEC_S = 0.01
"""Pause before the next scan where what was killed is not gone yet, or a process is in the middle of exec, which shows no
environment for a moment: one that lasts where the processor or the disk is busy."""
VSIZE, STARTCODE = 20, 23
"""Places in /proc/PID/stat after the name (proc(5): fields 23 and 26)."""
BIRTH_S = 0.5
"""A program that the worker was just starting when it was killed shows its environment by then."""
TICK_S = 1.0
"""Longest time between two looks of the guardian: a timer does not go on while the machine sleeps, and a lease does."""
MAX_READ = 65_536
"""Bytes that a pipe holds: after the guardian stood still, all that came meanwhile is read before it judges."""


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
    fields = _stat(pid)
    if fields is None:
        return False
    memory, code = fields[VSIZE] != b"0", fields[STARTCODE] != b"0"
    return memory and (not code or bool(_environment(pid)))


def _stat(pid: int) -> list[bytes] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None


def elapsed_s() -> float:
    """As agentlightning.runtime.clock has it, which the guardian cannot import."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


def guard(mark: str) -> None:
    """Guard the parent until it is gone, then end what it left.

    Its processes have the mark; standard input is a pipe from it, whose end of file means that it is gone. A
    line is a JSON object: a `program` may run for `lease_s` seconds unless more is said, in `group` where it runs already,
    its processes have `marks`; one that `ended` does no more.
    """
    programs: dict[str, tuple[float, int | None, list[str]]] = {}
    descriptor, unread = sys.stdin.fileno(), b""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while True:
        next_s = max(0.0, min([TICK_S, *(ends - elapsed_s() for ends, _, _ in programs.values())]))
        if poll.poll(math.ceil(next_s * 1000)):
            data = os.read(descriptor, MAX_READ)
            if not data:
                break
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                told = json.loads(line)
                if "program" in told:
                    programs[told["program"]] = elapsed_s() + told["lease_s"], told["group"], told["marks"]
                programs.pop(told.get("ended"), None)
        for name, (ends, group, marks) in list(programs.items()):
            if elapsed_s() >= ends:
                del programs[name]
                if group is not None:
                    kill_group(group)
                kill_marked(mark, *marks)
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)  # whoever reads it need not wait for the rest
    for _, group, _ in programs.values():
        if group is not None:
            kill_group(group)
    kill_marked(mark)
    time.sleep(BIRTH_S)
    kill_marked(mark)


def main(words: list[str]) -> None:
    """The program: of a guardian, unless the words say otherwise."""
    if words[0] == "--as":
        user, words = int(words[1]), words[2:]
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if words[0] == "--kill":
        kill_marked(*words[1:])
    elif words[0] == "--run":
        os.execvp(words[1], words[1:])
    else:
        guard(words[0])


if __name__ == "__main__":
    main(sys.argv[1:])
