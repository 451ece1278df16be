"""Why a prompt does not continue: one thing is edited in a recorded conversation, and the plan must name it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from conversations import TOOLS, Talk
from toy_templates import HERMES, THINKING

from agentlightning.rendering.conversation import Conversation
from agentlightning.rendering.graph import RequestView
from agentlightning.rendering.renderer import Renderer

Message = dict[str, Any]
Edit = Callable[[list[Message]], list[Message]]


@pytest.fixture(scope="module")
def hermes(make_renderer: Callable[..., Renderer]) -> Renderer:
    return make_renderer(HERMES)


@pytest.fixture
def chatml(renderers: dict[str, Renderer]) -> Renderer:
    return renderers["chatml"]


def talk(renderer: Renderer, turns: int = 4) -> Talk:
    """system, user, then `turns` answers that call a tool and its results: messages 2, 4, … are answers, 3, 5, … results."""
    result = Talk(renderer, TOOLS, [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}])
    for number in range(turns):
        result.turn(f'thought {number}\n<tool_call>\n{{"name": "f", "arguments": {{"n": {number}}}}}\n</tool_call>')
        result.messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": f"result {number}"})
    return result


def changed(at: int, **fields: Any) -> Edit:
    return lambda messages: [*messages[:at], {**messages[at], **fields}, *messages[at + 1 :]]


def without(start: int, end: int, *instead: Message) -> Edit:
    return lambda messages: [*messages[:start], *instead, *messages[end:]]


def other_call(messages: list[Message]) -> list[Message]:
    result = deepcopy(messages)
    result[4]["tool_calls"][0]["function"]["arguments"] = '{"n": 99}'
    return result


SUMMARY = {"role": "user", "content": "what happened so far: …"}

EDITS: list[tuple[str, Edit, str, str | None, int]] = [
    # what is edited, how, the cause, the call that is still continued, the answers that are context only
    ("an answer's text", changed(4, content="edited"), "assistant_message_edited", "0", 3),
    ("the last answer's text", changed(8, content="edited"), "assistant_message_edited", "2", 1),
    ("a tool call's arguments", other_call, "assistant_message_edited", "0", 3),
    ("a tool call dropped", changed(4, tool_calls=[]), "assistant_message_edited", "0", 3),
    ("reasoning put in", changed(4, reasoning_content="made up"), "assistant_message_edited", "0", 3),
    ("a tool result", changed(5, content="…"), "tool_result_rewritten", "1", 2),
    ("the first tool result", changed(3, content="[old tool result cleared]"), "tool_result_rewritten", "0", 3),
    ("the system message", changed(0, content="it is noon"), "system_or_tools_changed", None, 4),
    ("the system message dropped", without(0, 1), "system_or_tools_changed", None, 4),
    ("a second system message", without(1, 1, {"role": "system", "content": "x"}), "system_or_tools_changed", None, 4),
    ("the question", changed(1, content="another"), "history_edited", None, 4),
    ("a message put in between", without(4, 4, {"role": "user", "content": "hurry"}), "history_edited", "0", 3),
    ("the beginning cut", without(1, 6), "history_cut", None, 2),
    ("the middle cut", without(4, 6), "history_cut", "0", 2),
    ("the middle summed up", without(2, 8, SUMMARY), "history_cut", None, 1),
    ("the beginning summed up", without(1, 6, SUMMARY), "history_cut", None, 2),
    ("all answers summed up", without(2, 10, SUMMARY), "history_cut", None, 0),
]


@pytest.mark.parametrize(
    ("edit", "cause", "parent", "repeated"), [one[1:] for one in EDITS], ids=[one[0] for one in EDITS]
)
def test_the_cause_of_a_fork_is_what_was_edited(
    hermes: Renderer, edit: Edit, cause: str, parent: str | None, repeated: int
) -> None:
    recorded = talk(hermes)
    plan = recorded.conversation.plan(RequestView.of(edit(recorded.messages), TOOLS))
    lost = sum(len(ids) for ids in recorded.sampled[len(recorded.sampled) - repeated :])
    assert (plan.fork_cause, plan.untrained_tokens) == (cause, lost)
    assert (plan.parent.call_id if plan.parent else None) == parent
    if plan.parent is not None:
        whole = recorded.whole[plan.parent.call_id]
        assert plan.prompt_ids[: len(whole)] == whole
    else:
        assert plan.prompt_ids == Conversation(hermes).plan(RequestView.of(edit(recorded.messages), TOOLS)).prompt_ids


def test_context_only_counts_the_sampled_tokens_that_are_repeated_and_not_continued(chatml: Renderer) -> None:
    """By hand: three answers of 2, 3 and 4 tokens. The second is edited: the first is continued, 3 + 4 are context only."""
    recorded = Talk(chatml, None, [{"role": "user", "content": "q"}])
    word = chatml.encode("a")
    for number in range(3):
        recorded.turn(word * (number + 1))
        recorded.messages.append({"role": "user", "content": f"q{number}"})
    assert [len(ids) for ids in recorded.sampled] == [2, 3, 4]
    edited = changed(3, content="b")(recorded.messages)
    plan = recorded.conversation.plan(RequestView.of(edited, None))
    assert (plan.untrained_tokens, plan.parent and plan.parent.call_id) == (7, "0")
    plan = recorded.conversation.plan(
        RequestView.of(without(3, 5)(edited), None)
    )  # what is left out is not in the context, either
    assert (plan.fork_cause, plan.untrained_tokens) == ("history_cut", 4)


def test_a_fork_is_continued_from_then_on(hermes: Renderer) -> None:
    recorded = talk(hermes)
    recorded.messages = changed(5, content="…")(recorded.messages)
    fork = recorded.turn("so it is")
    recorded.messages.append({"role": "user", "content": "and?"})
    after = recorded.turn("yes")
    assert (fork.fork_cause, after.fork_cause, after.untrained_tokens) == ("tool_result_rewritten", None, 0)
    assert after.parent is not None
    assert after.parent.call_id == "4"


def test_dropped_reasoning_is_no_edit_and_is_filled_back(make_renderer: Callable[..., Renderer]) -> None:
    recorded = Talk(make_renderer(THINKING), None, [{"role": "user", "content": "q"}])
    recorded.turn("<think>\nhm\n</think>\n\nyes")
    answer = recorded.messages[1]
    assert answer["reasoning_content"] == "hm"
    result = {"role": "tool", "content": "ok", "tool_call_id": "c"}
    bare = [recorded.messages[0], {"role": "assistant", "content": answer["content"]}, result]
    plan = recorded.conversation.plan(RequestView.of(bare, None))
    assert (plan.fork_cause, plan.prompt_ids[: len(recorded.whole["0"])]) == (None, recorded.whole["0"])
    edited = [recorded.messages[0], {**answer, "reasoning_content": "aha"}, result]
    assert recorded.conversation.plan(RequestView.of(edited, None)).fork_cause == "assistant_message_edited"
    spaced = [recorded.messages[0], {**answer, "reasoning_content": "\nhm\n"}, result]
    assert recorded.conversation.plan(RequestView.of(spaced, None)).fork_cause is None


def test_a_template_that_drops_old_reasoning_leaves_the_whole_path_as_context(
    make_renderer: Callable[..., Renderer],
) -> None:
    recorded = Talk(make_renderer(THINKING), None, [{"role": "user", "content": "q"}])
    recorded.turn("<think>\nhm\n</think>\n\nyes")
    recorded.messages.append({"role": "tool", "content": "ok", "tool_call_id": "c"})
    recorded.turn("<think>\naha\n</think>\n\nno")
    recorded.messages.append({"role": "user", "content": "and?"})
    plan = recorded.turn("well")
    assert (plan.fork_cause, plan.parent) == ("template_rewrites_history", None)
    assert plan.untrained_tokens == len(recorded.sampled[0]) + len(recorded.sampled[1])


def test_sub_agents_on_one_key_are_first_turns_and_no_forks(hermes: Renderer) -> None:
    main = talk(hermes, 2)
    for name in "ab":
        worker = Talk(
            hermes,
            TOOLS,
            [{"role": "system", "content": "s"}, {"role": "user", "content": f"task {name}"}],
            main.conversation,
            name,
        )
        first = worker.turn("done")
        assert (first.fork_cause, first.parent) == (None, None)
        worker.messages.append({"role": "user", "content": "sure?"})
        assert worker.turn("yes").fork_cause is None
    assert main.turn("go on").fork_cause is None


def test_answers_of_another_branch_in_a_history_are_no_fork_of_it(hermes: Renderer) -> None:
    """The main agent puts what its sub-agent said into its own history: that was never sampled there."""
    main = talk(hermes, 1)
    worker = Talk(hermes, TOOLS, [{"role": "user", "content": "task"}], main.conversation, "w")
    worker.turn("the sub-agent's report")
    main.messages += [
        {"role": "user", "content": "report!"},
        worker.messages[-1],
        {"role": "user", "content": "and now?"},
    ]
    plan = main.turn("ok")
    assert (plan.fork_cause, plan.parent and plan.parent.call_id, plan.untrained_tokens) == (None, "0", 0)


def test_an_edited_one_of_several_samples_forks(chatml: Renderer) -> None:
    conversation = Conversation(chatml)
    question = [{"role": "user", "content": "q"}]
    plan = conversation.plan(RequestView.of(question, None))
    for index, text in enumerate(("one", "two", "three")):
        conversation.record(
            plan, f"a.{index}" if index else "a", chatml.encode(text), {"role": "assistant", "content": text}
        )
    for index, text in enumerate(("one", "two", "three")):
        chosen = conversation.plan(RequestView.of([*question, {"role": "assistant", "content": text}, *question], None))
        assert chosen.fork_cause is None
        assert chosen.parent is not None
        assert chosen.parent.sampled_ids.tolist() == chatml.encode(text)
        assert chosen.parent.call_id == (f"a.{index}" if index else "a")
    merged = conversation.plan(
        RequestView.of([*question, {"role": "assistant", "content": "one two"}, *question], None)
    )
    assert merged.fork_cause == "assistant_message_edited"
