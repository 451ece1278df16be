"""Requests to an optimiser model: bounded text, and answers between fences."""

from __future__ import annotations

import pytest

from agentlightning.algorithms.prompts import reflection
from agentlightning.algorithms.prompts.reflection import TriedText, fenced, new_text, rollouts_text
from agentlightning.algorithms.prompts.search import RolloutScore, Trace


def trace(steps: str = "assistant: 4", feedback: str = "Wrong unit.", error: str = "", reward: float = 0.25) -> Trace:
    score = RolloutScore(task=0, reward=reward, feedback=feedback, error=error)
    return Trace(task='{"question": "2 + 2"}', steps=(steps, "tool: error: no such table"), score=score)


def test_a_rollout_has_its_task_steps_reward_and_feedback() -> None:
    assert rollouts_text([trace()]) == (
        '## Rollout 1, reward 0.25\n### Task\n{"question": "2 + 2"}\n### Steps\nassistant: 4\ntool: error: no such table\n'
        "### Outcome\nWrong unit."
    )


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("Here it is:\n```\nNew text.\n```\nGood luck.", "New text."),
        ("```text\nNew text.\n```", "New text."),
        ("````\nUse\n```sql\nSELECT 1\n```\nalways.\n````", "Use\n```sql\nSELECT 1\n```\nalways."),
        ("```\nUse\n```sql\nSELECT 1\n```\nalways.\n```", "Use\n```sql\nSELECT 1\n```\nalways."),
        ("New text.", None),
        ("```\n\n```", None),
        ("```\nnever closed", None),
        ("", None),
    ],
)
def test_the_new_text_stands_between_the_first_and_the_last_fence(answer: str, text: str | None) -> None:
    assert new_text(answer) == text


def test_a_text_with_fences_is_shown_between_longer_ones_and_comes_back() -> None:
    text = "Use\n```\nSELECT 1\n```"
    assert fenced(text).startswith("````\n")
    assert new_text(fenced(text)) == text


def test_a_request_has_the_text_the_rollouts_and_what_was_tried_and_no_more_than_the_latest() -> None:
    tried = [TriedText(text=f"text {number}", wins=number, losses=0, ties=4) for number in range(8)]
    prompt = reflection.reflection_prompt("system", "Answer {question}.", "ROLLOUTS", tried)
    assert "its text `system`" in prompt
    assert "```\nAnswer {question}.\n```" in prompt
    assert "ROLLOUTS" in prompt
    assert "2 earlier ones are left out." in prompt
    assert "text 1\n" not in prompt
    assert "Better on 7 tasks, worse on 0, equal on 4:\n```\ntext 7\n```" in prompt


@pytest.mark.parametrize("count", [1, 4, 40])
def test_rollouts_are_bounded_and_say_what_is_cut(count: int) -> None:
    text = rollouts_text([trace(steps="x" * 100_000, feedback="y" * 100_000)] * count)
    assert len(text) <= reflection.MAX_ROLLOUTS_CHARACTERS + 100 * count
    assert "characters cut]" in text


def test_a_line_that_is_almost_a_fence_is_read_in_linear_time() -> None:
    """Twice the length took four times as long: a megabyte of spaces held the process for hours."""
    assert new_text("```" + " " * 1_000_000 + "!\n```\na\n```") == "a"
