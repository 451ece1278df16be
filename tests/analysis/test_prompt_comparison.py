"""Versions of a template compared from finished rollouts: figures, paired statistics, cost and transcripts."""

from __future__ import annotations

from typing import Any

import build
from agentlightning.analysis.intervals import exact_mcnemar
from agentlightning.analysis.version_comparison import PairedComparison, compare_columns
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


def test_tokens_are_counted_of_policies_and_external_models() -> None:
    rollouts = [a_rollout(number, 1.0) for number in range(4)]
    calls = [a_call(0), a_call(2, "gpt-free"), a_call(1, policy="default", usage={}, sampled_ids=[1, 2])]
    first, second = compared(rollouts, calls).figures
    assert (first.calls, first.prompt_tokens, first.sampled_tokens) == (2, 20, 6)
    assert (second.calls, second.prompt_tokens, second.sampled_tokens) == (1, 4, 2)


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
