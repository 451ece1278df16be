"""Output that an agent did not ask for is not given, stays in the record, and is continued exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gateway_house import House, path
from toy_model import TEMPLATE, write_tokenizer

from agentlightning.rendering.renderer import Renderer

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
FUNCTION: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

THINKS = TEMPLATE.replace(
    "+ message.content }}",
    "+ ('<think>' + message.reasoning_content + '</think>' if message.reasoning_content else '') + message.content }}",
)


@pytest.fixture
async def thinker(house: House, tmp_path: Path) -> House:
    """The policy's model thinks."""
    house.folder = write_tokenizer(tmp_path / "thinker", THINKS)
    house.renderer = Renderer(house.folder)
    await house.serve_policy()
    house.say("<think>hm</think>It is sunny.", "The answer is 42.")
    return house


OMITTED = {"type": "adaptive", "display": "omitted"}


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}, {"type": "adaptive"}, OMITTED])
async def test_a_message_that_comes_back_without_its_thinking_is_continued_exactly(
    thinker: House, thinking: Any
) -> None:
    claim = await thinker.claim()
    given: dict[str, Any] = {
        "model": "policy",
        "max_tokens": 99,
        **({} if thinking is None else {"thinking": thinking}),
    }
    history: list[Any] = [{"role": "user", "content": "Hi"}]
    for _ in range(2):
        reply = await thinker.http().post(f"{path(claim)}/v1/messages", json={**given, "messages": history})
        assert reply.status_code == 200, reply.text
        kinds = [block["type"] for block in reply.json()["content"]]
        asked = thinking in ({"type": "adaptive"}, OMITTED) and len(history) == 1
        assert kinds == (["thinking", "text"] if asked else ["text"])
        kept = [block for block in reply.json()["content"] if block["type"] == "text" or thinking == OMITTED]
        history += [{"role": "assistant", "content": kept}, {"role": "user", "content": "?"}]
    one, two = await thinker.store.calls([claim.rollout.id])
    assert one.completion["reasoning_content"] == "hm"
    assert (two.parent_id, two.fork_cause) == (one.id, None)


@pytest.mark.parametrize("asked", ["message.output_text.logprobs", "reasoning.encrypted_content"])
async def test_a_stored_response_has_what_was_asked_for_when_it_was_made(thinker: House, asked: Any) -> None:
    thinker.say("<think>hm</think>It is sunny.")
    client = thinker.openai(await thinker.claim())
    with_it = await client.responses.create(model="policy", input="Hi", include=[asked])
    without = await client.responses.create(model="policy", input="Hi")
    for made in (with_it, without):
        assert (await client.responses.retrieve(made.id)).to_dict() == made.to_dict()
    given, missing = ([item.to_dict() | {"id": ""} for item in one.output] for one in (with_it, without))
    assert given != missing


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_call_that_was_not_wanted_is_no_text(house: House, stream: bool) -> None:
    claim = await house.claim()
    house.say("It is sunny. " + CALL, "The answer is 42.")
    client = house.openai(claim)
    given: Any = {"model": "policy", "tools": [FUNCTION], "tool_choice": "none"}
    history: list[Any] = [{"role": "user", "content": "Hi"}]
    if stream:
        async with client.chat.completions.stream(**given, messages=history) as events:
            message: Any = (await events.get_final_completion()).choices[0].message
    else:
        message = (await client.chat.completions.create(**given, messages=history)).choices[0].message
    assert ((message.content or "").strip(), message.tool_calls or None) == ("It is sunny.", None)
    history += [{"role": "assistant", "content": message.content}, {"role": "user", "content": "?"}]
    await client.chat.completions.create(**given, messages=history)
    one, two = await house.store.calls([claim.rollout.id])
    assert (two.parent_id, two.fork_cause) == (one.id, None)
