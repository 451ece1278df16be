"""Prompt versions and models compared from finished rollouts: figures, paired statistics, cost, transcripts, a decision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import build
from agentlightning.analysis.intervals import exact_mcnemar
from agentlightning.analysis.version_comparison import PairedComparison, compare_columns, decided, failure_reason
from agentlightning.records import Call, Rollout

VERSIONS = {"system@2": "t", "system@5": "t"}


def compared(rollouts: list[Rollout], calls: list[Call]) -> PairedComparison:
    return compare_columns(VERSIONS, [rollouts[0::2], rollouts[1::2]], calls)


def a_rollout(number: int, reward: float | None) -> Rollout:
    return build.rollout(
        f"o{number}",
        reward,
        task={"number": number // 2},
        replica=number % 2,
        mode="eval",
        state="failed" if reward is None else "succeeded",
        error="it broke" if reward is None else None,
    )


def a_call(number: int, model: str = "gpt-5", **fields: Any) -> Call:
    given: dict[str, Any] = {"policy": "", "usage": {"prompt_tokens": 10, "sampled_tokens": 3}, "sampled_ids": []}
    given |= fields
    return build.call(
        id=f"c{number}",
        rollout_id=f"o{number}",
        prompt_tokens=len(given["sampled_ids"]) * 2,
        model=model,
        messages=[{"role": "user", "content": f"m{number}"}],
        completion={"role": "assistant", "content": "a"},
        **given,
    )


def test_versions_are_compared_pair_by_pair() -> None:
    rewards: list[float | None] = [0, 1, 0, 1, 1, 1, 0, 1, 1, None, 0, 1]
    rollouts = [a_rollout(number, reward) for number, reward in enumerate(rewards)]
    told = compared(rollouts, [])
    assert [(each.version, each.reward_mean, each.failed) for each in told.figures] == [
        ("system@2", 2 / 6, 0),
        ("system@5", 5 / 6, 1),
    ]
    [difference] = told.differences
    assert (difference.version, difference.baseline, difference.better, difference.worse) == (
        "system@5",
        "system@2",
        4,
        1,
    )
    assert difference.p_value == exact_mcnemar(4, 1) == 0.375
    assert difference.difference is not None
    assert (round(difference.difference.value, 3), difference.difference.n) == (0.5, 6)


def test_rewards_that_are_no_successes_have_an_interval_alone() -> None:
    told = compared([a_rollout(number, 0.25 * number) for number in range(4)], [])
    [difference] = told.differences
    assert difference.p_value is None
    assert difference.difference is not None
    assert difference.difference.value == 0.25


def test_transcripts_of_a_task_lie_side_by_side() -> None:
    told = compared([a_rollout(0, 1.0), a_rollout(1, None)], [a_call(0)])
    [task] = told.tasks
    assert task.task == {"number": 0}
    assert [(each.version, each.rollout_id, each.reward, each.error) for each in task.transcripts] == [
        ("system@2", "o0", 1.0, None),
        ("system@5", "o1", None, "it broke"),
    ]
    assert [each["content"] for each in task.transcripts[0].messages] == ["m0", "a"]


def test_mcnemars_test_is_exact() -> None:
    assert exact_mcnemar(0, 0) == 1.0
    assert exact_mcnemar(1, 9) == exact_mcnemar(9, 1) == 2 * 11 / 1024
    assert exact_mcnemar(2000, 0) == 0.0


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


def test_the_better_side_is_named() -> None:
    assert (decided(8, 0, 0.05), decided(0, 8, 0.05), decided(7, 0, 0.05), decided(6, 6, 0.05)) == (
        "better",
        "worse",
        None,
        None,
    )
