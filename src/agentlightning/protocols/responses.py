"""OpenAI Responses: JSON <-> CompletionRequest, Completion, Delta, ApiError; and what external models of this protocol
respond. Pure.

Driven by the gateway, which chooses the protocol by route. Function tools are the policy's only ones. Every documented field
is honoured, refused, collected as unsupported, or accepted because it changes nothing of what is sampled; the tables say
which. Unknown fields are passed over, save those with which other APIs change the response. Responses are stored as the
record: `previous_response_id`, items that refer to it and GET responses/ID find them (gateway/stored_responses.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import orjson
from msgspec import Struct

from agentlightning.protocols import chat, fields, openai_shapes
from agentlightning.protocols.base import Completion, CompletionRequest, EventStream, call_id, short
from agentlightning.protocols.fields import expected
from agentlightning.protocols.images import details, image_part, take_images
from agentlightning.protocols.response_events import ResponseEvents
from agentlightning.protocols.response_items import (
    SEALED_REASONING,
    AssistantTurn,
    ResponseReader,
    is_text,
    output_items,
    plain,
)
from agentlightning.protocols.response_object import echoed, finished
from agentlightning.protocols.tool_folding import FOLDS, flatten
from agentlightning.records import JSON, Call

NAME = "responses"

UNSUPPORTED_PARAMS: Mapping[str, tuple[Any, ...]] = {
    "moderation": (), "max_tokens": (), "max_completion_tokens": (), **fields.CHOICE_PARAMS, **fields.ENGINE_PARAMS,
    **fields.TOKEN_PARAMS,
}  # fmt: skip
"""Fields that ask for another prompt or another distribution than the trained policy's own, or that are of other APIs."""

REASONING: Mapping[str, tuple[Any, ...]] = {"context": ("auto",), "mode": ("standard",)}
"""Fields of `reasoning` that ask for another prompt or more thinking than the policy's own."""

NOT_OURS = ("context_management",)
"""Fields for services that stand before OpenAI's models, without which a model responds all the same."""

REFUSED = (
    "background", "conversation", "prompt", "enable_response_messages", "previous_input_messages", "previous_response",
)  # fmt: skip
"""Fields for such services, and of vLLM, without which the response would be another."""

LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, SEALED_REASONING)
"""Members of `include` that are honoured."""


class ReasoningFields(Struct):
    effort: fields.Text = None
    summary: fields.Text = None
    generate_summary: fields.Text = None


class TextForm(Struct):
    format: fields.Record = None
    verbosity: fields.Text = None


class ResponsesRequest(fields.SampledRequest, kw_only=True):
    instructions: fields.Text = None
    previous_response_id: fields.Text = None
    max_output_tokens: fields.Positive = None
    top_logprobs: fields.Alternatives = None
    parallel_tool_calls: fields.Flag = None
    include: list[Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    reasoning: ReasoningFields | None = None
    text: TextForm | None = None
    metadata: fields.Record = None
    stream_options: fields.Record = None


class ExternalResponsesRequest(fields.ExternalRequest):
    instructions: fields.Text = None
    previous_response_id: fields.Text = None


def parse(data: JSON, trained: bool = True) -> CompletionRequest:
    given = data
    if not trained:
        external = fields.read(ExternalResponsesRequest, data)
        return CompletionRequest(
            model=external.model or "",
            messages=take_images(_instructions(external.instructions) + _messages(data, trained))[0],
            tools=[_tool(tool) for tool in external.tools or () if isinstance(tool, dict)] or None,
            stream=bool(external.stream),
            previous_id=_previous(external.previous_response_id),
        )
    data, folds = flatten(data)
    asked = fields.read(ResponsesRequest, data)
    messages, images = take_images(_instructions(asked.instructions) + _messages(data, trained))
    tools, other_tools = _tools(asked.tools)
    parse_tools, tool_call = chat.tool_choice(data.get("tool_choice"), tools)
    included = [one for one in asked.include or () if one in INCLUDED]  # others only built-in tools could add
    reasoning, form = data.get("reasoning"), asked.text or TextForm()
    return CompletionRequest(
        model=asked.model or "",
        messages=messages,
        images=images,
        tools=tools,
        parse_tools=parse_tools,
        one_tool_call=asked.parallel_tool_calls is False,
        max_tokens=asked.max_output_tokens,
        stop=fields.stops(asked.stop),
        include_stop=bool(asked.include_stop_str_in_output),
        seed=asked.seed,
        logprobs=LOGPROBS in included or bool(asked.top_logprobs),
        top_logprobs=asked.top_logprobs or 0,
        stream=bool(asked.stream),
        forced=fields.forced(data),
        not_applied={
            **fields.not_applied(reasoning, ("effort",), "reasoning"),
            **fields.not_applied(data.get("text"), ("verbosity",), "text"),
            **fields.not_applied(data, fields.NOT_APPLIED),
            **details(images),
        },
        truncates=asked.truncation == "auto",
        refused={
            **fields.services(data, REFUSED),
            **fields.reserved_variables(asked.chat_template_kwargs),
            **fields.engine_refused(data),
        },
        template_kwargs=asked.chat_template_kwargs or {},
        unsupported={
            **fields.unsupported(data, UNSUPPORTED_PARAMS),
            **fields.given(data, NOT_OURS),
            **other_tools,
            **fields.unsupported(reasoning or {}, REASONING, "reasoning"),
        },
        grammar=fields.combined(tool_call, fields.content(form.format, "text.format"), fields.structured_outputs(data)),
        logits=fields.logits(asked),
        previous_id=_previous(asked.previous_response_id),
        echo={**echoed(given), **({"include": included} if included else {}), FOLDS: folds},
    )


def stored_request(call: Call) -> CompletionRequest:
    """The request for a recorded response as it was made."""
    echo = dict(call.request_fields)
    logprobs = LOGPROBS in echo.get("include", ()) or echo.get("top_logprobs", 0) > 0
    return CompletionRequest(model=call.model, messages=[], logprobs=logprobs, echo=echo)


def body(request: CompletionRequest, completion: Completion) -> bytes:
    items = output_items(completion.choices[0], completion.call_id, request.echo)
    return orjson.dumps(finished(completion, request.echo, items))


def stream(request: CompletionRequest, call_id: str, model: str, created_s: int, prompt_tokens: int) -> EventStream:
    return ResponseEvents(request.echo, call_id, model, created_s)


error = openai_shapes.error
reader = ResponseReader


# --- parsing ------------------------------------------------------------------------------------------------------------


def _previous(given: str | None) -> str | None:
    return None if given is None else call_id(given)


def _instructions(given: str | None) -> list[JSON]:
    """The instructions as a message that says what it is: it holds for this request only."""
    return [] if given is None else [{"role": "system", "content": given, "instructions": True}]


class _FunctionCall(Struct):
    name: str
    call_id: str
    arguments: str


class _ReasoningItem(Struct):
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: fields.Text = None


class _CallOutput(Struct):
    call_id: fields.Text = None


class _Compaction(Struct):
    encrypted_content: fields.Text = None


def _messages(data: JSON, trained: bool) -> list[JSON]:
    given = data.get("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    continues = data.get("previous_response_id") is not None
    if given is None and (continues or not trained):
        return []
    if not isinstance(given, list) or not (given or continues):
        raise expected("a text or a list of at least one item", given, "input")
    messages: list[JSON] = []
    turn: AssistantTurn | None = None
    for index, item in enumerate(given):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise expected("an object", item, where)
        if _is_assistants(item, where, trained):
            if turn is None or not turn.takes(item):
                turn = AssistantTurn()
                messages.append(turn.message)
            turn.add(item)
        else:
            turn = None
            messages.append(_message(item, where, trained))
    return messages


def _is_assistants(item: JSON, where: str, trained: bool) -> bool:
    """True where an item is part of an assistant's response; checks its shape."""
    kind = item.get("type", "message")
    if kind == "message" and item.get("role") == "assistant":
        _check_content(item.get("content"), f"{where}.content", trained)
        return True
    if kind == "function_call":
        fields.read(_FunctionCall, item, where)
        return True
    if kind == "reasoning":
        fields.read(_ReasoningItem, item, where)
        for name in ("summary", "content"):
            _check_content(item.get(name) or [], f"{where}.{name}", trained)
        return True
    return False


def _message(item: JSON, where: str, trained: bool) -> JSON:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "system", "developer"):
            raise expected("one of assistant, developer, system, user", role, "role", where)
        return {"role": role, "content": _content(item.get("content"), f"{where}.content", trained)}
    if kind == "function_call_output":
        return {
            "role": "tool",
            "tool_call_id": fields.read(_CallOutput, item, where).call_id or "",
            "content": _content(item.get("output"), f"{where}.output", trained),
        }
    if trained:
        what = (
            "a message, reasoning, function_call, function_call_output, or an item_reference of this attempt, all that the "
            "trained policy reads"
        )
        raise fields.refused(where, f"expected {what}, got {short(item)}")
    return {"role": "assistant" if str(kind).endswith("_call") else "user", "content": [item]}


def _content(content: Any, where: str, trained: bool) -> Any:
    """The content as one text where it is text; else its parts, with images in our form for the trained policy."""
    if not trained or not isinstance(content, list) or all(map(is_text, content)):
        _check_content(content, where, trained)
        return plain(content)
    parts = []
    for index, part in enumerate(content):
        text = {"type": "text", "text": plain([part])} if is_text(part) else image_part(part, f"{where}[{index}]")
        if text is None:
            raise fields.not_text(part, f"{where}[{index}]")
        parts.append(text)
    return parts


def _check_content(content: Any, where: str, trained: bool) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise expected("a text or a list of text parts", content, where)
    for index, part in enumerate(content):
        if trained and not is_text(part):
            raise fields.not_text(part, f"{where}[{index}]")
        if not isinstance(part, dict):
            raise expected("an object", part, f"{where}[{index}]")


def _tools(given: list[Any] | None) -> tuple[list[JSON] | None, JSON]:
    """Functions in the form of Chat Completions, and the tools that are none, by path."""
    functions, others = fields.split_tools(given)
    for where, tool in functions.items():
        fields.read(fields.FunctionTool, tool, where)
    return [_tool(tool) for tool in functions.values()] or None, others


def _tool(tool: JSON) -> JSON:
    """A function in the form of Chat Completions; what only an external model has stays as it is."""
    if tool.get("type") != "function":
        return tool
    kept = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in kept if tool.get(name) is not None}}
