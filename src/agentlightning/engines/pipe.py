"""ChildPipe: method calls to a child process over a socket pair, one at a time, and the end that answers them:
(method, arguments) against ("ok", result) or ("error", class name, message)."""

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

from agentlightning import errors
from agentlightning.errors import AgentLightningError, EngineError
from agentlightning.runtime.watchdog import ChildHeartbeat

log = logging.getLogger(__name__)


class PipeEndedError(Exception):
    """The child's end of the pipe closed: it ended, or is about to."""


class ChildPipe:
    """The parent's end: whole calls, even where the caller stops waiting."""

    def __init__(self, child: subprocess.Popen[bytes], pipe: Connection) -> None:
        self.child = child
        self._pipe = pipe
        self._one = threading.Lock()

    def call(self, method: str, *arguments: Any) -> Any:
        """The result of the method; raises the error that it raised there. PipeEndedError where no answer will come."""
        with self._one:
            try:
                self._pipe.send((method, arguments))
            except OSError as cause:
                raise PipeEndedError from cause
            return self.receive()

    def receive(self) -> Any:
        """The next answer: a child's first says that it is ready."""
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError) as cause:
            raise PipeEndedError from cause
        if answer[0] == "ok":
            return answer[1]
        raise getattr(errors, answer[1], EngineError)(answer[2])

    def close(self) -> None:
        """Close this end; a child that serves it ends its loop."""
        self._pipe.close()


class Pipe(Protocol):
    """A child's end."""

    def recv(self) -> Any: ...

    def send(self, answer: Any, /) -> None: ...


def serve(call: Callable[..., Any], pipe: Pipe, heartbeat: ChildHeartbeat) -> None:
    """Answer ``call(method, *arguments)`` until the pipe closes, or an error that is not ours leaves the child in doubt."""
    while True:
        heartbeat.working = False
        try:
            method, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        heartbeat.progress()
        heartbeat.working = True
        try:
            answer: tuple[Any, ...] = ("ok", call(method, *arguments))
        except AgentLightningError as error:
            answer = ("error", type(error).__name__, str(error))
        except Exception:
            log.exception("%s failed", method)
            return
        try:
            pipe.send(answer)
        except OSError:
            return
