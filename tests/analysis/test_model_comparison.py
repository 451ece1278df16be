"""Two models compared: figures by agent and failure, and a sequential test whose error is bounded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_prompt_comparison import a_call, a_rollout

from agentlightning.analysis.version_comparison import compare_columns, decided, failure_reason


def test_calls_are_counted_and_failures_by_the_last_line_of_their_error() -> None:
    traceback = 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: no answer\n'
    first = [a_rollout(0, 1.0), a_rollout(2, None)]
    second = [replace(a_rollout(1, None), error=traceback), replace(a_rollout(3, None), error=traceback)]
    calls = [a_call(place) for place in range(4)]
    found = compare_columns({"support@40": "a", "support@50": "b"}, [first, second], calls)
    one, other = found.figures
    assert (one.version, one.failures, other.failures) == ("support@40", {"it broke": 1}, {"ValueError: no answer": 2})
    assert (one.calls, other.calls, other.sampled_tokens) == (2, 2, 6)
    [difference] = found.differences
    assert (difference.version, difference.baseline, difference.better, difference.worse) == (
        "support@50",
        "support@40",
        0,
        1,
    )


def test_a_rollout_without_an_error_failed_by_its_state() -> None:
    assert failure_reason(replace(a_rollout(0, None), state="cancelled", error=None)) == "cancelled"


@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_of_equal_models_one_is_named_with_a_bounded_error_exactly_counted(alpha: float) -> None:
    # Every sequence of 200 pairs that differ, each to either side by a coin, with a look after each.
    running, named = {0: 1.0}, 0.0
    for pairs in range(1, 201):
        following: dict[int, float] = {}
        for wins, weight in running.items():
            for more in (0, 1):
                following[wins + more] = following.get(wins + more, 0.0) + weight / 2
        done = [wins for wins in following if decided(wins, pairs - wins, alpha) is not None]
        named += sum(following.pop(wins) for wins in done)
        running = following
    assert 0 < named <= alpha


def test_the_better_side_is_named() -> None:
    assert (decided(8, 0, 0.05), decided(0, 8, 0.05), decided(7, 0, 0.05), decided(6, 6, 0.05)) == (
        "better",
        "worse",
        None,
        None,
    )
