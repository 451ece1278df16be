"""LogLimit: one agent that is refused a thousand times a second does not fill the disk with it.

Driven by the log of the server process. Lines are counted by the place in the code that writes them and the attempt that
they are about; what is beyond the bound is left out for the rest of the minute, and the last line before says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

MAX_LINES = 60
"""Lines of one place about one attempt in a minute."""
MAX_PLACE_LINES = 1000
"""Lines of one place in a minute, whomever they are about: whoever has no key can name any attempt."""
PERIOD_S = 60.0
MAX_PLACES = 4096
"""Places and attempts that are counted; with more, all counts begin again."""


class LogLimit(logging.Filter):
    """Drops what repeats too often. `caller` has whom a line is about."""

    def __init__(self, caller: ContextVar[Any], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._caller = caller
        self._clock = clock
        self._began = clock()
        self._counts: dict[object, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """True for a line that is to be written."""
        now = self._clock()
        if now - self._began >= PERIOD_S or len(self._counts) >= MAX_PLACES:
            self._counts.clear()
            self._began = now
        place = (record.pathname, record.lineno)
        left = MAX_PLACE_LINES - self._add(place)
        if left >= 0:  # else it is dropped: a key for each name that somebody invents would soon clear the counts
            left = min(left, MAX_LINES - self._add((*place, self._caller.get())))
        if left == 0:
            record.msg, record.args = f"{record.getMessage()} (more lines like this are left out for a minute)", ()
        return left >= 0

    def _add(self, key: object) -> int:
        count = self._counts[key] = self._counts.get(key, 0) + 1
        return count
