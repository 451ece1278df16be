"""OpenAI Responses: JSON <-> CompletionRequest, Completion, Delta, ApiError; and what external models of this protocol
respond. Pure.

Driven by the gateway, which chooses the protocol by route. Function tools are the policy's only ones. Every documented field
is honoured, refused, collected as unsupported, or accepted because it changes nothing of what is sampled; the tables say
which. Unknown fields are passed over, save those with which other APIs change the response. Responses are stored as the
record: `previous_response_id`, items that refer to it and GET responses/ID find them (gateway/stored_responses.py).
"""

from __future__ import annotations

from typing import Any

import orjson

from agentlightning.protocols import chat, decoding, fields, openai_shapes
from agentlightning.protocols.base import Completion, CompletionRequest, EventStream, call_id, short
from agentlightning.protocols.fields import UnsupportedParam, expected
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

UNSUPPORTED_PARAMS: dict[str, UnsupportedParam] = {
    "moderation": UnsupportedParam(dict),
    "max_tokens": UnsupportedParam(int),
    "max_completion_tokens": UnsupportedParam(int),
    **fields.CHOICE_PARAMS,
    **fields.ENGINE_PARAMS,
    **fields.TOKEN_PARAMS,
}
"""Fields that ask for another prompt or another distribution than the trained policy's own, or that are of other APIs."""

WITHOUT_EFFECT: dict[str, type | tuple[type, ...]] = {
    "access_programs": dict,
    "image": dict,
    "max_tool_calls": int,
    "metadata": dict,
    "prompt_cache_key": str,
    "prompt_cache_options": dict,
    "prompt_cache_retention": str,
    "safety_identifier": str,
    "service_tier": str,
    "store": bool,
    "user": str,
}
"""Fields that change nothing of what is sampled."""

REASONING: dict[str, UnsupportedParam] = {
    "context": UnsupportedParam(str, ("auto",)),
    "mode": UnsupportedParam(str, ("standard",)),
}
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


def parse(data: JSON, trained: bool = True) -> CompletionRequest:
    given = data
    data, folds = flatten(data) if trained else (data, {})
    messages, images = take_images(_instructions(data) + _messages(data, trained))
    if not trained:
        return CompletionRequest(
            model=fields.text(data, "model"),
            messages=messages,
            tools=[_tool(tool) for tool in fields.items(data, "tools") if isinstance(tool, dict)] or None,
            stream=fields.boolean(data, "stream"),
            previous_id=_previous(data),
        )
    fields.check_kinds(data, WITHOUT_EFFECT)
    tools, other_tools = _tools(data)
    parse_tools, tool_call = chat.tool_choice(data, tools)
    included = _included(data)
    top_logprobs = fields.alternatives(data, "top_logprobs") or 0
    _check_stream_options(data)
    return CompletionRequest(
        model=fields.text(data, "model"),
        messages=messages,
        images=images,
        tools=tools,
        parse_tools=parse_tools,
        one_tool_call=not fields.boolean(data, "parallel_tool_calls", default=True),
        max_tokens=fields.whole(data, "max_output_tokens", 1),
        stop=fields.stops(data),
        include_stop=fields.boolean(data, "include_stop_str_in_output"),
        seed=fields.whole(data, "seed", -fields.MAX_INTEGER - 1),
        logprobs=LOGPROBS in included or top_logprobs > 0,
        top_logprobs=top_logprobs,
        stream=fields.boolean(data, "stream"),
        forced=fields.forced(data),
        not_applied={
            **_not_applied(data),
            **fields.not_applied(data, fields.ENGINE_WITHOUT_EFFECT),
            **details(images),
        },
        truncates=_truncates(data),
        refused={**fields.services(data, REFUSED), **fields.reserved_variables(data), **fields.engine_refused(data)},
        template_kwargs=fields.template_kwargs(data),
        unsupported={
            **fields.unsupported(data, UNSUPPORTED_PARAMS),
            **fields.given(data, NOT_OURS),
            **other_tools,
            **_reasoning(data),
        },
        grammar=decoding.combined(
            tool_call, decoding.content(data.get("text") or {}, "format", "text"), decoding.structured_outputs(data)
        ),
        logits=decoding.logits(data),
        previous_id=_previous(data),
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


def _previous(data: JSON) -> str | None:
    given = fields.optional_text(data, "previous_response_id")
    return None if given is None else call_id(given)


def _instructions(data: JSON) -> list[JSON]:
    """The instructions as a message that says what it is: it holds for this request only."""
    given = fields.optional_text(data, "instructions")
    return [] if given is None else [{"role": "system", "content": given, "instructions": True}]


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
        for name in ("name", "call_id", "arguments"):
            if not isinstance(item.get(name), str):
                raise expected("a string", item.get(name), name, where)
        return True
    if kind == "reasoning":
        for name in ("summary", "content"):
            fields.check_kind(item, name, list, where)
            _check_content(item.get(name) or [], f"{where}.{name}", trained)
        fields.check_kind(item, "encrypted_content", str, where)
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
            "tool_call_id": fields.text(item, "call_id", at=where),
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


def _tools(data: JSON) -> tuple[list[JSON] | None, JSON]:
    """Functions in the form of Chat Completions, and the tools that are none, by path."""
    functions, others = fields.split_tools(data)
    for where, tool in functions.items():
        fields.check_function(tool, where)
    return [_tool(tool) for tool in functions.values()] or None, others


def _tool(tool: JSON) -> JSON:
    """A function in the form of Chat Completions; what only an external model has stays as it is."""
    if tool.get("type") != "function":
        return tool
    kept = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in kept if tool.get(name) is not None}}


def _included(data: JSON) -> list[Any]:
    """The extra fields that `include` requests; those that only built-in tools could add are passed over."""
    return [one for one in fields.items(data, "include") if one in INCLUDED]


def _not_applied(data: JSON) -> JSON:
    """Effort and verbosity, which no trained policy has a setting for."""
    reasoning, text = fields.record(data, "reasoning") or {}, fields.record(data, "text") or {}
    return {
        **fields.not_applied(reasoning, {"effort": str}, "reasoning"),
        **fields.not_applied(text, {"verbosity": str}, "text"),
    }


def _truncates(data: JSON) -> bool:
    given = fields.optional_text(data, "truncation")
    if given not in (None, "auto", "disabled"):
        raise expected("auto or disabled", given, "truncation")
    return given == "auto"


def _reasoning(data: JSON) -> JSON:
    given = fields.record(data, "reasoning")
    if given is None:
        return {}
    for name in (*REASONING, "summary", "generate_summary"):
        fields.check_kind(given, name, str, "reasoning")
    return {f"reasoning.{name}": value for name, value in fields.unsupported(given, REASONING).items()}


def _check_stream_options(data: JSON) -> None:
    options = fields.record(data, "stream_options")
    if options is not None:
        fields.check_kind(options, "include_obfuscation", bool, "stream_options")
