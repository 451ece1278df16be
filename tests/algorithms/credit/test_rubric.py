"""A judge's scores of the calls of a rollout share out its reward."""

from __future__ import annotations

import json

import pytest
from credit_trajectories import trajectory
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.credit import Evidence
from agentlightning.algorithms.credit.judge import JudgeReply, read_scores
from agentlightning.algorithms.credit.rubric import rubric, score_calls
from agentlightning.errors import ConfigError
from agentlightning.records import JSON

GROUP = [trajectory("a", 1.0, "zx"), trajectory("b", 0.0, "zy"), trajectory("c", 0.0, "zy"), trajectory("d", 0.0, "x")]


class CallJudge:
    """Blames and praises calls that said x or y; its replies are scripted where `replies` has any left."""

    def __init__(self, replies: list[str] | None = None) -> None:
        self.requests: list[JSON] = []
        self.replies = replies or []

    async def __call__(self, request: JSON) -> JudgeReply:
        self.requests.append(request)
        calls = request["messages"][1]["content"].split("<call ")[1:]
        scores = [0.0 if '"content": "z"' in call.split("</call>")[0] else 0.5 for call in calls]
        text = self.replies.pop(0) if self.replies else f"The last decided it. {json.dumps({'scores': scores})}"
        return JudgeReply(text=text, prompt_tokens=50, sampled_tokens=5)


class KeptReplies:
    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    async def get(self, key: str) -> str | None:
        return self.kept.get(key)

    async def put(self, key: str, text: str) -> None:
        self.kept[key] = text


def test_the_reward_is_shared_out_by_the_scores() -> None:
    group = [trajectory("a", 1.0, "xyz"), trajectory("b", 0.5, "xy")]
    [[first, second]] = rubric([group], Evidence(call_scores={"a": [0.9, 0.1, 0.2]}), floor=0.0)
    assert first.values == first.shares == pytest.approx([2.25, 0.25, 0.5])
    assert (second.values, second.shares) == ([0.5, 0.5], [1.0, 1.0])  # no usable answer: uniform
    [[first, _]] = rubric([group], Evidence(call_scores={"a": [0.9, 0.1, 0.2]}), floor=0.2)
    assert first.values == pytest.approx([2.0, 0.4, 0.6])
    [[first, _]] = rubric([group], Evidence(call_scores={"a": [0.0, 0.0, 0.0]}))
    assert first.values == [1.0, 1.0, 1.0]


async def test_one_request_scores_all_calls_of_a_rollout_and_equal_rollouts_share_it() -> None:
    judge = CallJudge()
    scored = await score_calls([GROUP], judge, KeptReplies(), rubric="Was x said?")
    assert scored.scores == {"a": [0.0, 0.5], "b": [0.0, 0.5], "c": [0.0, 0.5]}
    assert (len(judge.requests), scored.stats["judge/requests"], scored.stats["judge/prompt_tokens"]) == (2, 2.0, 100.0)
    [system, user] = judge.requests[0]["messages"]
    assert "Rubric: Was x said?" in system["content"]
    assert user["content"].count('"content": "task"') == 1
    assert "earned a reward of 1." in user["content"]


async def test_credit_that_was_scored_becomes_advantages_of_both_levels() -> None:
    scored = await score_calls([GROUP], CallJudge(), KeptReplies())
    algorithm = LightningRL(
        credit="rubric", credit_settings={"floor": 0.0}, advantage="dr_grpo", aggregation="token_mean", minibatches=1
    )
    plan = algorithm.plan([GROUP], 0, Evidence(call_scores=scored.scores))
    found = {(one.rollout_id, one.call.call_id[-1]): one.advantages for one in plan.calls}
    # weights [0, 2] of two calls, mean reward 0.25
    assert found == {
        ("a", "0"): 0.0,
        ("a", "1"): 1.5,
        ("b", "0"): 0.0,
        ("b", "1"): -0.5,
        ("c", "0"): 0.0,
        ("c", "1"): -0.5,
        ("d", "0"): -0.25,
    }


async def test_what_was_answered_is_not_asked_again() -> None:
    kept, judge = KeptReplies(), CallJudge(["unreadable", '{"scores": [1, 2]}'])
    first = await score_calls([GROUP], judge, kept)
    again = await score_calls([GROUP], judge, kept)
    assert (again.scores, again.stats["judge/requests"], again.stats["judge/cached"]) == (first.scores, 0.0, 4.0)
    assert len(judge.requests) == 4


async def test_a_judge_that_never_answers_usably_leaves_uniform_credit() -> None:
    scored = await score_calls([GROUP[:1]], CallJudge(["no"] * 3), KeptReplies())
    assert (scored.scores, scored.stats["judge/unusable"]) == ({}, 3.0)


async def test_calls_that_are_recorded_without_messages_cannot_be_scored() -> None:
    bare = trajectory("a", 0.0, "xy")
    bare.transitions[1].completion.clear()
    with pytest.raises(ConfigError, match="credit rule 'rubric': expected the messages of call a/1"):
        await score_calls([[bare]], CallJudge(), KeptReplies())


def test_only_scores_for_every_call_are_read() -> None:
    assert read_scores('{"scores": [0, 0]} then {"scores": [0.5, 1]}', 2) == [0.5, 1.0]
    assert read_scores('{"scores": [0.5]}', 2) is None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.floats(0, 1), st.floats(-2, 2))
def test_the_credits_of_a_rollout_have_its_reward_as_their_mean(
    scores: list[float], floor: float, reward: float
) -> None:
    one = trajectory("a", reward, "x" * len(scores))
    [[credit]] = rubric([[one]], Evidence(call_scores={"a": scores}), floor=floor)
    assert sum(credit.values) / len(scores) == pytest.approx(reward, abs=1e-9)
