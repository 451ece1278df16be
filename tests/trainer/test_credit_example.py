"""The rollout that shows best which call got what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentlightning.algorithms.lightning_rl import UpdatePlan
from agentlightning.algorithms.selection import CallSignal
from agentlightning.records import JSON
from agentlightning.trainer.step import credit_example
from agentlightning.training_types import Loss, Transition


def plan_of(**advantages: list[Any]) -> UpdatePlan:
    """One rollout of each name, whose calls have these advantages."""
    calls = [
        CallSignal(
            rollout_id=name,
            reward=0.5,
            call=Transition(
                call_id=f"{name}/{place}", suffix_ids=[1], sampled_ids=[2, 3], logprobs=[0.0] * 2, versions=[]
            ),
            credit=0.0,
            advantages=one,
        )
        for name, of_rollout in advantages.items()
        for place, one in enumerate(of_rollout)
    ]
    return UpdatePlan(minibatches=[], loss=Loss(), outcomes={}, calls=calls)


def chosen(*plans: UpdatePlan) -> tuple[str, list[float]] | None:
    found = credit_example(plans)
    return None if found is None else (found.rollout_id, [call.advantage for call in found.calls])


def test_the_rollout_whose_calls_differ_most_is_the_example() -> None:
    assert chosen(plan_of(a=[3.0, 3.0], b=[-1.0, 1.0, 0.0], c=[0.0, 1.0])) == ("b", [-1.0, 1.0, 0.0])


def test_where_all_calls_of_a_rollout_got_the_same_the_largest_advantage_decides() -> None:
    assert chosen(plan_of(a=[0.5, 0.5], b=[-2.0], c=[1.0])) == ("b", [-2.0])


def test_a_call_with_an_advantage_per_token_counts_with_their_mean() -> None:
    assert chosen(plan_of(a=[[1.0, 3.0], 0.0], b=[0.0, 1.5])) == ("a", [2.0, 0.0])


def test_of_several_policies_all_are_looked_through() -> None:
    assert chosen(plan_of(a=[0.0, 1.0]), plan_of(b=[0.0, 2.0])) == ("b", [0.0, 2.0])


@pytest.mark.parametrize("plan", [plan_of(), plan_of(a=[0.0, 0.0]), plan_of(a=[0.0, float("nan")])])
def test_a_step_that_teaches_nothing_has_no_example(plan: UpdatePlan) -> None:
    assert chosen(plan) is None


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ({"content": "Oslo"}, "Oslo"),
        ({"content": None, "tool_calls": [{"function": {"name": "find", "arguments": "{}"}}]}, "find({})"),
        ({"content": "", "reasoning_content": "Hm."}, "Hm."),
        ({}, ""),
    ],
)
def test_a_call_is_told_by_what_was_sampled(completion: JSON, text: str) -> None:
    plan = plan_of(a=[1.0])
    [signal] = plan.calls
    plan = replace(plan, calls=[replace(signal, call=replace(signal.call, completion=completion, agent="writer"))])
    found = credit_example([plan])
    assert found is not None
    assert [(call.text, call.agent) for call in found.calls] == [(text, "writer")]


def test_the_example_has_the_reward_of_its_rollout() -> None:
    found = credit_example([plan_of(a=[1.0])])
    assert found is not None
    assert found.reward == 0.5
