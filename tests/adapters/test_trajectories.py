from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

import build
from agentlightning.adapters.trajectories import JUDGE, named_rewards, trajectories
from agentlightning.records import Call, Reward, Rollout, Sampling


def rollout(id: str = "r", reward: float | None = 1.0, attempt: int = 1) -> Rollout:
    return build.rollout(id, reward, attempt=attempt, finished_ns=None)


def call(id: str, suffix: list[int], sampled: list[int], parent: str | None = None, **fields: Any) -> Call:
    given = {"rollout_id": "r", "messages": [], "completion": {}, **fields}
    return build.call(id=id, suffix_ids=suffix, sampled_ids=sampled, parent_id=parent, versions=[], **given)


def reward(value: float, call_id: str | None = None) -> Reward:
    return Reward(id=f"w{value}", run_id="run", rollout_id="r", attempt=1, value=value, call_id=call_id)


def test_full_prompts_are_rebuilt_from_parents_and_suffixes_in_whatever_order_calls_finished() -> None:
    calls = [
        call("c", [7], [8], parent="b", prompt_tokens=7),
        call("a", [1, 2], [3]),
        call("b", [4], [5, 6], parent="a", prompt_tokens=4),
    ]
    [trajectory], left_out = trajectories([rollout()], calls)
    assert [(t.call_id, t.prompt_ids, t.sampled_ids) for t in trajectory.transitions] == [
        ("c", [1, 2, 3, 4, 5, 6, 7], [8]),
        ("a", [1, 2], [3]),
        ("b", [1, 2, 3, 4], [5, 6]),
    ]
    assert left_out == {}
    [failed], _ = trajectories([replace(rollout(reward=0.0), state="failed")], calls)
    assert (trajectory.failed, failed.failed) == (False, True)


@pytest.mark.parametrize(
    "fields", [{"finish_reason": "abandoned"}, {"attempt": 2}, {"policy": ""}, {"agent": JUDGE}], ids=str
)
def test_a_call_that_is_not_the_policys_own_in_this_attempt_is_not_trained(fields: dict[str, Any]) -> None:
    greedy = Sampling(temperature=0.0)
    calls = [call("a", [1, 2], [3], sampling=greedy), call("b", [4], [5], parent="a", prompt_tokens=4, **fields)]
    if fields == {"policy": ""}:
        calls.append(call("c", [6], [7], parent="b", prompt_tokens=6))
    [trajectory], _ = trajectories([rollout()], calls)
    assert [t.call_id for t in trajectory.transitions] == [one.id for one in calls if one.id != "b"]
    assert trajectory.transitions[-1].prompt_ids == ([1, 2, 3, 4, 5, 6] if fields == {"policy": ""} else [1, 2])
    assert trajectory.transitions[0].temperature == 1.0  # a greedy call


def test_rewards_are_kept_by_name_on_the_rollout_and_on_its_calls() -> None:
    calls = [call("a", [1], [2])]
    records = [
        replace(reward(0.5, "a"), name="format"),
        replace(reward(0.25, "a"), name="tool"),
        replace(reward(1.0), source="return"),
        replace(reward(0.75), name="style"),
        replace(reward(0.5), name="style"),
    ]
    [trajectory], _ = trajectories([rollout()], calls, records)
    assert trajectory.rewards == {"reward": 1.0, "style": 0.5}
    assert trajectory.transitions[0].rewards == {"format": 0.5, "tool": 0.25}
    assert trajectory.transitions[0].reward == 0.75


def test_a_reward_that_was_posted_after_the_rollout_finished_is_late_and_does_not_count() -> None:
    calls = [call("a", [1], [2])]
    done = replace(rollout(), finished_ns=100)
    late = [
        replace(reward(5.0, "a"), source="posted", created_ns=101),
        replace(reward(7.0), source="posted", created_ns=101),
    ]
    early = [replace(reward(0.5, "a"), source="posted", created_ns=99)]
    # a worker's own rewards come with the finish, whatever its clock says
    own = [replace(reward(0.25, "a"), created_ns=500)]
    [trajectory], _ = trajectories([done], calls, late + early + own)
    assert (trajectory.transitions[0].reward, trajectory.rewards) == (0.75, {})


def test_a_rollout_without_a_final_reward_is_kept_as_unknown_where_that_is_asked_for() -> None:
    calls = [call("a", [1], [2]), call("b", [1], [2], rollout_id="f")]
    rollouts = [rollout(reward=None), replace(rollout("f", None), state="failed")]
    [trajectory], left_out = trajectories(rollouts, calls, keep_unrewarded=True)
    assert math.isnan(trajectory.reward)
    assert left_out == {"f": "it has no reward"}


def test_messages_are_rebuilt_from_parents() -> None:
    def said(text: str) -> dict[str, str]:
        return {"role": "assistant", "content": text}

    calls = [
        replace(call("a", [1, 2], [3]), messages=[{"content": "hi"}], completion=said("hello")),
        replace(call("b", [4], [5], parent="a", prompt_tokens=4), messages=[{"content": "and"}], completion=said("so")),
    ]
    [trajectory], _ = trajectories([rollout()], calls)
    second = trajectory.transitions[1]
    assert second.prompt_messages == [{"content": "hi"}, said("hello"), {"content": "and"}]
    assert second.completion == said("so")


def test_rollouts_that_cannot_be_learned_from_are_left_out_with_the_reason() -> None:
    rollouts = [
        rollout("unrewarded", None),
        rollout("silent"),
        rollout("outside"),
        rollout("orphan"),
        rollout("broken"),
    ]
    calls = [
        call("a", [1], [2], rollout_id="unrewarded"),
        call("b", [1], [2], rollout_id="outside", policy=""),
        call("c", [1], [2], prompt_tokens=5, rollout_id="orphan", parent="gone"),
        call("d", [1], [2], prompt_tokens=5, rollout_id="broken"),
    ]
    kept, left_out = trajectories(rollouts, calls)
    assert kept == []
    assert left_out == {
        "unrewarded": "it has no reward",
        "silent": "the policy answered none of its calls",
        "outside": "the policy answered none of its calls",
        "orphan": "call c continues call gone, which is not recorded",
        "broken": "call d is recorded with 5 prompt tokens and 1 logprobs, "
        "but its parts have 1 prompt tokens and 1 sampled ones",
    }


def test_what_a_rollout_was_rescored_with_changes_no_step_that_is_executed_again() -> None:
    calls = [call("a", [1], [2])]
    told = [reward(1.0), reward(0.5, "a")]
    before = trajectories([rollout()], calls, told)
    later = [replace(one, id=f"again {one.id}", source="rescored", name="strict") for one in told]
    assert trajectories([rollout()], calls, [*told, *later]) == before
    assert before[0][0].transitions[0].reward == 0.5
    assert named_rewards([*told, *later], "strict") == {("r", 1): 1.0}


def test_what_a_fork_of_a_fork_repeats_is_known_by_the_call_that_was_sampled() -> None:
    def repeat(id: str, of: str, rollout_id: str) -> Call:
        return replace(call(id, [1], [2], prompt_tokens=1, rollout_id=rollout_id), replayed_id=of)

    calls = [
        call("a1", [1], [2], rollout_id="a"),
        repeat("b1", "a1", "b"),
        call("b2", [3], [4], rollout_id="b"),
        repeat("c1", "b1", "c"),
        repeat("c2", "b2", "c"),
        call("c3", [5], [6], rollout_id="c"),
    ]
    # b has no reward, so that nothing is learned from it
    found, left_out = trajectories([rollout("a"), rollout("b", reward=None), rollout("c")], calls)
    assert list(left_out) == ["b"]
    assert [one.replayed for one in found] == [{}, {"c1": "a1", "c2": "b2"}]
