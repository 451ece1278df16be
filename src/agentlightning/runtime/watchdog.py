"""Watchdog: notices children that hang and kills them, so that whoever started them sees a crash and starts them again.

A watched child has a pipe to its parent, into which a thread of its own writes whether its work makes progress. Where
nothing comes for a while, or nothing good for longer, the parent kills it: by SIGKILL, since SIGTERM stays pending in a
process that was stopped. Both ends count only time in which they ran themselves: where the machine slept or the parent was
stopped, nobody is late. Knows nothing of what the children do.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import select
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentlightning.runtime.children import start_child

VARIABLE = "AGL_HEARTBEAT"
"""Environment of a watched child: the descriptor of its pipe, the time between beats and the stall timeout, with colons."""
MAX_BEAT_S = 1.0
BEATS = 10
"""Beats within the hang timeout, so that a busy machine delays none of them by all of it."""

ALIVE, STALLED = b".", b"!"
MAX_READ = 65_536
"""Bytes that a pipe holds: after the parent stood still, all that came meanwhile is read before it judges."""

log = logging.getLogger(__name__)


STALL_TIMES = 30.0
"""A child that lives and makes no progress has this many times `trainer.hang_timeout_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """Times after which a child counts as hung."""

    hang_timeout_s: float = 60.0
    """Seconds without a sign of life."""
    stall_timeout_s: float = 1800.0
    """Seconds for which it lives and its work makes no progress."""
    start_timeout_s: float = 600.0
    """Seconds for its start. Imports come before the first sign of life: half of this time is theirs."""


class RunningTime:
    """Seconds since `reset` in which this process ran, measured in ticks: one that took longer than `max_tick_s` found the
    process stopped or the machine asleep, and counts as so much."""

    def __init__(self, max_tick_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._max_tick_s = max_tick_s
        self._now = now
        self._last = now()
        self.seconds = 0.0

    def tick(self) -> float:
        """Count the time since the last tick; returns the sum."""
        now = self._now()
        self.seconds += min(now - self._last, self._max_tick_s)
        self._last = now
        return self.seconds

    def reset(self) -> None:
        """Something happened: count from here."""
        self._last = self._now()
        self.seconds = 0.0


class ChildHeartbeat:
    """The child's end: beats from a thread, and says so where the work makes no progress."""

    def __init__(self, descriptor: int, beat_s: float, stall_timeout_s: float) -> None:
        self._descriptor = descriptor
        self._beat_s = beat_s
        self._stall_timeout_s = stall_timeout_s
        self._progressed = True
        self.working = True
        """False while there is nothing to do."""

    def progress(self) -> None:
        """The work went on."""
        self._progressed = True

    async def follow_loop(self, is_progress: Callable[[], bool] = lambda: True) -> None:
        """For ever: progress is that the event loop turns, at times when `is_progress`."""
        while True:
            if is_progress():
                self.progress()
            await asyncio.sleep(self._beat_s)

    def start(self) -> None:
        """Beat at once, so that the parent knows of it whatever happens next, and then until the process ends."""
        if not self._send(ALIVE):
            return
        threading.Thread(target=self._beat_for_ever, name="heartbeat-to-parent", daemon=True).start()

    def _beat_for_ever(self) -> None:
        stalled = RunningTime(2 * self._beat_s)
        while True:
            if self._progressed or not self.working:
                self._progressed = False
                stalled.reset()
            if not self._send(STALLED if stalled.tick() > self._stall_timeout_s else ALIVE):
                return
            time.sleep(self._beat_s)

    def _send(self, beat: bytes) -> bool:
        """False where nobody reads any more."""
        try:
            os.write(self._descriptor, beat)
        except BlockingIOError:
            pass  # the parent is stopped, and has more than enough to read
        except OSError:
            return False
        return True


def beat_to_parent() -> ChildHeartbeat:
    """Called by a child that may be watched, first of all: its heartbeat, which goes nowhere where nobody watches."""
    given = os.environ.pop(VARIABLE, "")
    if not given:
        return ChildHeartbeat(-1, MAX_BEAT_S, math.inf)
    descriptor, beat_s, stall_timeout_s = given.split(":")
    os.set_inheritable(int(descriptor), False)
    os.set_blocking(int(descriptor), False)
    heartbeat = ChildHeartbeat(int(descriptor), float(beat_s), float(stall_timeout_s))
    heartbeat.start()
    return heartbeat


class Watchdog:
    """The parent's end, for all of its children."""

    def __init__(self, limits: HangLimits | None = None) -> None:
        self.limits = limits or HangLimits()
        self.kills: Counter[str] = Counter()
        """By name, of children that hung."""

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        stall_timeout_s: float | None = None,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        **given: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a child as `start_child` does, and kill it where it hangs. stall_timeout_s: None: the limits'."""
        stall_timeout_s = self.limits.stall_timeout_s if stall_timeout_s is None else stall_timeout_s
        beats, theirs = os.pipe()
        told = {VARIABLE: f"{theirs}:{self._beat_s}:{stall_timeout_s}"}
        try:
            child = start_child(arguments, pass_fds=[*pass_fds, theirs], env={**(env or {}), **told}, **given)
        except BaseException:
            os.close(beats)
            raise
        finally:
            os.close(theirs)
        watch = partial(self._watch, name, child, beats, stall_timeout_s)
        threading.Thread(target=watch, name=f"watch-{name}", daemon=True).start()
        return child

    @property
    def _beat_s(self) -> float:
        return min(MAX_BEAT_S, self.limits.hang_timeout_s / BEATS)

    def _watch(self, name: str, child: subprocess.Popen[bytes], beats: int, stall_timeout_s: float) -> None:
        silent = RunningTime(2 * self._beat_s)
        limit_s = max(self.limits.hang_timeout_s, self.limits.start_timeout_s / 2)  # so that another start is possible
        poll = select.poll()  # select.select takes no descriptor above 1023
        poll.register(beats, select.POLLIN)
        try:
            while child.returncode is None:
                if poll.poll(self._beat_s * 1000):
                    data = os.read(beats, MAX_READ)
                    if not data:
                        return  # it ended
                    if STALLED in data:
                        self._kill(name, child, f"made no progress for {stall_timeout_s:g} s")
                        return
                    silent.reset()
                    limit_s = self.limits.hang_timeout_s
                elif silent.tick() > limit_s:
                    self._kill(name, child, f"gave no sign of life for {limit_s:g} s")
                    return
        finally:
            os.close(beats)

    def _kill(self, name: str, child: subprocess.Popen[bytes], reason: str) -> None:
        if child.poll() is None:
            self.kills[name] += 1
            log.warning("%s (process %d) %s; killing it", name, child.pid, reason)
            child.kill()
