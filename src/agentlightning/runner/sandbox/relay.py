"""The first process inside a sandbox: starts the agent's program and carries its connections to the gateway.

Run as a file: ``python3 relay.py PORT SOCKET RLIMITS PROGRAM ARGUMENT…``. A sandbox has no network but its own loopback:
what connects to 127.0.0.1:PORT there is passed on to the Unix socket SOCKET, behind which the worker stands. A byte on
standard input has the program told to end (SIGTERM); its end is the worker's, and ends the sandbox. Exits as the program
does, by the convention of shells: 128 + signal. Without a program it only tries what it needs. Only the standard library,
and a Python as old as an image may have.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import socket
import subprocess
import sys

CHUNK_BYTES = 64 * 1024
MAX_CONNECTIONS = 64
"""At a time; further ones wait in the listener's queue. The worker bounds them as well: nothing in here can be relied on."""
CANNOT_START = 127


class Side:
    """One end of a connection, and what is on its way to it."""

    def __init__(self, own: socket.socket) -> None:
        self.socket = own
        self.other = self
        self.pending = b""
        self.ended = False
        """It sends nothing any more."""
        self.closing = False
        """Nothing more comes for it."""


class Relay:
    """Carries bytes both ways, a chunk at a time for each direction: a slow reader holds up its own sender only."""

    def __init__(self, listener: socket.socket, path: str, selector: selectors.BaseSelector) -> None:
        self._listener = listener
        self._path = path
        self._selector = selector
        self._count = 0
        self._listening = False
        self._listen()

    def accept(self) -> None:
        """Connect a client with the worker."""
        client, _ = self._listener.accept()
        server = socket.socket(socket.AF_UNIX)
        server.setblocking(False)  # its queue is full where the program connects there itself: nothing may wait here
        try:
            server.connect(self._path)
        except OSError:
            client.close()
            server.close()
            return
        sides = Side(client), Side(server)
        sides[0].other, sides[1].other = sides[1], sides[0]
        for side in sides:
            side.socket.setblocking(False)
            self._selector.register(side.socket, selectors.EVENT_READ, side)
        self._count += 1
        self._listen()

    def move(self, side: Side, events: int) -> None:
        """Read or write what can be."""
        try:
            if events & selectors.EVENT_WRITE:
                side.pending = side.pending[side.socket.send(side.pending) :]
            if events & selectors.EVENT_READ:
                data = side.socket.recv(CHUNK_BYTES)
                side.ended = not data
                side.other.pending += data
                side.other.closing = not data
            for each in (side, side.other):
                if each.closing and not each.pending:
                    each.closing = False
                    each.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self._close(side)
            return
        if side.ended and side.other.ended and not (side.pending or side.other.pending):
            self._close(side)
            return
        for each in (side, side.other):
            self._watch(each)

    def _watch(self, side: Side) -> None:
        wanted = selectors.EVENT_WRITE if side.pending else 0
        if not side.ended and not side.other.pending:
            wanted |= selectors.EVENT_READ
        known = self._selector.get_map().get(side.socket.fileno())
        if known is None and wanted:
            self._selector.register(side.socket, wanted, side)
        elif known is not None and not wanted:
            self._selector.unregister(side.socket)
        elif known is not None and known.events != wanted:
            self._selector.modify(side.socket, wanted, side)

    def _close(self, side: Side) -> None:
        for each in (side, side.other):
            if each.socket.fileno() in self._selector.get_map():
                self._selector.unregister(each.socket)
            each.socket.close()
        self._count -= 1
        self._listen()

    def _listen(self) -> None:
        free = self._count < MAX_CONNECTIONS
        if free and not self._listening:
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        elif self._listening and not free:
            self._selector.unregister(self._listener)
        self._listening = free


def limit(given: str) -> None:
    """Set limits, ``NAME=NUMBER,…``: what is started from here on cannot raise them."""
    for one in filter(None, given.split(",")):
        name, _, number = one.partition("=")
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (int(number), int(number)))


def start(arguments: list[str], rlimits: str) -> subprocess.Popen[bytes]:
    """Start the program in a process group of its own. Keep what it returns: without it the exit code may be reaped."""
    try:
        return subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=lambda: limit(rlimits)
        )
    except (OSError, subprocess.SubprocessError) as cause:
        sys.stderr.write(f"program {arguments[0]!r} cannot be started: {cause}\n")
        sys.stderr.flush()
        os._exit(CANNOT_START)


def reap(program: int) -> int | None:
    """Reap whatever ended, orphans too; the exit code of the program once it has ended, else None."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == program:
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def main() -> int:
    """Run the program to its end."""
    port, path, rlimits, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    home = os.environ.get("HOME", "/")
    os.makedirs(home, exist_ok=True)
    if not arguments:
        return 0
    woken, wakes = socket.socketpair()
    for each in (woken, wakes):
        each.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    program = start(arguments, rlimits)
    selector = selectors.DefaultSelector()
    selector.register(woken, selectors.EVENT_READ, "child")
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ, "worker")
    relay = Relay(listener, path, selector)
    while True:
        for key, events in selector.select():
            if key.data is None:
                relay.accept()
            elif key.data == "child":
                woken.recv(CHUNK_BYTES)
                code = reap(program.pid)
                if code is not None:
                    return code
            elif key.data == "worker":
                if not os.read(sys.stdin.fileno(), 1):
                    return 128 + signal.SIGKILL
                os.killpg(program.pid, signal.SIGTERM)
            elif key.data.socket.fileno() >= 0:  # not one that was closed a moment ago, with its other end
                relay.move(key.data, events)


if __name__ == "__main__":
    os._exit(main())  # the end of the first process ends all others, in a namespace of its own
