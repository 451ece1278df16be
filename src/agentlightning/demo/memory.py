"""Peak memory of a process and all that descend from it, which the demo and benchmarks report."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

import psutil

EVERY_S = 0.5


class PeakMemory:
    """A context manager in whose block a thread looks at a process, by default this one, and its descendants."""

    def __init__(self, root: int | None = None) -> None:
        self.megabytes = 0.0
        """Most memory at one time. A page that several processes share is counted once, or for each where the system does
        not tell: elsewhere than on Linux, and of processes that hide their memory from a user who is not root."""
        self._root = psutil.Process(root)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.megabytes = max(self.megabytes, self._resident() / 2**20)
            if self._over.wait(EVERY_S):
                return

    def _resident(self) -> int:
        found = 0
        with suppress(psutil.NoSuchProcess):  # it has ended
            for process in (self._root, *self._root.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    found += _memory(process)
        return found


def _memory(process: psutil.Process) -> int:
    with suppress(psutil.AccessDenied):
        full = process.memory_full_info()
        return int(getattr(full, "pss", full.rss))
    return int(process.memory_info().rss)
