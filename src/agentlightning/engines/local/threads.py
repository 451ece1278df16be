"""Number of torch threads, from how much of the machine others are using.

The learner asks between micro-batches. Threads that share a core with somebody else wait for each other at every operation:
two of them were measured 2.5 to 14 times slower than one. Refuses to know what is computed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

LOOK_S = 0.25
"""Seconds between two looks: the kernel counts in hundredths, and a look must not cost what it saves."""
CROWDED = 0.5
"""A core of which others use more than this is theirs."""


class Threads:
    """One thread per core that nobody else uses, at least one; one until the load was read once.

    cores are those this process may use; clock and own (CPU seconds of this process) are in seconds, and so is busy, what
    all processes together have used of those cores; it may raise OSError where the system does not say.
    """

    def __init__(
        self,
        cores: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        own: Callable[[], float] = time.process_time,
        busy: Callable[[], float],
    ) -> None:
        self._cores = cores
        self._clock, self._own, self._busy = clock, own, busy
        self._before = self._look()
        self.count = 1

    def adjust(self) -> int:
        """The number from now on: unchanged until there is something new to go by."""
        passed = self._clock() - self._before[0]
        if passed >= LOOK_S:
            now = self._look()
            others = (now[1] - self._before[1]) / passed
            self.count = max(1, int(self._cores - others + 1 - CROWDED))
            self.count = min(self.count, self._cores)
            self._before = now
        return self.count

    def _look(self) -> tuple[float, float]:
        """Now, and the CPU seconds that others have used so far."""
        return self._clock(), self._busy() - self._own()


def take_threads(count: int | None) -> Threads | None:
    """Set torch's number of threads: `count`, else that of OMP_NUM_THREADS, else one per idle core, which the result adjusts
    (half of the cores if the system does not tell who uses them; only Linux does)."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    count = int(given) if count is None and given.isdecimal() else count
    threads = threads_here() if count is None else None
    torch.set_num_threads(count or (1 if threads else max(1, (os.cpu_count() or 1) // 2)))
    return threads


def threads_here() -> Threads | None:
    """For the machine this runs on; None if the system does not tell who uses it."""
    try:
        cores = os.sched_getaffinity(0)
        busy_seconds(cores)
    except (AttributeError, OSError):
        return None
    return Threads(len(cores), busy=lambda: busy_seconds(cores))


def busy_seconds(cores: set[int], stat: Path = Path("/proc/stat")) -> float:
    """CPU seconds that anybody has used of these cores since the machine started; proc(5), without idle and iowait."""
    total = 0
    for line in stat.read_text().splitlines():
        name, *ticks = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _, _, irq, softirq, steal = map(int, ticks[:8])
            total += user + nice + system + irq + softirq + steal
    return total / os.sysconf("SC_CLK_TCK")
