"""Names that agents get by their system prompts: short, their own, and the same in each rollout."""

from __future__ import annotations

import pytest

from agentlightning.protocols.system_prompts import is_prompt_name, prompt_name, prompt_text

ALIKE = {
    "dates": ("You plan. Today is 2026-11-29.", "You plan. Today is 2027-01-02."),
    "dates in words": ("You plan. Today is Sat, Nov 29, 2026.", "You plan. Today is Sunday, 3 May 2027."),
    "times": ("You plan. It is 14:03:22 now", "You plan. It is 09:15:01 now"),
    "folders": ("You plan. Working directory: /tmp/a1/b", "You plan. Working directory: /home/c"),
    "hashes": ("You plan. Commit 1a2b3c4d", "You plan. Commit 99aa88bb"),
    "addresses": ("You plan. See http://127.0.0.1:4321/x", "You plan. See http://10.0.0.7:80/"),
    "a folder before a long text": (
        "You plan in /tmp/a. " + "word " * 3000,
        "You plan in /home/somewhere/else. " + "word " * 3000,
    ),
    "parts that are joined otherwise": ("You plan.\n\n# Tone", "You plan.# Tone"),
    "the header of Claude Code": (
        "x-anthropic-billing-header: cc_version=2.1.332.a43; cc_entrypoint=cli; cch=00000;You are Claude Code",
        "x-anthropic-billing-header: cc_version=2.1.332.b12; cc_entrypoint=cli; cch=1f2e3;You are Claude Code",
    ),
}

APART = (
    "You are the planner.", "You are the writer.", "You are player 1.", "You are player 2.", "You are a helpful assistant.",
    "You are a helpful assistant. You plan.", "Du bist der Planer.", "你是一个规划者", "!", "A" * 5000, "A" * 5000 + " plan",
)  # fmt: skip


@pytest.mark.parametrize("case", ALIKE)
def test_what_changes_with_the_day_and_the_task_does_not_change_a_name(case: str) -> None:
    one, other = map(prompt_name, ALIKE[case])
    assert one is not None
    assert one == other


def test_prompts_that_differ_have_names_of_their_own_which_are_short() -> None:
    names = [prompt_name(text) or "" for text in APART]
    assert len(set(names)) == len(APART)
    assert all(is_prompt_name(name) and len(name) <= 40 for name in names), names
    assert names[0].startswith("planner~")
    assert names[3].startswith("player~")


def test_a_conversation_without_a_system_prompt_gives_no_name() -> None:
    assert prompt_name(prompt_text([{"role": "user", "content": "You are the planner."}])) is None
    assert prompt_name("2026-11-29") is None
    assert not is_prompt_name("planner")
    assert not is_prompt_name("planner~xyz")


def test_the_prompt_is_the_system_messages_that_a_conversation_begins_with() -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "developer", "content": "Plan."},
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "Later."},
    ]
    assert prompt_text(messages) == "Be brief.\nPlan."
