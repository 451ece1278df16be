"""Times of spans: a clock that is off is set right, and what no clock says harms no other span."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.tracing.clocks import MAX_CLOCKS, MAX_SPAN_NS, MAX_TIME_NS, TOLERATED_SKEW_NS, Clocks
from agentlightning.tracing.otlp import OtlpSpan

NOW = 1_700_000_000 * 10**9
BEGAN = NOW - 100 * 10**9
SECOND = 10**9
HOUR = 3600 * SECOND


def a_span(started_ns: int, finished_ns: int) -> OtlpSpan:
    return OtlpSpan(started_ns=started_ns, finished_ns=finished_ns)


@pytest.mark.parametrize("nonsense", [2**63 - 1, 2**64 - 1, 2**62, NOW + 1000 * HOUR])
def test_a_time_that_means_nothing_does_not_become_the_clock_of_others(nonsense: int) -> None:
    clocks = Clocks(BEGAN)
    broken = a_span(NOW - SECOND, nonsense)
    ahead = a_span(NOW + HOUR - 2 * SECOND, NOW + HOUR - SECOND)
    first, second = clocks.read([broken, ahead], NOW)
    assert (first.started_ns, first.finished_ns, first.causes) == (NOW - SECOND, NOW - SECOND, ("wrong_time",))
    assert (second.started_ns, second.finished_ns, second.causes) == (NOW - SECOND, NOW, ("clock_skew",))


def test_a_beginning_that_means_nothing_leaves_the_end() -> None:
    [times] = Clocks(BEGAN).read([a_span(1, NOW - SECOND)], NOW)
    assert (times.started_ns, times.finished_ns, times.causes) == (NOW - SECOND, NOW - SECOND, ("wrong_time",))


def test_the_clocks_of_two_programs_are_set_right_each() -> None:
    clocks = Clocks(BEGAN)
    ahead, behind = (a_span(NOW + off - SECOND, NOW + off) for off in (HOUR, -2 * HOUR))
    for span in (ahead, behind):
        [times] = clocks.read([span], NOW)
        assert (times.started_ns, times.finished_ns) == (NOW - SECOND, NOW)
    [later] = clocks.read([a_span(NOW + HOUR + 5 * SECOND, NOW + HOUR + 6 * SECOND)], NOW + 9 * SECOND)
    assert (later.started_ns, later.finished_ns) == (NOW + 5 * SECOND, NOW + 6 * SECOND)


def test_a_span_that_began_before_its_attempt_keeps_its_length() -> None:
    [times] = Clocks(BEGAN).read([a_span(NOW - 5 * HOUR, NOW)], NOW)
    assert times == (NOW - 5 * HOUR, NOW, 0, ())


TIMES = st.integers(-5, 2**64) | st.integers(BEGAN - 2 * MAX_SPAN_NS, NOW + 2 * MAX_SPAN_NS)


@given(st.lists(st.lists(st.tuples(TIMES, TIMES), max_size=4), max_size=2 * MAX_CLOCKS))
def test_whatever_spans_say_a_store_takes_their_times_and_sound_ones_stay(
    requests: list[list[tuple[int, int]]],
) -> None:
    clocks = Clocks(BEGAN)
    for request in requests:
        spans = [a_span(*times) for times in request]
        for span, times in zip(spans, clocks.read(spans, NOW), strict=True):
            assert 0 <= times.started_ns <= times.finished_ns <= MAX_TIME_NS
            assert times.finished_ns <= NOW + TOLERATED_SKEW_NS
            if BEGAN <= span.started_ns <= span.finished_ns <= NOW:
                assert times == (span.started_ns, span.finished_ns, 0, ())
