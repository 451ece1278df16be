"""Agents that go on from a summary of their own: how that is seen, what is trained, and what each call earns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import build
from agentlightning.adapters.sequences import merge
from agentlightning.adapters.trajectories import compactions, trajectories
from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.credit.grouped_gae import grouped_gae
from agentlightning.algorithms.credit.keys import observation_key
from agentlightning.records import JSON, Call
from agentlightning.training_types import Trajectory

SYSTEM = {"role": "system", "content": "You find the box."}
ASK = "Summarise what you did so far."


def said(role: str, content: str) -> JSON:
    return {"role": role, "content": content}


class Record:
    """The calls of one attempt, each with tokens of its own: one per message, two sampled."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[Call] = []

    def call(self, messages: list[JSON], answer: str, parent: Call | None = None) -> Call:
        """`messages` are the new ones where the call continues another."""
        place = len(self.calls)
        made = build.call(
            id=f"{self.name}-{place}",
            rollout_id=self.name,
            parent_id=None if parent is None else parent.id,
            suffix_ids=[1] * len(messages),
            sampled_ids=[100 + place, 200 + place],
            prompt_tokens=len(messages) + (0 if parent is None else parent.prompt_tokens + 2),
            messages=messages,
            completion=said("assistant", answer),
        )
        self.calls.append(made)
        return made

    def trajectory(self, reward: float) -> Trajectory:
        [found], left_out = trajectories([build.rollout(self.name, reward)], self.calls)
        assert not left_out
        return found


def search(name: str, told: list[str], compact_after: set[int], style: str = "plain") -> Record:
    """An agent that is told something before each step, and that compacts its conversation after some of them."""
    record, task = Record(name), [SYSTEM, said("user", "Where is the box?")]
    new, before = [*task, said("user", told[0])], None
    for step, _ in enumerate(told):
        before = record.call(new, f"{name} does step {step}", before)
        new = [said("user", told[step + 1])] if step + 1 < len(told) else []
        if step in compact_after and new:
            text = f"In words of {name}: {step} steps went by."
            answer = f"<thought>short</thought> <summary>{text}</summary>" if style == "tags" else text
            if style == "transcript":
                shown = "\n".join(one.completion["content"] for one in record.calls)
                record.call([said("system", "You write summaries."), said("user", shown)], answer)
            else:
                record.call([said("user", ASK)], answer, before)
            new, before = [*task, said("user", f"So far: {text}"), *new], None
    return record


@pytest.mark.parametrize("style", ["plain", "tags", "transcript"])
def test_a_conversation_that_goes_on_from_a_summary_is_known_by_the_summarys_text(style: str) -> None:
    record = search("a", ["left", "right", "up"], {0, 1}, style)
    told = "a-0" if style == "transcript" else "a-2"
    assert compactions(record.calls) == {"a-2": ("a-1", "a-0"), "a-4": ("a-3", told)}
    found = {one.call_id: one for one in record.trajectory(1.0).transitions}
    second = found["a-4"].compaction
    assert second is not None
    assert (second.summary.call_id, second.replaced.call_id) == ("a-3", told)
    assert found["a-4"].origin.call_id == "a-0"


NO_SUMMARY = {
    "what another agent is shown": [
        ([said("system", "You write."), said("user", "Write a line.")], "A draft of one line."),
        ([said("user", "Better.")], "A better draft of one line."),
        ([said("system", "You check."), said("user", "A better draft of one line.")], "It is fine so."),
    ],
    "the whole conversation before it, repeated": [
        ([SYSTEM], "a does the very first step"),
        ([said("user", "Next.")], "a does the second step now"),
        ([SYSTEM, said("user", "a does the very first step, then a does the second step now")], "done"),
    ],
    "a short answer": [
        ([SYSTEM, said("user", "Where?")], "left"),
        ([said("user", "Where?")], "right"),
        ([SYSTEM, said("user", "You said right.")], "up"),
    ],
}


@pytest.mark.parametrize("case", NO_SUMMARY)
def test_an_answer_that_stands_in_a_later_prompt_may_be_no_summary(case: str) -> None:
    record = Record("a")
    first, second, third = NO_SUMMARY[case]
    record.call(*second, record.call(*first))
    record.call(*third)
    assert compactions(record.calls) == {}


def test_every_call_of_a_compacted_rollout_gets_the_rollouts_advantage_and_none_weighs_more() -> None:
    """Rewards 1 and 0, dr_grpo: every call of the first gets 0.5, of the second -0.5, however many conversations it took.

    That is the advantage that SUPO and ReSum-GRPO give to all segments of a rollout. Weights of rollout_mean: each of two
    rollouts weighs a half, over its 5 × 2 and 3 × 2 sampled tokens.
    """
    group = [
        search("a", ["left", "right", "up"], {0, 1}).trajectory(1.0),
        search("b", ["left", "right", "up"], set()).trajectory(0.0),
    ]
    algorithm = LightningRL(group_size=2, minibatches=1, advantage="dr_grpo", aggregation="rollout_mean")
    plan = algorithm.plan([group], seed=0)
    assert {one.call.call_id: one.advantages for one in plan.calls} == {
        **{f"a-{place}": 0.5 for place in range(5)},
        **{f"b-{place}": -0.5 for place in range(3)},
    }
    rows = [row for batch in plan.minibatches for row in batch]
    assert sorted(row.rollout_id for row in rows) == ["a", "a", "a", "b"]
    weights = {name: [one for row in rows if row.rollout_id == name for one in row.weights if one] for name in "ab"}
    assert weights["a"] == pytest.approx([1 / 20] * 10)
    assert weights["b"] == pytest.approx([1 / 12] * 6)


def test_a_compacted_state_is_the_one_that_others_were_in_who_were_told_the_same() -> None:
    """Returns 1, 0, 0.4. The calls that go on from a summary and are told "right" are a's third and b's fourth: V = 1 / 2.

    λ = 0: they get 1 - 0.5 and 0 - 0.5; c's, which is told "up", is compared with the third calls' mean, (1 + 0 + 0.4) / 3.
    """
    group = [
        search("a", ["left", "right"], {0}).trajectory(1.0),
        search("b", ["left", "left", "right"], {1}).trajectory(0.0),
        search("c", ["left", "up"], {0}).trajectory(0.4),
    ]
    found = [one.values for one in grouped_gae.function(group, lam=0.0)]
    assert [row[-1] for row in found] == pytest.approx([0.5, -0.5, 0.4 - 1.4 / 3])


def keys(record: Record) -> list[Any]:
    """Of the calls that are no summaries."""
    summaries = {summary for summary, _ in compactions(record.calls).values()}
    return [observation_key(one) for one in record.trajectory(1.0).transitions if one.call_id not in summaries]


@settings(max_examples=50, deadline=None)
@given(
    told=st.lists(st.sampled_from(["left", "right", "up", "down"]), min_size=1, max_size=6),
    compact_after=st.sets(st.integers(0, 5)),
    style=st.sampled_from(["plain", "tags", "transcript"]),
)
def test_wherever_an_agent_compacts_its_states_stay_the_same_and_each_token_is_trained_once(
    told: list[str], compact_after: set[int], style: str
) -> None:
    record = search("a", told, compact_after, style)
    assert len(compactions(record.calls)) == len([step for step in compact_after if step < len(told) - 1])
    assert keys(record) == keys(search("b", told, compact_after, style))
    plain = keys(search("c", told, set()))
    assert [one for place, one in enumerate(keys(record)) if place - 1 not in compact_after] == [
        one for place, one in enumerate(plain) if place - 1 not in compact_after
    ]
    calls = record.trajectory(1.0).transitions
    rows = merge("a", calls, [1.0] * len(calls), [1.0] * len(calls))
    trained = [token for row in rows for token, here in zip(row.tokens, row.mask, strict=True) if here]
    assert sorted(trained) == sorted(token for call in calls for token in call.sampled_ids)
