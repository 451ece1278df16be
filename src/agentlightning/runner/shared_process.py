"""The process that a worker shares with its agents: neither it nor their siblings end by what one of them does.

A coroutine that raises SystemExit ends its event loop, `os._exit` the process, a child that came back from `os.fork` would
work as a second worker, and a handler of SIGALRM is refused to every thread but the main one. Used by the worker process and
by whoever calls users' functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import _exit  # the true one, whatever `share_process` makes of os._exit
from typing import Any, Literal, NoReturn

from agentlightning.errors import AgentError
from agentlightning.runner.attempt import CURRENT, AttemptContext

log = logging.getLogger(__name__)

ALARM_REFUSED = "agl_alarm_refused"
"""Attribute of a thread whose code asked for a handler of SIGALRM."""


class AlarmRefusedError(AgentError):
    """A function that is called in a thread set a handler of SIGALRM, which the main thread alone can have."""

    def __init__(self) -> None:
        super().__init__(
            "it sets a handler of SIGALRM (signal.alarm, as math_verify does for its time limits), which works in the main "
            "thread alone, and a plain function is called in another thread: make the agent a program (agent.command), or "
            "switch that time limit off"
        )


def share_process() -> None:
    """Has `os._exit` raise SystemExit in this process; a child that agents fork ends as always."""
    own = os.getpid()

    def leave(status: int) -> NoReturn:
        if os.getpid() != own:
            _exit(status)
        raise SystemExit(status)

    os._exit = leave


def watch_signals() -> None:
    """Has `signal.signal` keep agents from harming each other.

    In a thread, `alarms_told` sees who asks for SIGALRM: libraries swallow the error, and go on without their time limits or
    without a result. In the main thread, what a handler of an attempt raises reaches code of that attempt alone.
    """
    set_handler = signal.signal

    def watched(signalnum: int, handler: Any) -> Any:
        attempt = CURRENT.get(None)
        if threading.current_thread() is not threading.main_thread():
            setattr(threading.current_thread(), ALARM_REFUSED, signalnum == signal.SIGALRM)
        elif attempt is not None and callable(handler) and not isinstance(handler, _Handler):
            handler = _Handler(handler, attempt)
        return set_handler(signalnum, handler)

    signal.signal = watched


@dataclass(frozen=True, slots=True)
class _Handler:
    """A handler of signals that an attempt has set. It is called between any two instructions, be they a sibling's."""

    handle: Callable[[int, Any], Any]
    attempt: AttemptContext

    def __call__(self, signalnum: int, frame: Any) -> None:
        task = asyncio.current_task() if asyncio._get_running_loop() is not None else None
        try:
            self.handle(signalnum, frame)
        except BaseException as error:
            if getattr(task, "attempt", None) is self.attempt:
                raise
            self.attempt.end(error)


@contextmanager
def alarms_told() -> Iterator[None]:
    """Run code of users. AlarmRefusedError where it asked for a handler of SIGALRM and could not have it."""
    thread = threading.current_thread()
    setattr(thread, ALARM_REFUSED, False)
    try:
        yield
    finally:
        if getattr(thread, ALARM_REFUSED):
            raise AlarmRefusedError


@contextmanager
def forks_ended() -> Iterator[None]:
    """Run code of users. A child that it forked and that comes back from it ends here: it is no second worker."""
    own, status = os.getpid(), 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == own:
            raise
        code = error.code if isinstance(error, SystemExit) else 1
        status = code if isinstance(code, int) else int(code is not None)
        if not isinstance(error, SystemExit):
            traceback.print_exc()
    if os.getpid() != own:
        with contextlib.suppress(OSError, ValueError):  # a full disk, a stream that was closed
            sys.stdout.flush()
        _exit(status)


def run_loop(
    work: Coroutine[Any, Any, int],
    event_loop: Literal["auto", "asyncio"],
    task_factory: Callable[..., asyncio.Task[Any]],
    shared: Callable[[], bool],
) -> int:
    """Run the worker to its end on an event loop that agents cannot end, once it is `shared` with them: what leaves it
    before (SystemExit of a task or a callback, `loop.stop()`) is logged, and it goes on."""
    uvloop = event_loop == "auto" and importlib.util.find_spec("uvloop") is not None
    factory = importlib.import_module("uvloop").new_event_loop if uvloop else None
    with asyncio.Runner(loop_factory=factory) as runner:
        loop = runner.get_loop()
        loop.set_task_factory(task_factory)
        task = loop.create_task(work)
        while True:
            try:
                with forks_ended():
                    return loop.run_until_complete(task)
            except BaseException as error:
                if task.done() or loop.is_closed() or loop.is_running() or not shared():
                    raise
                log.warning("code of an agent left the event loop, which goes on", exc_info=error)
