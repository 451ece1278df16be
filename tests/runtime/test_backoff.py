from __future__ import annotations

import math
from itertools import pairwise

from agentlightning.runtime.backoff import Backoff


def test_pauses_double_up_to_the_longest_and_begin_again_after_a_success() -> None:
    backoff = Backoff(1.0, 5.0, jitter=0.0)
    assert [backoff.next_s() for _ in range(2000)] == [1.0, 2.0, 4.0, *[5.0] * 1997]  # nothing overflows
    backoff.reset()
    assert backoff.next_s() == 1.0


def test_a_pause_that_was_asked_for_is_kept_and_no_pause_ends_after_the_timeout() -> None:
    backoff = Backoff(1.0, 5.0, timeout_s=30.0)
    assert backoff.next_s(min_s=20.0) == 20.0
    assert backoff.next_s(min_s=31.0) is None


def test_clients_that_failed_together_come_back_at_different_times() -> None:
    pauses = sorted(Backoff(1.0).next_s() or math.nan for _ in range(20))
    assert pauses[0] >= 0.5
    assert pauses[-1] <= 1.0
    assert all(one != other for one, other in pairwise(pauses))


async def test_it_sleeps_until_its_time_is_over() -> None:
    assert await Backoff(0.0).sleep()
    assert not await Backoff(1.0, timeout_s=0.0).sleep()


def test_more_time_is_granted_to_what_is_known_to_come_back() -> None:
    backoff = Backoff(1.0, 1.0, timeout_s=0.5, jitter=0.0)
    assert backoff.next_s() is None
    backoff.extend(30.0)
    assert backoff.next_s() == 1.0
