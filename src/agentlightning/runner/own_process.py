"""Calls a user's plain function in processes of its own, in their main threads: for those that need signals there.

Used by `scoring.py` for a reward function that sets time limits by SIGALRM, once it was seen to. Arguments, results and
errors are pickled. The processes end with the worker's, however it ends.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from agentlightning.errors import AgentError
from agentlightning.runner.user_code import load

MAX_PROCESSES = 4


class OwnProcess:
    """Processes that call the function which `spec` names; none before the first call."""

    def __init__(self, spec: str, parameters: Sequence[str], what: str) -> None:
        self._function = (spec, tuple(parameters), what)
        self._pool: ProcessPoolExecutor | None = None

    @property
    def used(self) -> bool:
        """True once it was called."""
        return self._pool is not None

    async def call(self, *arguments: Any) -> Any:
        """Calls the function; returns and raises as it does. AgentError where it ends its process."""
        if self._pool is None:
            # spawn: a child that was forked from a process with threads may wait for a lock of theirs for ever
            context = multiprocessing.get_context("spawn")
            count = min(MAX_PROCESSES, os.cpu_count() or 1)
            self._pool = ProcessPoolExecutor(count, mp_context=context, initializer=_end_with_worker)
        try:
            return await asyncio.wrap_future(self._pool.submit(_call, self._function, arguments))
        except BrokenProcessPool as cause:
            self._pool = None
            raise AgentError(f"{self._function[2]} ended the process that it was called in") from cause
        except (SystemExit, KeyboardInterrupt) as cause:
            raise AgentError(f"{self._function[2]} ended its process: {type(cause).__name__}({cause})") from cause


def _end_with_worker() -> None:
    """Ends this process when its worker is gone, even by SIGKILL, whatever it is computing."""
    worker = multiprocessing.parent_process()
    assert worker is not None

    def wait() -> None:
        worker.join()
        os._exit(1)

    threading.Thread(target=wait, name="worker-watch", daemon=True).start()


def _call(function: tuple[str, tuple[str, ...], str], arguments: tuple[Any, ...]) -> Any:
    return load(*function)(*arguments)
