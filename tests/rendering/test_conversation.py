"""The promise of the conversation graph: the prompt of turn t+1 begins with the exact ids of turn t."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from conversations import parsed
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_templates import HEADED

from agentlightning.rendering.conversation import Conversation, PromptPlan
from agentlightning.rendering.graph import RequestView
from agentlightning.rendering.renderer import Renderer

Message = dict[str, Any]

NAMES = ["plain", "chatml", "llama", "hermes"]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=20)
words = st.sampled_from(["the answer is 42", " sunny", "Oslo\n", "  ", "héllo 日本 😀", ""])
values = st.one_of(texts, st.integers(-99, 99), st.booleans(), st.none(), st.lists(st.integers(0, 9), max_size=2))
arguments = st.dictionaries(texts, values, max_size=3)
turns = st.lists(st.tuples(st.one_of(texts, words), st.booleans(), texts), min_size=1, max_size=5)


def sample(renderer: Renderer, text: str, ended: bool) -> list[int]:
    return renderer.encode(text) + ([next(iter(renderer.end_ids))] if ended else [])


def record(conversation: Conversation, plan: PromptPlan, call_id: str, ids: list[int]) -> Message:
    """What the gateway does with an answer, and what the agent then sends back."""
    renderer = conversation.renderer
    body, _ = renderer.split_end(ids)
    completion = parsed(renderer.parser, renderer.decode(body), plan.prompt_text)
    message: Message = {"role": "assistant", "content": completion.content}
    if completion.reasoning is not None:
        message["reasoning_content"] = completion.reasoning
    if completion.tool_calls:
        message["tool_calls"] = [
            {"id": f"c{index}", "type": "function", "function": {"name": name, "arguments": text}}
            for index, (name, text) in enumerate(completion.tool_calls)
        ]
    conversation.record(plan, call_id, ids, message)
    return message


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(turns=turns, system=st.one_of(st.none(), texts))
def test_every_prompt_begins_with_the_ids_before_it(
    renderers: dict[str, Renderer], name: str, turns: list[tuple[str, bool, str]], system: str | None
) -> None:
    renderer = renderers[name]
    conversation = Conversation(renderer)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "begin"})
    before: list[int] = []
    for number, (text, ended, answer) in enumerate(turns):
        plan = conversation.plan(RequestView.of(messages, None))
        assert plan.fork_cause is None
        assert plan.prompt_ids[: len(before)] == before
        assert bool(number) == (plan.parent is not None)
        ids = sample(renderer, text, ended)
        message = record(conversation, plan, str(number), ids)
        before = plan.prompt_ids + ids
        messages = [*messages, message, {"role": "user", "content": answer}]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(turns=st.lists(st.tuples(st.just("the answer is 42"), st.booleans(), texts), min_size=1, max_size=4))
def test_a_conversation_is_tokenised_as_the_template_would(
    renderers: dict[str, Renderer], name: str, turns: list[tuple[str, bool, str]]
) -> None:
    renderer = renderers[name]
    conversation = Conversation(renderer)
    messages: list[Message] = [{"role": "user", "content": "begin"}]
    for number, (text, ended, answer) in enumerate(turns):
        plan = conversation.plan(RequestView.of(messages, None))
        fresh = Conversation(renderer).plan(RequestView.of(messages, None))
        assert plan.prompt_ids == fresh.prompt_ids
        message = record(conversation, plan, str(number), sample(renderer, text, ended))
        messages = [*messages, message, {"role": "user", "content": answer}]


@settings(max_examples=40, deadline=None)
@given(calls=st.lists(st.tuples(arguments, words, st.booleans(), texts), min_size=1, max_size=4), loose=st.booleans())
def test_prompts_continue_over_tool_calls_however_they_were_written(
    renderers: dict[str, Renderer], calls: list[tuple[Any, str, bool, str]], loose: bool
) -> None:
    renderer = renderers["hermes"]
    conversation = Conversation(renderer)
    messages: list[Message] = [{"role": "user", "content": "begin"}]
    before: list[int] = []
    separators = (" ,", ":  ") if loose else None
    for number, (fields, words_before, ended, answer) in enumerate(calls):
        plan = conversation.plan(RequestView.of(messages, TOOLS))
        assert plan.fork_cause is None
        assert plan.prompt_ids[: len(before)] == before
        body = json.dumps({"name": "f", "arguments": fields}, separators=separators, ensure_ascii=loose)
        ids = sample(renderer, f"{words_before}<tool_call>\n{body}\n</tool_call>", ended)
        message = record(conversation, plan, str(number), ids)
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == fields
        before = plan.prompt_ids + ids
        echoed = {**message, "content": message["content"] or None, "refusal": None, "audio": None}
        tool = {"role": "tool", "tool_call_id": "c0", "content": [{"type": "text", "text": answer}]}
        messages = [*messages, echoed, tool]


@pytest.fixture
def chatml(renderers: dict[str, Renderer]) -> Renderer:
    return renderers["chatml"]


def conversation_of(renderer: Renderer, *answers: str) -> tuple[Conversation, list[Message]]:
    """A conversation of as many turns; the messages end with the next question."""
    conversation = Conversation(renderer)
    messages: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "q0"}]
    for number, text in enumerate(answers):
        plan = conversation.plan(RequestView.of(messages, None))
        message = record(conversation, plan, str(number), sample(renderer, text, True))
        messages = [*messages, message, {"role": "user", "content": f"q{number + 1}"}]
    return conversation, messages


def test_two_calls_may_continue_the_same_call(chatml: Renderer) -> None:
    conversation, messages = conversation_of(chatml, "one")
    first = conversation.plan(RequestView.of(messages, None))
    record(conversation, first, "left", sample(chatml, "x", True))
    second = conversation.plan(RequestView.of([*messages[:-1], {"role": "user", "content": "other"}], None))
    assert first.parent is second.parent is not None
    assert second.fork_cause is None


def test_equal_answers_of_parallel_calls_are_continued_apart(chatml: Renderer) -> None:
    conversation = Conversation(chatml)
    question: list[Message] = [{"role": "user", "content": "q"}]
    plans = [conversation.plan(RequestView.of(question, None)) for _ in range(2)]
    assert [plan.position for plan in plans] == [0, 1]
    answers = [
        record(conversation, plan, name, sample(chatml, "same", True)) for name, plan in zip("ab", plans, strict=True)
    ]
    parents = []
    for number, answer in enumerate(answers):
        plan = conversation.plan(RequestView.of([*question, answer, {"role": "user", "content": "next"}], None))
        assert plan.parent is not None
        parents.append(plan.parent.call_id)
        record(conversation, plan, f"child{number}", sample(chatml, "z", True))
    assert sorted(parents) == ["a", "b"]


def test_an_end_token_that_opens_the_next_message_is_not_written_twice(make_renderer: Callable[..., Renderer]) -> None:
    renderer = make_renderer(HEADED, "<|user|>")
    conversation, messages = conversation_of(renderer, "one")
    plan = conversation.plan(RequestView.of(messages, None))
    assert (
        renderer.decode(plan.prompt_ids, special=True) == "<|system|>s<|user|>q0<|assistant|>one<|user|>q1<|assistant|>"
    )
    assert plan.fork_cause is None
    messages[-1] = {"role": "system", "content": "t"}
    assert conversation.plan(RequestView.of(messages, None)).fork_cause == "template_rewrites_history"


def test_an_end_token_that_the_template_never_writes_stays(make_renderer: Callable[..., Renderer]) -> None:
    renderer = make_renderer(HEADED, "<|endoftext|>")
    conversation, messages = conversation_of(renderer, "one")
    plan = conversation.plan(RequestView.of(messages, None))
    assert renderer.decode(plan.prompt_ids, special=True).endswith("one<|endoftext|><|user|>q1<|assistant|>")


def test_space_around_an_answer_may_be_trimmed_by_the_agent(chatml: Renderer) -> None:
    conversation, messages = conversation_of(chatml, " one\n")
    messages[2] = {"role": "assistant", "content": "one"}
    plan = conversation.plan(RequestView.of(messages, None))
    assert plan.fork_cause is None
    assert " one\n<|im_end|>" in chatml.decode(plan.prompt_ids, special=True)
