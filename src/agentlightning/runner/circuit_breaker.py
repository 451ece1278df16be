"""Circuit breaker: stops a worker from claiming while most of its attempts end for want of infrastructure.

The worker tells it how attempts end and asks it how many it may claim. Pure: the caller has the clock. Knows no store.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW = 20
"""Latest ends that count."""
MIN_ENDS = 5
"""Below so many ends nothing is decided."""
MAX_SHARE = 0.5
"""Share of infrastructure errors among them from which on nothing is claimed."""
FIRST_PAUSE_S = 15.0
MAX_PAUSE_S = 300.0
"""Pauses double up to it: whatever was mended is found out within five minutes."""


@dataclass(slots=True)
class CircuitBreaker:
    """Closed while attempts end well; open for a pause otherwise, after which one attempt at a time is tried."""

    reason: str = ""
    """Sentence about the present pause; '' while it is closed."""
    _ends: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _pause_s: float = 0.0
    _until: float = 0.0

    def add(self, error: str | None, now: float) -> bool:
        """Counts an end and, where it was one, its infrastructure error; returns True where a pause begins."""
        if now < self._until:  # it was running when the pause began
            return False
        self._ends.append(error is not None)
        if error is None:
            if self.reason:  # a trial went well: what came before is over
                self._ends.clear()
                self._pause_s, self.reason = 0.0, ""
            return False
        failed = sum(self._ends)
        if not self.reason and (len(self._ends) < MIN_ENDS or failed < MAX_SHARE * len(self._ends)):
            return False
        self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s or FIRST_PAUSE_S)
        self._until = now + self._pause_s
        line = (error.strip().splitlines() or ["an unknown error"])[-1]
        self.reason = (
            f"{failed} of the last {len(self._ends)} attempts ended for want of infrastructure, the latest with: {line}; "
            f"nothing is claimed for {self._pause_s:.0f} s, then one attempt is tried"
        )
        return True

    def wait_s(self, now: float) -> float:
        """Seconds of the pause that are left."""
        return max(0.0, self._until - now)

    def allowed(self, free: int, running: int) -> int:
        """Attempts that may be claimed of `free` places, after any pause: one trial at a time until it went well."""
        return free if not self.reason else int(running == 0)
