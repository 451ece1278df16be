from __future__ import annotations

import json
import random

import pytest
from credit_trajectories import trajectory

from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.credit import Evidence
from agentlightning.algorithms.credit.judge import JudgeReply, judge_groups, read_scores
from agentlightning.records import JSON
from agentlightning.training_types import Trajectory


class Judge:
    """Prefers attempts that hold an x; its replies are scripted where `replies` has any left."""

    def __init__(self, replies: list[str] | None = None) -> None:
        self.requests: list[JSON] = []
        self.replies = replies or []

    async def __call__(self, request: JSON) -> JudgeReply:
        self.requests.append(request)
        if self.replies:
            return JudgeReply(text=self.replies.pop(0), prompt_tokens=100, sampled_tokens=10)
        attempts = request["messages"][1]["content"].split("<attempt ")[1:]
        scores = [1.0 if '"content": "x"' in attempt else 0.0 for attempt in attempts]
        return JudgeReply(text=f"As asked: {json.dumps({'scores': scores})}", prompt_tokens=100, sampled_tokens=10)


class Kept(dict[str, str]):
    """A cache that outlives a crash, as a folder would."""

    async def get(self, key: str) -> str | None:  # type: ignore[override]
        return super().get(key)

    async def put(self, key: str, text: str) -> None:
        self[key] = text


GROUP = [trajectory("a", 0.0, "zx"), trajectory("b", 0.0, "zy"), trajectory("c", 0.0, "zy")]


async def test_a_judges_scores_become_advantages() -> None:
    judged = await judge_groups([GROUP], Judge(), Kept())
    assert judged.scores == {"a": 1.0, "b": 0.0, "c": 0.0}
    algorithm = LightningRL(credit="judge", advantage="dr_grpo", aggregation="token_mean", minibatches=1)
    plan = algorithm.plan([GROUP], 0, Evidence(scores=judged.scores))
    # one row a rollout: the calls of "a" are 2/3 better than the mean of 1/3
    assert {row.rollout_id: max(row.advantages, key=abs) for row in plan.minibatches[0]} == pytest.approx(
        {"a": 2 / 3, "b": -1 / 3, "c": -1 / 3}
    )


async def test_what_the_group_has_in_common_is_sent_once() -> None:
    judge = Judge()
    await judge_groups([GROUP], judge, Kept())
    [request] = judge.requests
    content = request["messages"][1]["content"]
    assert content.count('"content": "task"') == content.count('"content": "z"') == 1
    assert content.count("<attempt ") == 2  # b and c are one and the same


async def test_the_cost_is_counted() -> None:
    judged = await judge_groups([GROUP], Judge(["nothing", '{"scores": [1, 2]}']), Kept())
    assert judged.stats == {
        "judge/requests": 3.0,
        "judge/cached": 0.0,
        "judge/unusable": 2.0,
        "judge/prompt_tokens": 300.0,
        "judge/sampled_tokens": 30.0,
    }


async def test_a_step_that_is_executed_again_asks_and_pays_nothing() -> None:
    kept, judge = Kept(), Judge(["unreadable"])
    first = await judge_groups([GROUP], judge, kept)
    again = await judge_groups([GROUP], judge, kept)
    assert again.scores == first.scores
    assert (len(judge.requests), again.stats["judge/requests"], again.stats["judge/cached"]) == (2, 0.0, 2.0)


async def test_neither_order_nor_number_of_the_rollouts_changes_what_is_asked() -> None:
    judge, kept = Judge(), Kept()
    members = list(GROUP)
    for seed in range(4):
        random.Random(seed).shuffle(members)
        await judge_groups([members], judge, kept)
    assert len(judge.requests) == 1


async def test_attempts_that_are_all_alike_are_not_judged() -> None:
    judge = Judge()
    judged = await judge_groups([GROUP[1:]], judge, Kept())
    assert (judged.scores, judge.requests) == ({"b": 0.5, "c": 0.5}, [])


async def test_a_judge_that_never_answers_usably_leaves_the_group_out() -> None:
    judged = await judge_groups([GROUP], Judge(["no"] * 3), Kept())
    assert judged.scores == {}
    plan = LightningRL(credit="judge").plan([GROUP], 0, Evidence(scores=judged.scores))
    assert set(plan.outcomes.values()) == {"invalid"}


async def test_calls_that_are_recorded_without_messages_cannot_be_judged() -> None:
    bare: Trajectory = trajectory("a", 0.0, "x")
    bare.transitions[0].completion.clear()
    judged = await judge_groups([[bare, *GROUP]], Judge(), Kept())
    assert judged.scores == {}
    assert "expected the messages of call a/0" in str(judged.unjudgeable)


@pytest.mark.parametrize(
    ("text", "scores"),
    [
        ('{"scores": [0.2, 1]}', [0.2, 1.0]),
        ('first {"scores": [0, 0]} then {"scores": [1, 0]}', [1.0, 0.0]),
        ('{"scores": [0.2]}', None),
        ('{"scores": [0.2, 1.2]}', None),
        ('{"scores": [0.2, NaN]}', None),
        ('{"scores": [0.2, true]}', None),
        ('{"scores": "0.2, 0.3"}', None),
        ("{not json} {}", None),
        ("", None),
    ],
)
def test_only_scores_for_every_attempt_are_read(text: str, scores: list[float] | None) -> None:
    assert read_scores(text, 2) == scores
