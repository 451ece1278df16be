"""Grammars over a real vLLM: what it samples, its log-probabilities after the mask, and the learner's, the same."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from vllm_house import VllmHouse, VllmServer, open_house, prompts

from agentlightning.engines.local.learner import Learner
from agentlightning.records import Call
from agentlightning.training_types import TrainingSequence
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


@pytest.fixture(params=["generate", "completions"])
async def masked_house(masked_server: VllmServer, request: pytest.FixtureRequest) -> AsyncIterator[VllmHouse]:
    async with open_house(masked_server, request.param, None) as house:
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


def row(call: Call, prompt: list[int]) -> TrainingSequence:
    size = len(call.sampled_ids)
    return TrainingSequence(
        rollout_id=call.rollout_id,
        tokens=[*prompt, *call.sampled_ids],
        mask=[False] * len(prompt) + [True] * size,
        logprobs=[0.0] * len(prompt) + call.logprobs,
        advantages=[0.0] * len(prompt) + [1.0] * size,
        weights=[0.0] * len(prompt) + [1.0] * size,
        segments=[(len(prompt), len(prompt) + size)],
        decodings=[call.decoding],
    )
