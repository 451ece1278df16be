"""An agent that begins the assistant's message gets what comes after it; the record and the next turn have both as one."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic
from gateway_house import House, path

from agentlightning.adapters.conversations import conversations
from agentlightning.records import Claim

ASKED: Any = {"role": "user", "content": "What is the weather?"}
BEGUN: Any = {"role": "assistant", "content": "It is"}
WHOLE: Any = {"role": "assistant", "content": "It is sunny."}
AGAIN: Any = {"role": "user", "content": "Sure?"}
CONTINUED: Any = {"continue_final_message": True, "add_generation_prompt": False}
TOOL: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_continues_the_final_message(house: House, stream: bool) -> None:
    claim = await house.claim()
    client = house.openai(claim)
    house.say(" sunny.", "Yes.")
    told: Any = await client.chat.completions.create(
        model="policy", messages=[ASKED, BEGUN], stream=stream, extra_body=CONTINUED
    )
    chunks = [chunk async for chunk in told] if stream else []
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks) or told.choices[0].message.content
    assert text == " sunny."
    await client.chat.completions.create(model="policy", messages=[ASKED, WHOLE, AGAIN])
    first, second = await house.store.calls([claim.rollout.id])
    prompt = house.renderer.decode(first.suffix_ids, special=True)
    assert prompt == "<|im_start|>user\nWhat is the weather?<|im_end|>\n<|im_start|>assistant\nIt is"
    assert (first.completion["content"], first.messages[-1]) == (" sunny.", {**BEGUN, "prefill": True})
    assert (second.parent_id, second.fork_cause) == (first.id, None)
    assert house.engine.requests[1]["token_ids"] == first.suffix_ids + first.sampled_ids + second.suffix_ids
    [row] = conversations([first, second])
    assert [message["content"] for message in row["messages"]] == [
        "What is the weather?", "It is sunny.", "Sure?", "Yes."
    ]  # fmt: skip


async def test_an_echo_begins_with_the_assistants_last_message_and_continues_the_call(house: House) -> None:
    asked = {"model": "policy", "messages": [ASKED, BEGUN], "extra_body": {**CONTINUED, "echo": True}}
    for stream in (False, True):
        claim = await house.claim(group=f"{stream}")
        client: Any = house.openai(claim).chat.completions
        house.say(" sunny.", "Yes.")
        told = await client.create(**asked, stream=stream)
        chunks = [chunk async for chunk in told] if stream else []
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks) or told.choices[0].message.content
        assert text == "It is sunny."
        await client.create(model="policy", messages=[ASKED, WHOLE, AGAIN], extra_body={"echo": True})
        first, second = await house.store.calls([claim.rollout.id])
        assert (first.completion["content"], second.completion["content"]) == (" sunny.", "Yes.")
        assert second.parent_id == first.id


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_continue_the_assistants_turn_with_a_tool_call(
    house: House, claim: Claim, claude: AsyncAnthropic, stream: bool
) -> None:
    house.say(CALL, "Sunny.")
    asked: Any = {"model": "policy", "max_tokens": 99, "tools": [TOOL]}
    begun = {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}]}
    if stream:
        async with claude.messages.stream(messages=[ASKED, begun], **asked) as events:
            told = await events.get_final_message()
    else:
        told = await claude.messages.create(messages=[ASKED, begun], **asked)
    assert [block.type for block in told.content] == ["tool_use"]
    use: Any = told.content[0]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    whole = {
        "role": "assistant",
        "content": [*begun["content"], use.model_dump(include={"type", "id", "name", "input"})],
    }
    await claude.messages.create(messages=[ASKED, whole, {"role": "user", "content": [result]}], **asked)
    first, second = await house.store.calls([claim.rollout.id])
    assert (second.parent_id, second.fork_cause) == (first.id, None)
    counted = await claude.messages.count_tokens(model="policy", messages=[ASKED, begun], tools=[TOOL])
    assert counted.input_tokens == first.prompt_tokens


async def test_a_retry_gets_what_came_after_it_and_a_restarted_gateway_goes_on(house: House) -> None:
    claim = await house.claim()
    house.say(" sunny.", "Yes.")
    asked = {"model": "policy", "messages": [ASKED, BEGUN], **CONTINUED}
    url = f"{path(claim)}/v1/chat/completions"
    await house.http().post(url, json=asked)
    again = house.http(house.gateway())
    retried = (await again.post(url, json=asked, headers={"x-stainless-retry-count": "1"})).json()
    assert retried["choices"][0]["message"]["content"] == " sunny."
    await again.post(url, json={"model": "policy", "messages": [ASKED, WHOLE, AGAIN]})
    first, second = await house.store.calls([claim.rollout.id])
    assert (second.parent_id, second.fork_cause) == (first.id, None)


async def test_what_cannot_be_continued_is_named(house: House, claim: Claim, claude: AsyncAnthropic) -> None:
    client = house.openai(claim)
    for messages, more, said in (
        ([ASKED], CONTINUED, "expected the last one to be the assistant's"),
        ([ASKED, {**BEGUN, "content": " "}], CONTINUED, "with text and no tool calls"),
        ([ASKED, BEGUN], {"continue_final_message": True}, "expected add_generation_prompt: false with it"),
        ([ASKED], {"add_generation_prompt": False}, "add_generation_prompt"),
    ):
        with pytest.raises(openai.BadRequestError, match=said):
            await client.chat.completions.create(model="policy", messages=messages, extra_body=more)
    form: Any = {"format": {"type": "json_schema", "schema": {"type": "object", "additionalProperties": False}}}
    with pytest.raises(anthropic.BadRequestError, match="the answer is JSON as a whole"):
        await claude.messages.create(model="policy", max_tokens=9, messages=[ASKED, BEGUN], output_config=form)


async def test_a_choice_is_made_after_the_text(house: House) -> None:
    """As with vLLM: what is sampled has the form that is asked for."""
    claim = await house.claim()
    told = await house.openai(claim).chat.completions.create(
        model="policy",
        messages=[ASKED, BEGUN],
        extra_body={**CONTINUED, "structured_outputs": {"choice": [" sunny", " rainy"]}},
    )
    assert told.choices[0].message.content in (" sunny", " rainy")
