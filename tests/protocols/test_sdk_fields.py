"""Every field that the SDKs document is honoured, accepted without effect, collected or refused."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types.beta.message_create_params import MessageCreateParamsBase as BetaFields
from anthropic.types.message_create_params import MessageCreateParamsStreaming as MessagesFields
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as ResponsesFields
from openai.types.shared_params import Reasoning

from agentlightning.protocols import messages, responses
from agentlightning.protocols.base import CompletionRequest

WIRES: dict[Any, dict[str, Any]] = {
    messages: {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    responses: {"model": "m", "input": "hi"},
}
DOCUMENTED = {
    messages: MessagesFields.__annotations__.keys() | BetaFields.__annotations__.keys(),
    responses: ResponsesFields.__annotations__.keys(),
}
HONOURED = {
    messages: {
        "model", "max_tokens", "messages", "system", "stop_sequences", "stream", "temperature", "top_p", "tools", "thread",
        "context_management", "output_config", "top_k", "output_format", "tool_choice",
        "betas", "user_profile_id", "workspace_id",  # sent as headers
    },
    responses: {
        "input", "instructions", "max_output_tokens", "model", "parallel_tool_calls", "previous_response_id", "truncation",
        "reasoning", "stream", "temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p",
    },
}  # fmt: skip
NO_EFFECT: dict[Any, dict[str, Any]] = {
    messages: {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "inference_geo": "eu",
        "cache_control": {"type": "ephemeral"},
        "diagnostics": {"previous_message_id": "msg_1"},
        "speed": "fast",
        "thinking": {"type": "disabled"},
        "billing_policy": {"type": "billing_policy"},
        "fallbacks": "default",
        "fallback_credit_token": "t",
    },
    responses: {
        "access_programs": {"cyber": "standard"},
        "background_options": {"completion_window": "soonest"},
        "image": {"context_compression": "auto"},
        "include": ["code_interpreter_call.outputs"],
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "explicit"},
        "prompt_cache_retention": "24h",
        "safety_identifier": "s",
        "service_tier": "auto",
        "store": False,
        "stream_options": {"include_obfuscation": False},
        "user": "u",
    },
}
COLLECTED: dict[Any, dict[str, Any]] = {
    messages: {"mcp_servers": [{"type": "url"}], "compaction": {"type": "enabled"}},
    responses: {"moderation": {"model": "o"}, "context_management": [{"type": "compaction"}]},
}
REFUSED: dict[Any, dict[str, Any]] = {
    messages: {"container": "c"},
    responses: {"background": True, "conversation": "conv_1", "prompt": {"id": "pmpt_1"}},
}


def parse(wire: Any, **given: Any) -> CompletionRequest:
    request: CompletionRequest = wire.parse({**WIRES[wire], **given})
    return request


@pytest.mark.parametrize("wire", WIRES)
def test_every_field_that_the_sdk_documents_stands_in_a_table_here(wire: Any) -> None:
    tables = (NO_EFFECT[wire], COLLECTED[wire], REFUSED[wire])
    assert DOCUMENTED[wire] <= HONOURED[wire].union(*tables)
    assert Reasoning.__annotations__.keys() <= {"context", "mode", "effort", "summary", "generate_summary"}


@pytest.mark.parametrize("wire", WIRES)
def test_each_field_does_what_its_table_says(wire: Any) -> None:
    plain = parse(wire)
    for name, value in NO_EFFECT[wire].items():
        given = parse(wire, **{name: value})
        assert (given.unsupported, given.messages, given.logprobs) == ({}, plain.messages, False), name
    for name, value in COLLECTED[wire].items():
        assert parse(wire, **{name: value}).unsupported == {name: value}
    for name, value in REFUSED[wire].items():
        assert list(parse(wire, **{name: value}).refused) == [name]
