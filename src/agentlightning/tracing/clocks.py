"""Clocks: when spans began and ended, where what they say cannot be, or is told by a clock that goes wrong.

Driven by sanitize.py, one `Clocks` an attempt. Pure: it is told the time.

A span should lie within its attempt's life, give or take a minute. One that does not was timed by a clock that is off, and
is shifted, with the others of that clock, so that the last of them ends when it came. No shift is used for a span that it
would put elsewhere: one program's nonsense does not become another's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from agentlightning.tracing.otlp import OtlpSpan

TOLERATED_SKEW_NS = 60 * 10**9
MAX_TIME_NS = 2**63 - 1
"""Range of times that every database accepts."""
MAX_SPAN_NS = 24 * 3600 * 10**9
"""A span of an attempt that is younger is not longer than this: one of its times means nothing."""
MAX_CLOCKS = 8
"""Shifts of an attempt that are kept for spans to come."""


class Times(NamedTuple):
    """Start and end of a span, in nanoseconds since the epoch."""

    started_ns: int
    finished_ns: int
    shift_ns: int = 0
    """By how much its clock was set."""
    causes: tuple[str, ...] = ()
    """Faults: wrong_time, clock_skew."""


def plain_times(span: OtlpSpan, now_ns: int) -> Times:
    """As the span says, or an instant: at the time that it has, else now."""
    usable = [time for time in (span.started_ns, span.finished_ns) if 0 < time <= MAX_TIME_NS]
    if len(usable) == 2 and span.started_ns <= span.finished_ns:
        return Times(span.started_ns, span.finished_ns)
    at_ns = usable[0] if usable else now_ns
    return Times(at_ns, at_ns, causes=("wrong_time",))


class Clocks:
    """The clocks of an attempt that began at `began_ns`."""

    def __init__(self, began_ns: int) -> None:
        self._earliest_ns = max(0, began_ns - TOLERATED_SKEW_NS)
        self._shifts_ns: list[int] = []

    def read(self, spans: Sequence[OtlpSpan], now_ns: int) -> list[Times]:
        """The times of one program's spans, which came now."""
        found = [plain_times(span, now_ns) for span in spans]
        outside = [place for place, times in enumerate(found) if not self._fits(times, 0, now_ns)]
        for place in sorted(outside, key=lambda place: found[place].finished_ns, reverse=True):
            found[place] = self._set_right(found[place], now_ns)
        return found

    def _set_right(self, times: Times, now_ns: int) -> Times:
        started_ns, finished_ns, _, causes = times
        length_ns, life_ns = finished_ns - started_ns, now_ns + TOLERATED_SKEW_NS - self._earliest_ns
        if length_ns > max(MAX_SPAN_NS, life_ns):
            ends = (end_ns for end_ns in times[:2] if self._fits(Times(end_ns, end_ns), 0, now_ns))
            at_ns = next(ends, now_ns)
            return Times(at_ns, at_ns, causes=("wrong_time",))
        if length_ns > life_ns and self._fits(Times(finished_ns, finished_ns), 0, now_ns):
            return times  # of a program that ran before
        shift_ns = next((known for known in self._shifts_ns if self._fits(times, known, now_ns)), None)
        if shift_ns is None:
            shift_ns = now_ns - finished_ns
            if len(self._shifts_ns) < MAX_CLOCKS:
                self._shifts_ns.append(shift_ns)
        return Times(max(0, started_ns + shift_ns), finished_ns + shift_ns, shift_ns, (*causes, "clock_skew"))

    def _fits(self, times: Times, shift_ns: int, now_ns: int) -> bool:
        return (
            self._earliest_ns <= times.started_ns + shift_ns
            and times.finished_ns + shift_ns <= now_ns + TOLERATED_SKEW_NS
        )
