"""Grammars and images over a real vLLM: what it samples, its log-probabilities, and the learner's, the same."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tiny_llava import picture
from vllm_house import VllmHouse, VllmServer, open_house, prompts

from agentlightning.engines.local.learner import Learner
from agentlightning.records import Call
from agentlightning.rendering.images import image_hash
from agentlightning.testing.engine_contract import sequence
from agentlightning.training_types import ImageInput, TrainingSequence
from build import learner_setup

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.long]

SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F", "K"]}, "n": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["unit", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
ASKED: dict[str, dict[str, Any]] = {
    "schema": {"response_format": FORMAT},
    "one answer": {"extra_body": {"structured_outputs": {"choice": ["yes"]}}},  # and the one end of several
    "required call": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "schema and penalties": {"response_format": FORMAT, "presence_penalty": 0.4, "logit_bias": {"40": 2}},
    "allowed tokens": {"extra_body": {"allowed_token_ids": [2, *range(38, 60)], "min_tokens": 8}, "max_tokens": 12},
    "cuts": {"extra_body": {"top_k": 12, "min_p": 0.02}, "max_tokens": 12},
}


@pytest.fixture
async def masked_house(masked_server: VllmServer) -> AsyncIterator[VllmHouse]:
    async with open_house(masked_server, None) as house:
        yield house


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
async def test_the_learner_finds_the_log_probabilities_that_vllm_returned(
    masked_house: VllmHouse, asked: dict[str, Any]
) -> None:
    claim = await masked_house.claim()
    client = masked_house.openai(claim).chat.completions
    messages: list[Any] = [{"role": "user", "content": "what is the weather?"}]
    for _ in range(3):
        reply = await client.create(model="policy", messages=messages, **{"max_tokens": 60, **asked})
        message = reply.choices[0].message
        if asked.get("tools"):
            assert json.loads(message.tool_calls[0].function.arguments)["unit"] in "CFK"  # type: ignore[index,union-attr]
        elif asked.get("response_format"):
            assert json.loads(message.content or "")["unit"] in "CFK"
    calls = await masked_house.calls(claim)
    full = prompts(calls)
    learner = Learner(masked_house.server.models[0], learner_setup())
    for call, found in zip(calls, learner.logprobs([row(call, full[call.id]) for call in calls]), strict=True):
        assert found[len(full[call.id]) :] == pytest.approx(call.logprobs, abs=1e-4)
    assert all(call.decoding.get("grammar") or call.decoding.get("logits") for call in calls)


def row(call: Call, prompt: list[int], **fields: Any) -> TrainingSequence:
    tokens = [*prompt, *call.sampled_ids]
    return sequence(tokens, [(len(prompt), len(tokens))], decodings=[call.decoding], **fields)


async def test_a_conversation_with_pictures_is_exact_and_the_learner_agrees(seeing_server: VllmServer) -> None:
    files = {image_hash(data): data for data in map(picture, (0, 90, 250))}
    async with open_house(seeing_server, None, images=True) as house:
        claim = await house.claim()
        client = house.openai(claim).chat.completions
        messages: list[Any] = [{"role": "user", "content": "look"}]
        for data in files.values():
            reply = await client.create(model="policy", messages=messages, max_tokens=4)
            url = "data:image/png;base64," + base64.b64encode(data).decode()
            parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it ?"}]
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}]
            messages += [{"role": "user", "content": parts}]
        await client.create(model="policy", messages=messages, max_tokens=4)
        calls = await house.calls(claim)
    assert [call.continuation for call in calls] == ["first_turn", *["continued"] * 3]
    full, learner = prompts(calls), Learner(seeing_server.models[0], learner_setup())
    images: list[ImageInput] = []
    for call in calls:
        prompt, before = full[call.id], len(full[call.id]) - len(call.suffix_ids)
        images += [
            ImageInput(hash=one.hash, start=before + one.start, end=before + one.end, data=files[one.hash])
            for one in call.images
        ]
        [found] = learner.logprobs([row(call, prompt, images=list(images))])
        assert found[len(prompt) :] == pytest.approx(call.logprobs, abs=1e-4)
    assert [image.hash for image in images] == list(files)
