"""Calls beside the task: titles, summaries for a side bar, probes; and calls that look like them and are the work itself."""

from __future__ import annotations

from typing import Any

import pytest

import build
from agentlightning.adapters.side_calls import side_calls
from agentlightning.protocols.system_prompts import prompt_name
from agentlightning.records import Call

TOOL = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
MAIN = "You are a coding agent."
TASK = "Fix the parser so that it accepts empty files."


def call(id: str, system: str | None, user: str, said: str, at: int, **fields: Any) -> Call:
    """A root call that takes from `at` to `at` + 1."""
    prompt = [] if system is None else [{"role": "system", "content": system}]
    return build.call(
        id=id,
        messages=[*prompt, {"role": "user", "content": user}],
        completion={"role": "assistant", "content": said},
        **{"started_ns": at, "finished_ns": at + 1, "agent": system and prompt_name(system), **fields},
    )


def work(*before: Call, after: int = 9) -> list[Call]:
    """Two calls with tools, the second after time `after`, and what came before it."""
    first = call("work", MAIN, TASK, "", 1, tools=TOOL)
    result = [{"role": "tool", "content": "def parse(): ..."}]
    second = build.call(id="more", parent_id="work", messages=result, started_ns=after, finished_ns=after + 1)
    return [first, *before, second]


TITLE = "You write titles for conversations: at most five words."

BESIDE: Any = {
    "a title by a prompt of its own": (call("x", TITLE, TASK, "Empty files", 2), "title"),
    "a title after the work": (call("x", TITLE, TASK, "Empty files", 20), "title"),
    "a title that only the user's message asks for": (
        call("x", None, "Generate a concise, 5-word title for this chat: hello", "Empty files", 20), "title",
    ),
    "a title in another language": (call("x", "Du bist ein Titelgeber. Titel bitte.", TASK, "Leere Dateien", 20), "title"),
    "a probe": (call("x", None, "quota", "#", 0), "probe"),
    "a summary for a side bar": (call("x", "Summarize the last step for the status line.", TASK, "Reading.", 2), "summary"),
    "a classifier": (call("x", "Is the message a new topic? Answer yes or no.", TASK, "no", 2), "title"),
    "something else that nothing reads": (call("x", "Say whether it rains.", TASK, "No.", 2), "side call"),
}  # fmt: skip


@pytest.mark.parametrize("case", BESIDE)
def test_a_call_beside_the_task_is_found_by_its_shape(case: str) -> None:
    one, kind = BESIDE[case]
    calls = sorted(work(one), key=lambda each: each.finished_ns)
    assert side_calls(calls) == {"x": kind}


PLAN = "First read the grammar of the parser.\nThen change the rule for empty files."
FOUND = [{"role": "user", "content": "Do: Then change the rule for empty files."}]

THE_WORK: Any = {
    "the same system prompt": work(call("x", MAIN, "Give a title", "Title", 2)),
    "tools": work(call("x", TITLE, TASK, "Empty files", 2, tools=TOOL)),
    "a name that the request gives": work(call("x", TITLE, TASK, "Empty files", 2, agent="namer")),
    "a conversation": work(
        call("x", "You are a critic.", TASK, "Why so?", 2),
        build.call(id="y", parent_id="x", messages=[{"role": "user", "content": "So."}], started_ns=4, finished_ns=5),
    ),
    "a plan whose steps a later prompt has": [
        call("x", "You plan.", TASK, PLAN, 0),
        *work(),
        build.call(id="step", messages=FOUND, tools=TOOL, started_ns=12, finished_ns=13),
    ],
    "a plan in JSON": [
        call("x", "You plan.", TASK, '{"steps": ["Then change the rule for empty files."]}', 0),
        *work(),
        build.call(id="step", messages=FOUND, tools=TOOL, started_ns=12, finished_ns=13),
    ],
    "a summary from which the agent goes on": [
        *work(),
        call("x", "Summarize the conversation.", "…", "The parser now accepts empty files; tests are left.", 20),
        call("on", MAIN, "So far: The parser now accepts empty files; tests are left.", "", 30, tools=TOOL),
    ],
    "the program's answer": [*work(), call("x", "You answer the user.", TASK, "It accepts them now.", 20)],
    "an answer about a title": [
        *work(),
        call("x", "You answer the user.", "What is the title of the book?", "Dune", 20),
    ],
    "tools of another policy alone": work(call("x", TITLE, TASK, "Empty files", 2, policy="small")),
    "tools of an external model alone": [
        call("x", TITLE, TASK, "Empty files", 2),
        call("y", MAIN, TASK, "", 4, policy="", tools=TOOL),
    ],
    "no call with tools": [call("x", TITLE, TASK, "Empty files", 2), call("y", MAIN, TASK, "Done.", 4)],
}


@pytest.mark.parametrize("case", THE_WORK)
def test_a_call_that_is_the_work_itself_is_not_taken_for_one(case: str) -> None:
    assert side_calls(THE_WORK[case]) == {}


def test_a_title_of_words_that_the_task_has_is_one_though_later_prompts_repeat_the_task() -> None:
    title = call("x", TITLE, TASK, "Fix the parser so that it accepts empty files", 0)
    again = call("again", MAIN, TASK, "", 20, tools=TOOL)
    assert side_calls([title, *work(), again]) == {"x": "title"}
