"""Backoff: the pauses between tries of something that is away. Every retry loop of the system has one; it knows nothing of
what is tried."""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Backoff:
    """Pauses that double from `first_s` up to `max_s`, until `timeout_s` after the first of them was asked for.

    jitter: the share of a pause that is random, so that a hundred clients which were turned away together do not come back
    together.
    """

    first_s: float = 0.1
    max_s: float = 2.0
    timeout_s: float = math.inf
    jitter: float = 0.5
    failures: int = field(default=0, init=False)
    _deadline: float | None = field(default=None, init=False)

    def next_s(self, min_s: float = 0.0) -> float | None:
        """Seconds to pause now, at least `min_s`; None where that would end after the timeout."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self.timeout_s
        doubled = math.ldexp(self.first_s, min(self.failures, 60))  # the exponent is bounded: floats overflow at 1024
        self.failures += 1
        pause_s = max(min_s, min(doubled, self.max_s) * (1.0 - self.jitter * random.random()))
        return pause_s if now + pause_s <= self._deadline else None

    async def sleep(self, min_s: float = 0.0) -> bool:
        """Pause before the next try; False at once where the time is over."""
        pause_s = self.next_s(min_s)
        if pause_s is not None:
            await asyncio.sleep(pause_s)
        return pause_s is not None

    def extend(self, timeout_s: float) -> None:
        """Go on until at least `timeout_s` after the first pause: what is away is known to come back."""
        if self._deadline is not None:
            self._deadline += max(0.0, timeout_s - self.timeout_s)
        self.timeout_s = max(self.timeout_s, timeout_s)

    def reset(self) -> None:
        """It worked: the next failure is a first one."""
        self.failures, self._deadline = 0, None
