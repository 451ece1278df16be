"""What the graph makes of calls that a store, other gateways, external models and raw prompts bring."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from conversations import TOOLS, Talk, as_call
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_templates import HERMES, PLAIN

from agentlightning.records import Call
from agentlightning.rendering.call_chain import call_chain, chain_messages, is_whole
from agentlightning.rendering.conversation import Conversation, PromptPlan, prompt_hash
from agentlightning.rendering.graph import RequestView
from agentlightning.rendering.renderer import Renderer, RenderError

Message = dict[str, Any]
IMAGE = {"type": "image_url", "image_url": {"url": "data:,1"}}


@pytest.fixture
def chatml(renderers: dict[str, Renderer]) -> Renderer:
    return renderers["chatml"]


@pytest.fixture(scope="module")
def hermes(make_renderer: Callable[..., Renderer]) -> Renderer:
    return make_renderer(HERMES)


def talk(renderer: Renderer, turns: int) -> Talk:
    result = Talk(renderer, TOOLS, [{"role": "user", "content": "q"}])
    for number in range(turns):
        result.turn(f'say\n<tool_call>\n{{"name": "f",  "arguments": {{"n":{number}}}}}\n</tool_call>')
        result.messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": f"result {number}"})
    return result


def same(left: PromptPlan, right: PromptPlan) -> bool:
    return (
        left.prompt_ids,
        left.parent and left.parent.call_id,
        left.fork_cause,
        left.untrained_tokens,
        left.position,
    ) == (
        right.prompt_ids,
        right.parent and right.parent.call_id,
        right.fork_cause,
        right.untrained_tokens,
        right.position,
    )


# --- the store --------------------------------------------------------------------------------------------------------


def test_a_graph_rebuilt_from_the_store_plans_the_same(hermes: Renderer) -> None:
    live = talk(hermes, 4)
    rebuilt = Conversation(hermes, live.calls)
    edited = [*live.messages[:3], {**live.messages[3], "content": "edited"}, *live.messages[4:]]
    for messages, tools in ((live.messages, TOOLS), (edited, TOOLS), (live.messages, None), (live.messages[:1], TOOLS)):
        assert same(
            rebuilt.plan(RequestView.of(messages, tools)), live.conversation.plan(RequestView.of(messages, tools))
        )


def test_calls_may_be_added_again_and_one_by_one(hermes: Renderer) -> None:
    live = talk(hermes, 3)
    conversation = Conversation(hermes)
    for call in live.calls:
        conversation.add([call])
        conversation.add(live.calls[:1])
    expected = Conversation(hermes, live.calls)
    assert conversation.size == expected.size
    assert same(
        conversation.plan(RequestView.of(live.messages[:1], TOOLS)),
        expected.plan(RequestView.of(live.messages[:1], TOOLS)),
    )
    assert same(
        conversation.plan(RequestView.of(live.messages, TOOLS)), expected.plan(RequestView.of(live.messages, TOOLS))
    )


def test_a_call_that_the_store_tells_of_before_it_is_recorded_counts_once(chatml: Renderer) -> None:
    conversation = Conversation(chatml)
    question: list[Message] = [{"role": "user", "content": "q"}]
    plan = conversation.plan(RequestView.of(question, None))
    ids, answer = chatml.encode("a"), {"role": "assistant", "content": "a"}
    conversation.add([as_call(conversation, plan, "x", ids, answer)])
    conversation.record(plan, "x", ids, answer)
    assert conversation.plan(RequestView.of(question, None)).position == 1


def test_further_samples_of_a_request_do_not_move_its_place(chatml: Renderer) -> None:
    conversation = Conversation(chatml)
    question: list[Message] = [{"role": "user", "content": "q"}]
    plan = conversation.plan(RequestView.of(question, None))
    calls = []
    for call_id in ("x", "x.1", "x.2"):
        ids, answer = chatml.encode(call_id), {"role": "assistant", "content": call_id}
        conversation.record(plan, call_id, ids, answer)
        calls.append(as_call(conversation, plan, call_id, ids, answer))
    for graph in (conversation, Conversation(chatml, calls)):
        assert graph.unanswered(plan.request_hash) == ["x"]
        assert graph.plan(RequestView.of(question, None)).position == 1
        follow = graph.plan(RequestView.of([*question, calls[1].completion, *question], None))
        assert follow.parent is not None
        assert follow.parent.call_id == "x.1"
        graph.record(follow, "y", [1], {"role": "assistant", "content": "y"})
        assert graph.unanswered(plan.request_hash) == []


def test_abandoned_calls_and_calls_of_unknown_parents_are_left_out(hermes: Renderer) -> None:
    live = talk(hermes, 2)
    conversation = Conversation(hermes, [replace(live.calls[0], finish_reason="abandoned"), live.calls[1]])
    assert "0" not in conversation
    assert "1" not in conversation
    assert conversation.plan(RequestView.of(live.messages, TOOLS)).parent is None


def test_an_answer_that_no_recorded_call_explains_is_lacking(hermes: Renderer) -> None:
    live = talk(hermes, 3)
    behind = Conversation(hermes, live.calls[:2])
    assert behind.lacks_answer(RequestView.of(live.messages, TOOLS))
    assert not behind.lacks_answer(RequestView.of(live.messages[:4], TOOLS))
    behind.add(live.calls)
    assert not behind.lacks_answer(RequestView.of(live.messages, TOOLS))
    assert not behind.lacks_answer(RequestView.of(live.messages, None))  # other tools: a fork, of known answers
    assert not behind.lacks_answer(RequestView.of([{"role": "user", "content": "q"}], None))


def test_all_messages_of_a_path_are_found_again(hermes: Renderer) -> None:
    live = talk(hermes, 3)
    branch = Talk(hermes, TOOLS, live.messages[:3], live.conversation, "b")
    branch.turn("other")
    by_id = {call.id: call for call in (*live.calls, *branch.calls)}
    assert chain_messages(call_chain(by_id["2"], by_id)) == live.messages[:6]
    assert chain_messages(call_chain(by_id["b0"], by_id)) == branch.messages
    assert is_whole(call_chain(by_id["2"], by_id))
    del by_id["0"]
    assert not is_whole(call_chain(by_id["2"], by_id))


def test_messages_are_stored_once(hermes: Renderer) -> None:
    live = talk(hermes, 5)
    assert [len(call.messages) for call in live.calls] == [1, 1, 1, 1, 1]
    assert [call.messages for call in live.calls[1:]] == [[message] for message in live.messages[2:10:2]]


# --- external models ---------------------------------------------------------------------------------------------------


def external(conversation: Conversation, messages: list[Message], call_id: str, answer: Message) -> Call:
    plan = conversation.plan_external(RequestView.of_external(messages, None))
    conversation.record(plan, call_id, [], answer)
    return as_call(conversation, plan, call_id, [], answer, policy="")


def test_calls_of_external_models_are_stored_by_what_is_new_without_a_renderer() -> None:
    conversation = Conversation(None)
    messages: list[Message] = [{"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE]}]
    calls = []
    for number in range(3):
        calls.append(external(conversation, messages, str(number), {"role": "assistant", "content": f"a{number}"}))
        messages = [*messages, calls[-1].completion, {"type": "item", "without": "a role"}]
    assert [call.parent_id for call in calls] == [None, "0", "1"]
    assert [len(call.messages) for call in calls] == [1, 1, 1]
    assert chain_messages(call_chain(calls[2], {call.id: call for call in calls})) == messages[:-1]
    rebuilt = Conversation(None, calls)
    plan = rebuilt.plan_external(RequestView.of_external(messages, None))
    assert (plan.parent and plan.parent.call_id, plan.known, plan.prompt_ids) == ("2", 6, [])


def test_what_an_external_model_said_is_not_continued_by_the_policy(chatml: Renderer) -> None:
    conversation = Conversation(chatml)
    question: list[Message] = [{"role": "user", "content": "q"}]
    call = external(conversation, question, "judge", {"role": "assistant", "content": "fine"})
    for graph in (conversation, Conversation(chatml, [call])):
        assert graph.unanswered(RequestView.of(question, None).request_hash) == []
        assert graph.unanswered(RequestView.of_external(question, None).request_hash) == ["judge"]
        assert not graph.lacks_answer(RequestView.of([*question, call.completion, *question], None))
        plan = graph.plan(RequestView.of([*question, call.completion, *question], None))
        assert (plan.parent, plan.fork_cause, plan.position) == (None, None, 0)


# --- raw prompts ------------------------------------------------------------------------------------------------------


def complete(
    conversation: Conversation, prompt: str | list[int], call_id: str, ids: list[int]
) -> tuple[PromptPlan, Call]:
    plan = conversation.plan_prompt(prompt)
    assert conversation.renderer is not None
    body, _ = conversation.renderer.split_end(ids)
    answer = {"role": "assistant", "content": conversation.renderer.decode(body)}
    conversation.record(plan, call_id, ids, answer)
    return plan, as_call(conversation, plan, call_id, ids, answer, protocol="completions")


def test_a_prompt_continues_the_longest_text_it_begins_with(chatml: Renderer) -> None:
    conversation = Conversation(chatml)
    letters = [index for letter in "the answer" for index in chatml.encode(letter)]  # not the way the text is encoded
    assert letters != chatml.encode("the answer")
    first, one = complete(conversation, "question: ", "0", letters)
    second, two = complete(conversation, "question: the answer is", "1", [*chatml.encode(" 42"), *chatml.end_ids])
    assert second.prompt_ids == [*first.prompt_ids, *letters, *chatml.encode(" is")]
    assert second.messages == [{"role": "user", "content": " is"}]
    third = conversation.plan_prompt("question: the answer is 42, so")
    answered = [*second.prompt_ids, *chatml.encode(" 42"), *chatml.end_ids]
    assert third.prompt_ids == [*answered, *chatml.encode(", so", after=answered[-1])]
    written = conversation.plan_prompt("question: the answer is 42<|im_end|>, so")
    assert written.prompt_ids == third.prompt_ids
    rebuilt = Conversation(chatml, [one, two])
    again = rebuilt.plan_prompt("question: the answer is 42, so")
    assert again.prompt_ids == third.prompt_ids
    assert again.parent is not None
    assert again.parent.call_id == "1"
    assert rebuilt.unanswered(prompt_hash("question: the answer is")) == ["1"]
    assert rebuilt.unanswered(prompt_hash("question: ")) == []


def test_a_prompt_of_ids_is_used_as_it_is(chatml: Renderer) -> None:
    conversation = Conversation(chatml)
    first, _ = complete(conversation, [30, 31, 32], "0", [40, 41])
    second, _ = complete(conversation, [30, 31, 32, 40, 41, 50], "1", [60])
    assert (first.prompt_ids, second.prompt_ids, second.suffix_ids) == ([30, 31, 32], [30, 31, 32, 40, 41, 50], [50])
    assert second.parent is not None
    assert conversation.plan_prompt([30, 31, 32, 40, 50]).parent is None


@pytest.mark.parametrize("wrong", [-1, 2**31])
def test_ids_that_no_vocabulary_has_are_refused(chatml: Renderer, wrong: int) -> None:
    with pytest.raises(RenderError, match=f"expected token ids from 0 to 2147483647, got {wrong}"):
        Conversation(chatml).plan_prompt([1, wrong])


def test_an_answer_that_the_agent_cut_is_a_fork(chatml: Renderer) -> None:
    conversation = Conversation(chatml)
    ids = chatml.encode(" think\nobserve: it mad")
    complete(conversation, "question:", "0", ids)
    plan = conversation.plan_prompt("question: think\nobserve: 42")
    assert (plan.parent, plan.fork_cause, plan.untrained_tokens) == (None, "assistant_message_edited", len(ids))
    assert plan.prompt_ids == chatml.encode("question: think\nobserve: 42")
    assert conversation.plan_prompt("question:\nanother one").fork_cause is None
    assert conversation.plan_prompt("questions").fork_cause is None


@settings(max_examples=50, deadline=None)
@given(parts=st.lists(st.text("ab é日\n", min_size=1, max_size=6), min_size=2, max_size=9))
def test_prompts_that_only_grow_never_fork(make_renderer: Callable[..., Renderer], parts: list[str]) -> None:
    renderer = make_renderer(PLAIN)
    conversation = Conversation(renderer)
    prompt, before, calls = "", list[int](), list[Call]()
    for number, part in enumerate(parts):
        prompt += part
        plan = conversation.plan_prompt(prompt)
        assert plan.prompt_ids[: len(before)] == before
        assert Conversation(renderer, calls).plan_prompt(prompt).prompt_ids == plan.prompt_ids
        ids = [index for letter in part for index in renderer.encode(letter)]
        answer = {"role": "assistant", "content": renderer.decode(ids)}
        conversation.record(plan, str(number), ids, answer)
        calls.append(as_call(conversation, plan, str(number), ids, answer, protocol="completions"))
        before = plan.prompt_ids + ids
        prompt += renderer.decode(ids)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("turns", "words"), [(40, 4), (10, 800)])
def test_the_size_tells_roughly_how_much_memory_a_conversation_takes(hermes: Renderer, turns: int, words: int) -> None:
    def held() -> Conversation:
        talk = Talk(hermes, None, [{"role": "user", "content": "q"}])
        conversation = talk.conversation
        for number in range(turns):
            plan = conversation.plan(RequestView.of(talk.messages, None))
            ids = hermes.encode(f"it is {number} " * words)
            answer = talk.parsed(plan, ids)
            conversation.record(plan, str(number), ids, answer)
            talk.messages += [answer, {"role": "user", "content": "more " * words}]
        return conversation

    held()  # what the renderer caches is there before we count
    tracemalloc.start()
    conversation = held()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.5 * taken < conversation.size < 2 * taken, (taken, conversation.size)
