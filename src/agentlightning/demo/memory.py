"""Memory of a process and all that descend from it, measured while they run; the demo reports its peak."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from pathlib import Path
from types import TracebackType
from typing import Self

EVERY_S = 0.5
MEGABYTE = 1 << 20


class PeakMemory:
    """A context manager in whose block a thread looks at this process and its descendants."""

    def __init__(self) -> None:
        self.megabytes: float | None = None
        """Most resident memory at one time, pages that processes share counted for each; None without /proc."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while Path("/proc/self/statm").exists():
            self.megabytes = max(self.megabytes or 0.0, resident_mb(os.getpid()))
            if self._over.wait(EVERY_S):
                return


def resident_mb(root: int) -> float:
    """Resident memory of a process and its descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    pages: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            pages[int(folder.name)] = int((folder / "statm").read_text().split()[1])
        except (OSError, IndexError):  # it ended meanwhile
            continue
        children[int(after_name[1])].append(int(folder.name))
    tree = [root]
    for process in tree:
        tree += children[process]
    return sum(pages.get(process, 0) for process in tree) * os.sysconf("SC_PAGE_SIZE") / MEGABYTE
