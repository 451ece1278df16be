"""OpenAI Chat Completions: JSON <-> Request, Answer, Delta, Refusal; and what outside models of this protocol answer. Pure.

Driven by the gateway, which chooses the protocol by route. Every documented field is honoured, refused, collected as
unsupported, or accepted because it has no effect on what is sampled (metadata, user, store, caching, service tiers, a
prediction, `strict` of a tool); the tables below say which. Fields that the protocol does not have are passed over, save
those of the engines behind it, which would change what is sampled.
"""

from __future__ import annotations

from typing import Any

import orjson

from agentlightning.protocols import fields, sse
from agentlightning.protocols.fields import ENGINE_KNOBS, Knob, expected
from agentlightning.protocols.neutral import (
    Answer,
    Delta,
    EventStream,
    Refusal,
    Request,
    TokenLogprob,
    ToolDelta,
    assistant_message,
    short,
)
from agentlightning.types import JSON

NAME = "chat"

ROLES = ("assistant", "developer", "system", "tool", "user")

KNOBS: dict[str, Knob] = {
    **ENGINE_KNOBS,
    "best_of": Knob(int, (1,)),
    "audio": Knob(dict),
    "modalities": Knob(list, (["text"],)),
    "moderation": Knob(dict),
    "reasoning_effort": Knob(str),
    "verbosity": Knob(str),
    "web_search_options": Knob(dict),
    "add_generation_prompt": Knob(bool, (True,)),
    "continue_final_message": Knob(bool, (False,)),
    "echo": Knob(bool, (False,)),
    "chat_template": Knob(str),
    "chat_template_kwargs": Knob(dict, ({},)),
    "documents": Knob(list, ([],)),
    "enable_thinking": Knob(bool),
    "thinking": Knob(dict),
    "reasoning": Knob(dict),
}
"""Fields that ask for another prompt or another distribution than the trained policy's own."""

WITHOUT_EFFECT: dict[str, type] = {
    "metadata": dict,
    "prediction": dict,
    "prompt_cache_key": str,
    "prompt_cache_options": dict,
    "prompt_cache_retention": str,
    "safety_identifier": str,
    "service_tier": str,
    "store": bool,
    "user": str,
}
"""Fields that change nothing of what is sampled."""


def parse(data: JSON, trained: bool = True) -> Request:
    """The request in a body. Raises Refusal, naming the field and what was expected."""
    if not trained:
        return _outside_request(data)
    fields.check_kinds(data, WITHOUT_EFFECT)
    _refuse_functions(data)
    tools = fields.tools(data)
    parse_tools, forced_choice = tool_choice(data, tools)
    logprobs = fields.boolean(data, "logprobs")
    stream = fields.boolean(data, "stream")
    return Request(
        model=fields.text(data, "model"),
        messages=_messages(data),
        tools=tools,
        parse_tools=parse_tools,
        one_tool_call=not fields.boolean(data, "parallel_tool_calls", default=True),
        max_tokens=_max_tokens(data),
        stop=fields.stops(data),
        n=_count(data),
        seed=fields.whole(data, "seed", -fields.LARGEST - 1),
        logprobs=logprobs,
        top_logprobs=_top_logprobs(data, logprobs),
        stream=stream,
        include_usage=include_usage(data, stream),
        forced=fields.forced(data),
        unsupported={**fields.unsupported(data, KNOBS), **_response_format(data), **forced_choice},
    )


def body(request: Request, answer: Answer) -> bytes:
    """The whole response of a call that is not streamed."""
    choices = [
        {
            "index": index,
            "message": {**assistant_message(choice), "refusal": None},
            "logprobs": _logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }
        for index, choice in enumerate(answer.choices)
    ]
    head = _frame("chat.completion", answer.call_id, answer.model, answer.created_s)
    return orjson.dumps({**head, "choices": choices, "usage": usage(answer)})


def stream(request: Request, call_id: str, model: str, created_s: int, prompt_tokens: int) -> EventStream:
    """The events of a streamed response."""
    return _Events(request, _frame("chat.completion.chunk", call_id, model, created_s))


def error(refusal: Refusal) -> bytes:
    """An error in the protocol's own shape."""
    return orjson.dumps(
        {
            "error": {
                "message": refusal.message,
                "type": refusal.type,
                "param": refusal.param,
                "code": refusal.code,
            }
        }
    )


def reader() -> Reader:
    """For one answer of an outside model that speaks this protocol."""
    return Reader()


def models(names: list[str]) -> bytes:
    """The body of GET models."""
    return orjson.dumps({"object": "list", "data": [_model(name) for name in names]})


def model(name: str) -> bytes:
    """The body of GET models/{name}."""
    return orjson.dumps(_model(name))


class Reader:
    """What an outside model answered (its first choice), whole or in chunks."""

    def __init__(self) -> None:
        self.message: JSON = {"role": "assistant", "content": None}
        self.finish_reason = "stop"
        self.prompt_tokens = 0
        self.sampled_tokens = 0
        self._places: dict[int, int] = {}
        """Of the tool calls: the protocol's index -> the place in the message."""

    def whole(self, body: JSON) -> None:
        """Take in a complete response."""
        self._take(body, "message")

    def event(self, data: JSON) -> None:
        """Take in the data of one event of a stream."""
        self._take(data, "delta")

    def _take(self, data: Any, part: str) -> None:
        self.prompt_tokens, self.sampled_tokens = read_usage(data, self.prompt_tokens, self.sampled_tokens)
        choice = first_choice(data)
        said = choice.get(part)
        if isinstance(said, dict):
            self._add("content", _read_text(said.get("content")))
            self._add("refusal", _read_text(said.get("refusal")))
            self._add("reasoning_content", _read_text(said.get("reasoning_content") or said.get("reasoning")))
            calls = said.get("tool_calls")
            for call in calls if isinstance(calls, list) else ():
                if isinstance(call, dict):
                    self._add_call(call)
        if isinstance(reason := choice.get("finish_reason"), str):
            self.finish_reason = reason

    def _add(self, name: str, more: str | None) -> None:
        if more is not None and (more or name == "content"):
            self.message[name] = (self.message.get(name) or "") + more

    def _add_call(self, more: JSON) -> None:
        calls = self.message.setdefault("tool_calls", [])
        index, begins = more.get("index"), bool(more.get("id"))
        if not isinstance(index, int):
            index = max(self._places, default=0) + (begins and bool(calls))
        if index not in self._places:
            self._places[index] = len(calls)
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[self._places[index]]
        function = more.get("function") or more.get("custom")
        if isinstance(more.get("id"), str):
            call["id"] = more["id"] or call["id"]
        if isinstance(function, dict):
            call["function"]["name"] += _read_text(function.get("name")) or ""
            call["function"]["arguments"] += _read_arguments(function.get("arguments", function.get("input")))


# --- shared with Completions --------------------------------------------------------------------------------------------


def include_usage(data: JSON, streamed: bool) -> bool:
    """Whether a chunk with the token counts is asked for; options of a stream that is none are refused, as OpenAI does."""
    options = fields.record(data, "stream_options")
    if options is None:
        return False
    if not streamed:
        raise Refusal('stream_options: only allowed where "stream" is true', param="stream_options")
    fields.check_kind(options, "include_obfuscation", bool, "stream_options")
    return fields.boolean(options, "include_usage", at="stream_options")


def usage(answer: Answer) -> JSON:
    """The token counts of an answer."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.sampled_tokens,
        "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def failure(refusal: Refusal) -> bytes:
    """The event that ends a stream that cannot go on."""
    return b"data: " + error(refusal) + b"\n\n"


def first_choice(data: Any) -> JSON:
    """Choice 0 of what an outside model sent; empty where there is none."""
    choices = data.get("choices") if isinstance(data, dict) else None
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and choice.get("index", 0) == 0:
            return choice
    return {}


def read_usage(data: Any, prompt_tokens: int, sampled_tokens: int) -> tuple[int, int]:
    """The token counts that an outside model sent; those known so far where it sent none."""
    counts = data.get("usage") if isinstance(data, dict) else None
    if not isinstance(counts, dict):
        return prompt_tokens, sampled_tokens
    prompt, sampled = counts.get("prompt_tokens"), counts.get("completion_tokens")
    return (
        prompt if isinstance(prompt, int) else prompt_tokens,
        sampled if isinstance(sampled, int) else sampled_tokens,
    )


# --- parsing ------------------------------------------------------------------------------------------------------------


def _outside_request(data: JSON) -> Request:
    """What the record needs of a request that goes elsewhere as it is: how it is built is for the outside model to judge."""
    options = data.get("stream_options")
    tools = data.get("tools")
    return Request(
        model=fields.text(data, "model"),
        messages=_outside_messages(data),
        tools=[tool for tool in tools if isinstance(tool, dict)] or None if isinstance(tools, list) else None,
        stream=fields.boolean(data, "stream"),
        include_usage=bool(isinstance(options, dict) and options.get("include_usage")),
    )


def _outside_messages(data: JSON) -> list[JSON]:
    messages = fields.items(data, "messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise expected('an object with a "role"', message, where)
        fields.check_kind(message, "content", (str, list), where)
        fields.check_kind(message, "tool_calls", list, where)
    return messages


def _refuse_functions(data: JSON) -> None:
    if fields.items(data, "functions"):
        raise Refusal(
            "functions: no longer supported; give them as `tools`", param="functions", code="unsupported_value"
        )
    if data.get("function_call") not in (None, "auto", "none"):
        raise Refusal(
            "function_call: no longer supported; give `tools` and `tool_choice`",
            param="function_call",
            code="unsupported_value",
        )


def tool_choice(data: JSON, tools: list[JSON] | None) -> tuple[bool, JSON]:
    """Whether the answer may hold tool calls, and the choice where it would force or narrow them."""
    value = data.get("tool_choice")
    if value == "none":
        return False, {}
    offered = tools is not None
    if value is None or value == "auto":
        return offered, {}
    if value == "required" or (
        isinstance(value, dict) and value.get("type") in ("function", "allowed_tools", "custom")
    ):
        return offered, {"tool_choice": value}
    raise expected(
        '"auto", "none", "required", or an object of type "function" or "allowed_tools"', value, "tool_choice"
    )


def _response_format(data: JSON) -> JSON:
    """The format where it asks for a grammar."""
    value = fields.record(data, "response_format")
    if value is None or value.get("type") == "text":
        return {}
    if value.get("type") not in ("json_object", "json_schema"):
        raise expected("text, json_object or json_schema", value.get("type"), "type", "response_format")
    return {"response_format": value}


def _max_tokens(data: JSON) -> int | None:
    newer = fields.whole(data, "max_completion_tokens", 1)
    older = fields.whole(data, "max_tokens", 1)
    if newer is not None and older is not None and newer != older:
        raise Refusal(
            f"max_tokens: the older name of max_completion_tokens; expected one of them, got {older} and {newer}",
            param="max_tokens",
        )
    return newer if newer is not None else older


def _count(data: JSON) -> int:
    count = fields.whole(data, "n", 1, fields.MOST_CHOICES)
    return 1 if count is None else count


def _top_logprobs(data: JSON, logprobs: bool) -> int:
    count = fields.whole(data, "top_logprobs", 0, fields.MOST_ALTERNATIVES) or 0
    if count and not logprobs:
        raise Refusal('top_logprobs: only allowed where "logprobs" is true', param="top_logprobs")
    return count


def _messages(data: JSON) -> list[JSON]:
    messages = fields.items(data, "messages")
    if not messages:
        raise expected("a list of at least one message", data.get("messages"), "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> JSON:
    """The message, if it is one; a refusal that it repeats is its content."""
    if not isinstance(message, dict):
        raise expected("an object", message, where)
    role = message.get("role")
    if role not in ROLES:
        raise expected(f"one of {', '.join(ROLES)}", role, "role", where)
    _check_content(message.get("content"), f"{where}.content")
    for name in ("tool_call_id", "reasoning_content", "name", "refusal"):
        fields.check_kind(message, name, str, where)
    for name, instead in (
        ("function_call", "use tool_calls"),
        ("audio", "the trained policy hears and says text only"),
    ):
        if message.get(name) is not None:
            path = f"{where}.{name}"
            raise Refusal(f"{path}: not supported; {instead}", param=path, code="unsupported_value")
    for index, call in enumerate(fields.items(message, "tool_calls", where)):
        _check_tool_call(call, f"{where}.tool_calls[{index}]")
    if message.get("refusal") and not message.get("content"):
        return {**message, "content": message["refusal"]}
    return message


def _check_content(value: Any, where: str) -> None:
    if value is None or isinstance(value, str):
        return
    if not isinstance(value, list):
        raise expected("a string or a list of text parts", value, where)
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("text", "refusal") and isinstance(part.get(kind), str):
            continue
        path = f"{where}[{index}]"
        raise Refusal(
            f"{path}: expected a text part, the only kind the trained policy reads, got {short(part)}",
            param=path,
            code="unsupported_value",
        )


def _check_tool_call(call: Any, where: str) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise expected('{"id", "type": "function", "function": {"name", "arguments"}}', call, where)
    fields.check_kind(call, "id", str, where)
    for name in ("name", "arguments"):
        if not isinstance(function.get(name), str):
            what = "a string" if name == "name" else "a JSON object as a string"
            raise expected(what, function.get(name), name, f"{where}.function")


# --- building -----------------------------------------------------------------------------------------------------------


class _Events:
    """The chunks of a streamed response."""

    def __init__(self, request: Request, frame: JSON) -> None:
        self._count = request.n
        self._usage = request.include_usage
        self._frame = {**frame, "usage": None} if self._usage else frame

    def first(self) -> bytes:
        """Opens every choice, in order: SDKs number them as they come."""
        return b"".join(self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self._count))

    def delta(self, index: int, delta: Delta) -> bytes:
        """More of choice `index`: a chunk for each kind of text, since many clients read only one kind from each."""
        parts: list[JSON] = []
        if delta.reasoning:
            parts.append({"reasoning_content": delta.reasoning})
        if delta.content or (delta.logprobs and not delta.reasoning and not delta.tools):
            parts.append({"content": delta.content})
        parts += ({"tool_calls": [_tool_delta(tool)]} for tool in delta.tools)
        logprobs = _logprobs(delta.logprobs or None)
        chunks = []
        for part in parts:
            chunks.append(self._chunk(index, part, logprobs=logprobs))
            logprobs = None
        return b"".join(chunks)

    def last(self, answer: Answer) -> bytes:
        """The finish reasons, the usage where asked for, and the end mark."""
        parts = [
            self._chunk(index, {}, finish_reason=choice.finish_reason) for index, choice in enumerate(answer.choices)
        ]
        if self._usage:
            parts.append(sse.event({**self._frame, "choices": [], "usage": usage(answer)}))
        parts.append(sse.DONE)
        return b"".join(parts)

    def failed(self, refusal: Refusal) -> bytes:
        """Ends a stream that cannot go on; SDKs raise the error that it carries."""
        return failure(refusal)

    def _chunk(self, index: int, delta: JSON, finish_reason: str | None = None, logprobs: JSON | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return sse.event({**self._frame, "choices": [choice]})


def _frame(kind: str, call_id: str, model: str, created_s: int) -> JSON:
    return {"id": f"chatcmpl-{call_id}", "object": kind, "created": created_s, "model": model}


def _tool_delta(tool: ToolDelta) -> JSON:
    if tool.id is None and tool.name is None:
        return {"index": tool.index, "function": {"arguments": tool.arguments}}
    function = {"name": tool.name, "arguments": tool.arguments}
    return {"index": tool.index, "id": tool.id, "type": "function", "function": function}


def _logprobs(tokens: tuple[TokenLogprob, ...] | None) -> JSON | None:
    if tokens is None:
        return None
    content = [
        {**_logprob(one.text, one.logprob), "top_logprobs": [_logprob(text, logprob) for text, logprob in one.top]}
        for one in tokens
    ]
    return {"content": content, "refusal": None}


def _logprob(text: str, logprob: float) -> JSON:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _model(name: str) -> JSON:
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentlightning"}


def _read_text(value: Any) -> str | None:
    """Text of an outside model: a string, or the text of its parts."""
    if isinstance(value, list):
        parts = [part.get("text") for part in value if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return value if isinstance(value, str) else None


def _read_arguments(value: Any) -> str:
    return orjson.dumps(value).decode() if isinstance(value, dict) else _read_text(value) or ""
