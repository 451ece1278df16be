"""Child processes that never outlive their parent.

A parent starts every child as ``python -m …`` with a pipe on its standard input that it never writes to, and hands down the
listening sockets it bound itself, so that a restarted child keeps its port. The child calls `end_with_parent` first: it ends
when the pipe closes, and on Linux when the kernel says that the parent died. Knows nothing of what the children do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1

SERVER_GRACE_S = 20.0
"""Seconds that a server goes on with the calls in flight after it was told to end."""
SERVER_END_S = SERVER_GRACE_S + 10
"""Seconds that its parent gives it to end: more than it takes to finish and to close its store."""


def start_child(
    arguments: Sequence[str],
    *,
    pass_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``python -m arguments…``; its output is appended to `log` (inherited where None).

    Children get a process group of their own, so that Ctrl-C in a terminal reaches the parent alone, which then decides
    in what order they end.
    """
    output = open(log, "ab") if log is not None else None  # noqa: SIM115 - the child owns it after Popen
    try:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            pass_fds=tuple(pass_fds),
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    finally:
        if output is not None:
            output.close()


def end_with_parent() -> None:
    """Called first by a child: SIGTERM to itself when its standard input ends, and SIGKILL-proof on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    threading.Thread(target=_watch_stdin, name="parent-watch", daemon=True).start()


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
