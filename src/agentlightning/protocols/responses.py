"""OpenAI Responses: JSON <-> CompletionRequest, Completion, Delta, ApiError; and what external models of this protocol
respond. Pure.

Driven by the gateway, which chooses the protocol by route. Function tools are the policy's only ones. Every documented field
is honoured, refused, collected as unsupported, or accepted because it changes nothing of what is sampled; the tables say
which. Unknown fields are passed over, save those with which other APIs change the response. Responses are stored as the
record: `previous_response_id`, items that refer to it and GET responses/ID find them (gateway/policy/recorded.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import orjson
from msgspec import Struct

from agentlightning.protocols import chat, fields
from agentlightning.protocols.base import ApiError, Completion, CompletionRequest, EventStream, call_id, short
from agentlightning.protocols.fields import expected
from agentlightning.protocols.images import details, image_part, take_images
from agentlightning.protocols.response_items import (
    FOLDS,
    SEALED_REASONING,
    AssistantTurn,
    ResponseEvents,
    ResponseReader,
    call_item,
    echoed,
    finished,
    flatten,
    is_text,
    message_item,
    output_items,
    plain,
    reasoning_item,
)
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
            previous_id=external.previous_response_id and call_id(external.previous_response_id),
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
        previous_id=asked.previous_response_id and call_id(asked.previous_response_id),
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


error = chat.error
reader = ResponseReader


# --- parsing ------------------------------------------------------------------------------------------------------------


def _instructions(given: str | None) -> list[JSON]:
    """The instructions as a message that says what it is: it holds for this request only."""
    return [] if given is None else [{"role": "system", "content": given, "instructions": True}]


class _FunctionCall(Struct):
    name: str
    call_id: str
    arguments: fields.Arguments


class _ReasoningItem(Struct):
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: fields.Text = None


class _CallOutput(Struct):
    call_id: fields.Text = None


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


# --- items that are named by their ids -------------------------------------------------------------------------------


ITEM_ID = re.compile(r"(?:rs|msg|fc|fco)_([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(_in_\d+)?(?:_(\d{1,4}))?\Z")
"""Group 1 is the call; group 2 is there in the ids of its input, group 3 is the number among items of a kind."""

REFERENCE = "item_reference"

MAX_REFERENCES = 1024
"""Of one request."""
MAX_REFERENCED_BYTES = 8 << 20
"""Of the items that a request refers to, as JSON, each as often as it is named: an id of fifty bytes may name megabytes."""


def referenced_ids(data: JSON) -> list[str]:
    """The ids of the items that the input of a request refers to. Raises ApiError where one is no id."""
    given = data.get("input")
    found: list[str] = []
    for index, item in enumerate(given if isinstance(given, list) else ()):
        if is_reference(item):
            name = item.get("id")
            if not isinstance(name, str) or not name:
                raise expected("the id of an item", name, f"input[{index}].id")
            found.append(name)
    if len(found) > MAX_REFERENCES:
        raise ApiError(f"input: expected at most {MAX_REFERENCES} references to items, got {len(found)}", param="input")
    return found


def is_reference(item: Any) -> bool:
    """True for an item that is the id of another; its type may be left out where it has nothing else."""
    if not isinstance(item, dict):
        return False
    return item.get("type") == REFERENCE or (item.get("type") is None and set(item) <= {"type", "id"} and "id" in item)


def call_of_item(item_id: str) -> str:
    """Id of the recorded call behind the id of an item; '' where it is none of ours.

    >>> call_of_item("fc_01970000-1111-7222-8333-444455556666_0"), call_of_item("msg_1")
    ('01970000-1111-7222-8333-444455556666', '')
    """
    found = ITEM_ID.match(item_id)
    return "" if found is None else found[1]


def dereferenced(data: JSON, calls: Mapping[str, Call]) -> JSON:
    """The request with the items that it refers to in place of their ids. Raises ApiError where `calls` lack one."""
    known: dict[str, JSON] = {}
    for name in {call_of_item(one) for one in referenced_ids(data)} & calls.keys():
        call = calls[name]
        before = [_items(one, f"{name}_in_{at}") for at, one in enumerate(call.messages) if not one.get("instructions")]
        known |= {item["id"]: item for listed in (*before, _items(call.completion, name)) for item in listed}
    items: list[Any] = []
    size = 0
    for index, item in enumerate(data["input"]):
        if not is_reference(item):
            items.append(item)
            continue
        found = known.get(item["id"])
        if found is not None:
            items.append(found)
            size += len(orjson.dumps(found))
            if size > MAX_REFERENCED_BYTES:
                what = f"references to items of at most {MAX_REFERENCED_BYTES} bytes in all"
                raise ApiError(f"input: expected {what}", param="input")
        elif not _is_later_message(item["id"], calls):
            path = f"input[{index}].id"
            why = f"{path}: this attempt has no item {item['id']!r}"
            raise ApiError(why, status=404, param=path, code="item_not_found")
    return {**data, "input": items}


def _is_later_message(item_id: str, calls: Mapping[str, Call]) -> bool:
    """True for the second or a later message of a streamed response: the record has the texts of all in its first one."""
    found = ITEM_ID.match(item_id)
    if found is None or found[2] or not found[3] or found[1] not in calls or not item_id.startswith("msg_"):
        return False
    said = calls[found[1]].completion
    return bool(said.get("content")) and int(found[3]) <= len(said.get("tool_calls") or ()) + (
        "reasoning_content" in said
    )


def _items(message: JSON, name: str) -> list[JSON]:
    """The items that a message is; `name` is what their ids have after the kind."""
    role, content = message.get("role"), message.get("content")
    if role == "tool":
        output = _parts(content, "input_text") if isinstance(content, list) else content or ""
        item = {"type": "function_call_output", "call_id": message.get("tool_call_id") or "", "output": output}
        return [{"id": f"fco_{name}", **item, "status": "completed"}]
    if role != "assistant":
        item = {"type": "message", "role": role, "status": "completed", "content": _parts(content, "input_text")}
        return [{"id": f"msg_{name}", **item}]
    items: list[JSON] = []
    calls = message.get("tool_calls") or ()
    if reasoning := message.get("reasoning_content"):
        items.append(reasoning_item(f"rs_{name}", reasoning, {}, "completed"))
    if content or not calls:
        parts = _parts(content, "output_text", annotations=[], logprobs=[])
        items.append({**message_item(f"msg_{name}", "", "completed"), "content": parts})
    for index, call in enumerate(calls):
        function, call_id = call.get("function") or {}, call.get("id") or ""
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else ""
        items.append(call_item(f"fc_{name}_{index}", call_id, function.get("name") or "", text, "completed"))
    return items


def _parts(content: Any, kind: str, **more: Any) -> list[Any]:
    """Content as Responses has it; parts that are no text stay."""
    listed = content if isinstance(content, list) else [{"text": content or ""}]
    texts = [one.get("text") if isinstance(one, dict) else None for one in listed]
    pairs = zip(texts, listed, strict=True)
    return [{"type": kind, "text": text, **more} if isinstance(text, str) else one for text, one in pairs]
