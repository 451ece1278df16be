"""Child processes that never outlive their parent.

A parent starts every child as ``python -m …`` with a pipe on its standard input, and hands down the listening sockets it
bound itself, so that a restarted child keeps its port. One line goes down the pipe, the child's secrets: arguments and the
environment of a process can be read by others. The child calls `end_with_parent` first: it gets the secrets, and ends when
the pipe closes, and on Linux when the kernel says that the parent died. Knows nothing of what the children do.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from agentlightning.errors import AgentLightningError
from agentlightning.runtime.disk import OTHERS, open_private
from agentlightning.runtime.process_secrets import OWN_SECRETS, hide_memory

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEPT_BYTES = 64 << 20
"""Freed memory that a server keeps, since its next requests need as much."""

SECRETS_TIMEOUT_S = 30.0
"""Seconds that a child waits for the line with its secrets, which its parent writes as soon as it is started."""
MAX_SECRETS_BYTES = 1 << 20

SERVER_GRACE_S = 20.0
"""Seconds that a server goes on with the calls in flight after it was told to end."""
SERVER_END_S = SERVER_GRACE_S + 10
"""Seconds that its parent gives it to end: more than it takes to finish and to close its store."""


def start_child(
    arguments: Sequence[str],
    *,
    secrets: Mapping[str, str] | None = None,
    withhold: Iterable[str] = (),
    pass_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    python: str = sys.executable,
) -> subprocess.Popen[bytes]:
    """Start ``python -P -m arguments…``, which finds no module in the working directory; its output is appended to `log`
    (inherited where None). python: another interpreter than this process's.

    `secrets` reach it by its standard input and nothing else; it inherits the environment without them, without the
    variables to `withhold` and without `OWN_SECRETS`. Children get a process group of their own, so that Ctrl-C in a
    terminal reaches the parent alone, which then decides in what order they end.
    """
    # What agents start keeps Python's own way, so that a variable will not do; an interpreter before 3.11 lacks the option.
    command, safe = (
        ([python, "-P", "-m"], {}) if python == sys.executable else ([python, "-m"], {"PYTHONSAFEPATH": "1"})
    )
    output = open_private(log, "ab") if log is not None else None  # the child owns it after Popen
    try:
        child = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            pass_fds=tuple(pass_fds),
            env={**inheritable(os.environ, {*withhold, *(secrets or {})}), **safe, **(env or {})},
            start_new_session=True,
        )
    finally:
        if output is not None:
            output.close()
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it ended at once; whoever watches it sees its exit code
        os.write(child.stdin.fileno(), secrets_line(secrets or {}))
    return child


def inheritable(environment: Mapping[str, str], secrets: Iterable[str] = ()) -> dict[str, str]:
    """The environment without the variables that hold secrets: `OWN_SECRETS` and those named."""
    withheld = {*OWN_SECRETS, *secrets}
    return {name: value for name, value in environment.items() if name not in withheld}


def secrets_line(secrets: Mapping[str, str]) -> bytes:
    """Returns the first line of a child's standard input. Whoever writes it holds secrets, and hides its memory too."""
    if secrets:
        hide_memory()
    return json.dumps(dict(secrets)).encode() + b"\n"


def end_with_parent() -> dict[str, str]:
    """Called first by a child: SIGTERM to itself when its standard input ends, and SIGKILL-proof on Linux.

    Returns the secrets that its parent handed down. AgentLightningError where none come within `SECRETS_TIMEOUT_S`.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    secrets = receive_secrets()
    threading.Thread(target=_watch_stdin, name="parent-watch", daemon=True).start()
    return secrets


def leave_orphans_to_parent() -> None:
    """Called first by what may be a container's first process, which gets every orphan: goes on in a child, and reaps here.

    Signals are passed on, and the child's exit code becomes the container's. An init of the container's engine would show
    the environment, with its secrets, to everybody; this process is as hidden as the one that called.
    """
    if os.getpid() != 1:
        return
    passed_on = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    awaited = passed_on | {signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        return
    while True:
        told = signal.sigwaitinfo(awaited)
        if told.si_signo in passed_on and told.si_code <= 0:  # not a terminal's Ctrl-C, which reaches the child, too
            os.kill(child, told.si_signo)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
                    os._exit(code if code >= 0 else 128 - code)


def give_way(niceness: int) -> None:
    """Let other processes go first: adds `niceness` to this process's and, where it leads a session, sets its session's.

    Linux shares the CPU among sessions before it looks at processes (autogroup, sched(7)). A child has a session of its
    own, in which its niceness alone would make way for nobody.
    """
    os.nice(niceness)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # a kernel without autogroups
            Path("/proc/self/autogroup").write_text(str(niceness))


def keep_freed_memory() -> None:
    """Have the allocator, where it is glibc's, keep up to `KEPT_BYTES` that were freed. By itself it gives the end of its
    heap back to the system once 128 kB are free there, and asks for it again with the next request."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "mallopt"):
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        libc.mallopt(M_TOP_PAD, KEPT_BYTES // 4)
        libc.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES // 16)  # of which each use is a mapping of its own


def keep_files_private() -> None:
    """Have all files that this process makes be for its user alone. For processes in which no code of users runs: agents,
    and what libraries cache for several users, keep the user's umask."""
    os.umask(OTHERS)


def receive_secrets(timeout_s: float = SECRETS_TIMEOUT_S) -> dict[str, str]:
    """Returns the secrets in the first line of standard input, and hides this process's memory. AgentLightningError where
    there is no such line."""
    hide_memory()
    descriptor = sys.stdin.fileno()
    deadline = time.monotonic() + timeout_s
    line = bytearray()
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AgentLightningError(f"standard input: expected a line with secrets within {timeout_s:g} s, got none")
        chunk = os.read(descriptor, 1)  # not a byte more: what follows is for others
        line += chunk
        if not chunk or len(line) > MAX_SECRETS_BYTES:
            break
    try:
        secrets = json.loads(line)
    except ValueError:
        secrets = None
    if not (isinstance(secrets, dict) and all(isinstance(value, str) for value in secrets.values())):
        raise AgentLightningError("standard input: expected a line with secrets, as a parent writes it, got none")
    return secrets


def _watch_stdin() -> None:
    descriptor = sys.stdin.fileno()
    while os.read(descriptor, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def listen(host: str, port: int) -> socket.socket:
    """A bound, listening, inheritable TCP socket; port 0 takes a free one. Raises OSError where the port is in use."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(4096)
    except OSError:
        listener.close()
        raise
    listener.set_inheritable(True)
    return listener


def end_session(leader: int) -> None:
    """SIGKILL for what a child that ended and was waited for leaves of its session, on Linux: processes that it started."""
    if Path(f"/proc/{leader}").exists():
        return  # somebody else's: a session's id is given to no other process as long as one is left in it
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if os.getsid(int(process.name)) == leader:
                os.kill(int(process.name), signal.SIGKILL)


def stop_child(child: subprocess.Popen[bytes], grace_s: float = 10.0) -> int:
    """SIGTERM, then SIGKILL after the grace period; returns its exit code."""
    if child.stdin is not None:
        child.stdin.close()
    if child.poll() is None:
        child.terminate()
    try:
        return child.wait(grace_s)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()
