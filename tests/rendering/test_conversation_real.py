"""Conversations from real traces through the chat templates of real model families: exact, or forked for the right cause.

The templates alone decide here; what the families' own renderers add is in test_families.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_templates import (
    DATA,
    ENDS,
    THINKING,
    Message,
    Replay,
    Talk,
    TemplateAlone,
    fitting,
    renderer_for,
    talks,
    traces,
)

from agentlightning.rendering.graph import RequestView
from agentlightning.rendering.renderer import Renderer, RenderError

FEW = 24
"""Traces of each template that quick tests replay."""

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="AGL_DATA has no traces")


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ENDS)
def test_appended_histories_are_exact_unless_the_template_rewrites_thinking(family: str, renderer_of: Maker) -> None:
    replay_all(family, renderer_of(family), traces()[:: len(traces()) // FEW])


@pytest.mark.parametrize("family", ENDS)
@settings(max_examples=15, deadline=None)
@given(talk=talks(), seed=st.integers(0, 99))
def test_random_histories_are_exact_unless_the_template_rewrites_thinking(
    family: str, renderer_of: Maker, talk: Talk, seed: int
) -> None:
    replay(family, renderer_of(family), talk, random.Random(seed))


@pytest.mark.parametrize("family", ENDS)
def test_what_was_edited_in_a_real_conversation_is_named(family: str, renderer_of: Maker) -> None:
    edit_all(family, renderer_of(family), traces()[1 :: len(traces()) // FEW])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("family", ENDS)
def test_all_traces_are_exact_and_every_edit_of_them_is_named(family: str, renderer_of: Maker) -> None:
    replay_all(family, renderer_of(family), traces())
    edit_all(family, renderer_of(family), traces())


# --- what they do -----------------------------------------------------------------------------------------------------


def replay_all(family: str, renderer: Renderer, talks: list[Talk]) -> None:
    continued = sum(replay(family, renderer, talk, random.Random(number)) for number, talk in enumerate(talks))
    assert continued or family == "deepseekv3"  # its prompts open thinking and its histories never hold any


def replay(family: str, renderer: Renderer, talk: Talk, rng: random.Random) -> int:
    """Hold the conversation; how many calls continued an earlier one."""
    replayed = Replay(renderer, *fitting(family, *talk), rng)
    replayed.run()
    for at, plan in replayed.plans:
        if plan.fork_cause is None:
            assert (plan.parent is None) == (plan is replayed.plans[0][1])
        else:
            assert plan.fork_cause == "template_rewrites_history"
            assert plan.untrained_tokens > 0
            assert family in THINKING
            assert replayed.thought(at), "nothing was there that the template leaves out"
    return sum(plan.parent is not None for _, plan in replayed.plans)


def edit_all(family: str, renderer: Renderer, talks: list[Talk]) -> None:
    """Each kind of edit in each conversation; thinking is left out, so that templates have nothing to rewrite."""
    named = 0
    for number, (messages, tools) in enumerate(talks):
        rng = random.Random(number)
        plain = [{key: value for key, value in one.items() if key != "reasoning_content"} for one in messages]
        replayed = Replay(renderer, *fitting(family, plain, tools), rng)
        replayed.run()
        for edited, other_tools, cause in edits(replayed.messages, replayed.tools, rng):
            try:
                plan = replayed.conversation.plan(RequestView.of(edited, other_tools))
            except RenderError:
                continue  # some templates want users and assistants by turns
            expected = {cause} | ({"template_rewrites_history"} if family in THINKING else set())
            assert plan.fork_cause in expected, cause
            assert plan.untrained_tokens > 0
            if plan.parent is not None:
                before = replayed.seen[plan.parent.call_id]
                assert plan.prompt_ids[: len(before)] == before
            named += plan.fork_cause == cause
    assert named > 10


def edits(messages: list[Message], tools: list[Message] | None, rng: random.Random) -> Iterator[tuple[Any, Any, str]]:
    """A conversation with one thing changed before its last answer, and what that must be called."""
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    last = answers[-1]
    said = messages[last]["content"] + str(messages[last].get("tool_calls", ""))
    if len(answers) < 2 or repeats(messages) or len(said) < 40:  # less could be a coincidence
        return
    causes = {
        "system": "system_or_tools_changed",
        "user": "history_edited",
        "assistant": "assistant_message_edited",
        "tool": "tool_result_rewritten",
    }
    for role, cause in causes.items():
        places = [at for at in range(last) if messages[at]["role"] == role]
        if places:
            at = rng.choice(places)
            edited = [*messages[:at], {**messages[at], "content": "It was not so."}, *messages[at + 1 :]]
            yield edited, tools, cause
    called = [at for at in answers if messages[at].get("tool_calls")]
    if called:
        at = rng.choice(called)
        calls = json.loads(json.dumps(messages[at]["tool_calls"]))
        calls[-1]["function"]["arguments"] = '{"other": 1}'
        yield [*messages[:at], {**messages[at], "tool_calls": calls}, *messages[at + 1 :]], tools, causes["assistant"]
    if tools:
        other = {"name": "other", "description": "d", "parameters": tools[0]["function"]["parameters"]}
        yield messages, [*tools, {"type": "function", "function": other}], "system_or_tools_changed"
    start = rng.choice(answers[:-1])
    end = next(at for at in answers if at > start)
    yield [*messages[:start], *messages[end:]], tools, "history_cut"
    first = next(at for at, message in enumerate(messages) if message["role"] != "system")
    if end - first > 1:
        summary = {"role": "user", "content": "What happened so far, in short."}
        yield [*messages[:first], summary, *messages[end:]], tools, "history_cut"


def repeats(messages: list[Message]) -> bool:
    """Whether an answer or a question comes twice, so that what was changed can be seen in two ways."""
    said = [json.dumps({key: message.get(key) for key in ("role", "content", "tool_calls")}) for message in messages]
    return len(set(said)) < len(said)


# --- renderers --------------------------------------------------------------------------------------------------------

Maker = Callable[[str], Renderer]


@pytest.fixture(scope="module")
def renderer_of(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """renderer_of(family): of its template."""

    @cache
    def make(family: str) -> Renderer:
        return renderer_for(family, tmp_path_factory.mktemp(family), TemplateAlone)

    return make
