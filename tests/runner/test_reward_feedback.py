"""Words beside a reward: from reward functions, judges and agents, kept with the attempt and read back for many rollouts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from rich.console import Console
from runner_bench import Bench

from agentlightning.analysis.rollout_view import print_feedback
from agentlightning.errors import RewardError
from agentlightning.records import Rollout
from agentlightning.runner.result import RolloutResult, result_of
from agentlightning.runner.scoring import FunctionScorer, SumScorer, read_score
from agentlightning.store.scan import MAX_FEEDBACK_CHARS, feedback_text, read_feedback

ATTACK = "</pre><script>\x1b[31m[bold]"


async def settled(bench: Bench, agent: Any, **options: Any) -> Rollout:
    [done] = await bench.solved(agent, {"question": "which year?"}, **options)
    return done


@pytest.mark.parametrize("value", [0.5, ["wrong year"]])
def test_feedback_that_is_no_text_is_one_sentence(value: object) -> None:
    assert read_score({"reward": 1, "feedback": None}, []).feedback == ""
    with pytest.raises(RewardError, match="the reward function's 'feedback': expected a text, got") as caught:
        read_score({"reward": 1, "feedback": value}, [])
    assert "\n" not in str(caught.value)


def test_feedback_is_bounded_and_holds_what_every_store_can() -> None:
    assert feedback_text("x" * 10**6, "feedback") == "x" * (MAX_FEEDBACK_CHARS - 1) + "…"
    assert feedback_text("half \ud800, none \0", "feedback") == "half ?, none �"


async def test_several_functions_say_which_one_said_what() -> None:
    with ThreadPoolExecutor(1) as threads:
        told = FunctionScorer(lambda task, result: {"reward": 1, "feedback": "good"}, threads)
        silent = FunctionScorer(lambda task, result: 0.5, threads)
        scorer = SumScorer(scorers={"a": told, "b": silent, "c": told}, weights={"a": 1, "b": 1, "c": 1})
        score = await scorer.score({}, RolloutResult(calls=[]))
    assert score.feedback == "a: good\nc: good"


async def test_feedback_of_a_reward_function_is_kept_and_read_for_many_rollouts(bench: Bench) -> None:
    with ThreadPoolExecutor(1) as threads:
        scorer = FunctionScorer(lambda task, result: {"score": 0.5, "feedback": ATTACK}, threads)
        done = await settled(bench, lambda task, llm: "1970", reward=scorer)
    other = await settled(bench, lambda task, llm: 1.0)
    assert (done.state, done.reward, other.reward) == ("succeeded", 0.5, 1.0)
    assert await read_feedback(bench.store, [other, done]) == ["", ATTACK]
    spans = await bench.store.spans([done.id])
    assert (len(spans), result_of([], spans, [], 1).spans) == (1, [])  # reward functions do not see it among the spans
    console = Console(record=True, width=200, markup=False, force_terminal=False)
    print_feedback(console, ATTACK)
    printed = console.export_text()
    assert "feedback: </pre><script>" in printed
    assert "\x1b" not in printed


async def test_an_agent_gives_feedback_beside_its_own_reward(bench: Bench) -> None:
    failed = await settled(bench, lambda task, llm: {"score": 0.25, "feedback": 3})
    assert "the agent's feedback: expected a text, got int 3" in str(failed.error)
    done = await settled(bench, lambda task, llm: {"score": 0.25, "feedback": "no source named"})
    assert (done.reward, await read_feedback(bench.store, [done])) == (0.25, ["no source named"])


async def test_an_agent_may_return_its_reward_as_an_object_which_a_reward_function_replaces(bench: Bench) -> None:
    async def solve(task: Any, llm: Any) -> dict[str, Any]:
        return {"reward": 0.25, "success": False}

    own = await settled(bench, solve)
    with ThreadPoolExecutor(1) as threads:
        replaced = await settled(
            bench, solve, reward=FunctionScorer(lambda task, result: result.output["reward"] * 2, threads)
        )
    assert (own.reward, replaced.reward) == (0.25, 0.5)
