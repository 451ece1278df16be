"""OpenAI Chat Completions: JSON <-> CompletionRequest, Completion, Delta, ApiError; and what external models of this
protocol respond. Pure.

Driven by the gateway, which chooses the protocol by route. Every documented field is honoured, refused, collected as
unsupported, or accepted because it has no effect on what is sampled (metadata, user, store, caching, service tiers, a
prediction); the tables below say which. Fields that the protocol does not have are passed over, save
those of the engines behind it, which would change what is sampled.
"""

from __future__ import annotations

from typing import Any

import orjson

from agentlightning.prefill import PREFILL
from agentlightning.protocols import decoding, fields, openai_shapes
from agentlightning.protocols.base import (
    ApiError,
    Choice,
    Completion,
    CompletionReader,
    CompletionRequest,
    Delta,
    EventStream,
    TokenLogprob,
    ToolDelta,
    assistant_message,
)
from agentlightning.protocols.fields import ENGINE_PARAMS, ENGINE_WITHOUT_EFFECT, UnsupportedParam, expected
from agentlightning.protocols.images import NO_AUDIO, details, image_part, take_images
from agentlightning.records import JSON, REASONING_CLEARED

NAME = "chat"

MARKS = (PREFILL, REASONING_CLEARED)
"""Keys with which the gateway marks messages; in a request they mean nothing."""

ROLES = ("assistant", "developer", "system", "tool", "user")

UNSUPPORTED_PARAMS: dict[str, UnsupportedParam] = {
    **ENGINE_PARAMS,
    "best_of": UnsupportedParam(int, (1,)),
    "audio": UnsupportedParam(dict),
    "modalities": UnsupportedParam(list, (["text"],)),
    "moderation": UnsupportedParam(dict),
    "web_search_options": UnsupportedParam(dict),
    "chat_template": UnsupportedParam(str),
    "thinking": UnsupportedParam(dict),
}
"""Fields that ask for another prompt or another distribution than the trained policy's own."""

LEGACY = {
    "functions": "no longer supported; give them as `tools`",
    "function_call": "no longer supported; give `tools` and `tool_choice`",
}
"""Fields that others have replaced."""

NOT_APPLIED: dict[str, type] = {"reasoning_effort": str, "verbosity": str}
"""Fields that no trained policy has a setting for; they are recorded."""

TEMPLATE_VARIABLES: dict[str, type] = {"documents": list, "enable_thinking": bool}
"""Variables of chat templates that engines take as fields of the request, too."""

REASONING: dict[str, UnsupportedParam] = {
    "max_tokens": UnsupportedParam(int),
    "enabled": UnsupportedParam(bool, (True,)),
}
"""Fields of OpenRouter's `reasoning` that ask for more or less thinking than the policy's own."""

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


def parse(data: JSON, trained: bool = True) -> CompletionRequest:
    if not trained:
        return _external_request(data)
    fields.check_kinds(data, WITHOUT_EFFECT)
    tools, other_tools = fields.tools(data)
    parse_tools, tool_call = tool_choice(data, tools)
    logprobs = fields.boolean(data, "logprobs")
    messages, images = take_images(_messages(data))
    continues, generation_prompt = _continuation(data)
    messages = fields.begun(messages) if continues else messages
    stream = fields.boolean(data, "stream")
    reasoning = fields.record(data, "reasoning") or {}
    return CompletionRequest(
        model=fields.text(data, "model"),
        messages=messages,
        images=images,
        tools=tools,
        parse_tools=parse_tools,
        one_tool_call=not fields.boolean(data, "parallel_tool_calls", default=True),
        max_tokens=_max_tokens(data),
        stop=fields.stops(data),
        stop_ids=fields.stop_token_ids(data),
        include_stop=fields.boolean(data, "include_stop_str_in_output"),
        n=_count(data),
        echoed=_last_text(messages) if fields.boolean(data, "echo") else "",
        seed=fields.whole(data, "seed", -fields.MAX_INTEGER - 1),
        logprobs=logprobs,
        top_logprobs=_top_logprobs(data, logprobs),
        **fields.token_options(data, stream),
        stream=stream,
        include_usage=openai_shapes.include_usage(data, stream),
        continuous_usage=openai_shapes.continuous_usage(data),
        include_reasoning=fields.boolean(data, "include_reasoning", default=True)
        and not fields.boolean(reasoning, "exclude", at="reasoning"),
        forced=fields.forced(data),
        refused={
            **{name: LEGACY[name] for name in fields.given(data, LEGACY, neutral=(None, [], "auto", "none"))},
            **fields.reserved_variables(data),
            **fields.engine_refused(data),
        },
        template_kwargs={**_template_variables(data), **fields.template_kwargs(data)},
        not_applied={
            **fields.not_applied(data, {**NOT_APPLIED, **ENGINE_WITHOUT_EFFECT}),
            **fields.not_applied(reasoning, {"effort": str}, "reasoning"),
            **details(images),
        },
        unsupported={
            **fields.unsupported(data, UNSUPPORTED_PARAMS),
            **{f"reasoning.{name}": value for name, value in fields.unsupported(reasoning, REASONING).items()},
            **generation_prompt,
            **other_tools,
        },
        grammar=decoding.combined(tool_call, decoding.content(data), decoding.structured_outputs(data)),
        logits=decoding.logits(data),
    )


def body(request: CompletionRequest, completion: Completion) -> bytes:
    choices = [
        {
            "index": index,
            "message": {**_message_of(choice, request), "refusal": None},
            "logprobs": _logprobs(request, choice.logprobs),
            "finish_reason": choice.finish_reason,
            **openai_shapes.choice_ids(request, choice),
        }
        for index, choice in enumerate(completion.choices)
    ]
    head = _frame("chat.completion", completion.call_id, completion.model, completion.created_s)
    told = {"choices": choices, "usage": openai_shapes.usage(completion), **_prompt_details(request, completion)}
    return orjson.dumps({**head, **told})


def stream(request: CompletionRequest, call_id: str, model: str, created_s: int, prompt_tokens: int) -> EventStream:
    frame = _frame("chat.completion.chunk", call_id, model, created_s)
    return _ChatEvents(request, frame, prompt_tokens)


error = openai_shapes.error


def models(names: list[str], created_s: int) -> bytes:
    """The body of GET models."""
    return orjson.dumps({"object": "list", "data": [_model(name, created_s) for name in names]})


def model(name: str, created_s: int) -> bytes:
    """The body of GET models/{name}."""
    return orjson.dumps(_model(name, created_s))


class ChatReader(CompletionReader):
    """The first choice of an external model's response, whole or in chunks."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[int, int] = {}
        """Tool calls: the protocol's index -> the position in the message."""

    def whole(self, body: JSON) -> None:
        self._read(body, "message")

    def event(self, data: JSON) -> None:
        self._read(data, "delta")

    def _read(self, data: JSON, part: str) -> None:
        self.read_usage(data)
        self.count_choices(data, part)
        choice = openai_shapes.first_choice(data)
        said = choice.get(part)
        if isinstance(said, dict):
            if (content := _read_text(said.get("content"))) is not None:
                self.message["content"] = (self.message["content"] or "") + content
            self.add_text("refusal", _read_text(said.get("refusal")))
            self.add_text("reasoning_content", _read_text(said.get("reasoning_content") or said.get("reasoning")))
            calls = said.get("tool_calls")
            for call in calls if isinstance(calls, list) else ():
                if isinstance(call, dict):
                    self._add_call(call)
        if isinstance(reason := choice.get("finish_reason"), str):
            self.finish_reason = reason

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


reader = ChatReader


# --- parsing ------------------------------------------------------------------------------------------------------------


def _external_request(data: JSON) -> CompletionRequest:
    """The recorded fields of a request that is passed on as it is: its validation is left to the external model to
    judge."""
    options = data.get("stream_options")
    tools = data.get("tools")
    return CompletionRequest(
        model=fields.text(data, "model"),
        messages=_external_messages(data),
        tools=[tool for tool in tools if isinstance(tool, dict)] or None if isinstance(tools, list) else None,
        stream=fields.boolean(data, "stream"),
        include_usage=bool(isinstance(options, dict) and options.get("include_usage")),
    )


def _external_messages(data: JSON) -> list[JSON]:
    messages = fields.items(data, "messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise expected('an object with a "role"', message, where)
        fields.check_kind(message, "content", (str, list), where)
        fields.check_kind(message, "tool_calls", list, where)
    return messages


def tool_choice(data: JSON, tools: list[JSON] | None) -> tuple[bool, JSON]:
    """(tool calls are parsed, `tool_call` of the grammar)."""
    value = data.get("tool_choice")
    if value == "none":
        return False, {}
    known = value in (None, "auto", "required") or (
        isinstance(value, dict) and value.get("type") in ("function", "allowed_tools", "custom")
    )
    if not known:
        raise expected(
            '"auto", "none", "required", or an object of type "function" or "allowed_tools"', value, "tool_choice"
        )
    return tools is not None, decoding.tool_call(value, tools)


def _continuation(data: JSON) -> tuple[bool, JSON]:
    """(the completion continues the last message, `add_generation_prompt` where that is not honoured), as vLLM has them."""
    continues = fields.boolean(data, "continue_final_message")
    opens = fields.boolean(data, "add_generation_prompt", default=True)
    if continues and opens:
        raise ApiError(
            "continue_final_message: expected add_generation_prompt: false with it, since no message is opened",
            param="continue_final_message",
        )
    return continues, {} if continues or opens else {"add_generation_prompt": False}


def _last_text(messages: list[JSON]) -> str:
    """The text of the last message, where that is the assistant's as the completion is: what vLLM's `echo` repeats."""
    last = messages[-1]
    content = (last.get("content") or "") if last["role"] == "assistant" else ""
    return content if isinstance(content, str) else "\n".join(part.get("text") or "" for part in content)


def _template_variables(data: JSON) -> JSON:
    fields.check_kinds(data, TEMPLATE_VARIABLES)
    return fields.given(data, TEMPLATE_VARIABLES, neutral=(None, []))


def _max_tokens(data: JSON) -> int | None:
    newer = fields.whole(data, "max_completion_tokens", 1)
    older = fields.whole(data, "max_tokens", 1)
    if newer is not None and older is not None and newer != older:
        raise ApiError(
            f"max_tokens: the older name of max_completion_tokens; expected one of them, got {older} and {newer}",
            param="max_tokens",
        )
    return newer if newer is not None else older


def _count(data: JSON) -> int:
    count = fields.whole(data, "n", 1, fields.MAX_CHOICES)
    return 1 if count is None else count


def _top_logprobs(data: JSON, logprobs: bool) -> int:
    count = fields.alternatives(data, "top_logprobs") or 0
    if count and not logprobs:
        raise ApiError('top_logprobs: only allowed where "logprobs" is true', param="top_logprobs")
    return count


def _messages(data: JSON) -> list[JSON]:
    messages = fields.items(data, "messages")
    if not messages:
        raise expected("a list of at least one message", data.get("messages"), "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(given: Any, where: str) -> JSON:
    """The message, if it is one; a refusal that it repeats is its content."""
    if not isinstance(given, dict):
        raise expected("an object", given, where)
    message: JSON = given
    role = message.get("role")
    if role not in ROLES:
        raise expected(f"one of {', '.join(ROLES)}", role, "role", where)
    if len(message) == 2 and isinstance(message.get("content"), str):
        return message  # most are so: nothing else can be wrong with them
    content = _content(message.get("content"), f"{where}.content", images=role in ("user", "tool"))
    message = {name: value for name, value in message.items() if name not in MARKS}
    if "content" in message:
        message["content"] = content
    for name in ("tool_call_id", "reasoning_content", "name", "refusal"):
        fields.check_kind(message, name, str, where)
    for name, instead in (
        ("function_call", "use tool_calls"),
        ("audio", NO_AUDIO),
    ):
        if message.get(name) is not None:
            raise fields.refused(f"{where}.{name}", f"not supported; {instead}")
    for index, call in enumerate(fields.items(message, "tool_calls", where)):
        _check_tool_call(call, f"{where}.tool_calls[{index}]")
    if message.get("reasoning_content") is None and isinstance(message.get("reasoning"), str):
        message["reasoning_content"] = message["reasoning"]
    if message.get("refusal") and not message.get("content"):
        message["content"] = message["refusal"]
    return message


def _content(value: Any, where: str, images: bool) -> Any:
    """The content as it is, or with its images in our form."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise expected("a string or a list of text parts", value, where)
    parts = [_part(part, f"{where}[{index}]", images) for index, part in enumerate(value)]
    return parts if any(part["type"] == "image" for part in parts) else value


def _part(part: Any, where: str, images: bool) -> JSON:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "refusal") and isinstance(part.get(kind), str):
        return {"type": "text", "text": part[kind]}
    found = image_part(part, where) if images else None
    if found is None:
        raise fields.not_text(part, where)
    return found


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


class _ChatEvents(openai_shapes.ChunkStream):
    def first(self) -> bytes:
        """Opens every choice, in order: SDKs number them as they come."""
        opening = {"delta": {"role": "assistant", "content": ""}}
        ids: JSON = {} if self._request.planned_ids is None else {"prompt_token_ids": self._request.planned_ids}
        chunks = [self.chunk(index, opening, **({} if index else ids)) for index in range(self._count)]
        if echoed := self._request.echoed:
            chunks += [self.chunk(index, {"delta": {"content": echoed}}) for index in range(self._count)]
        return b"".join(chunks)

    def parts(self, index: int, delta: Delta) -> list[JSON]:
        """A part for each kind of text, since many clients read only one kind from each; and one without for the finish
        reason of tool calls, at which some stop reading, as OpenAI sends it."""
        said: list[JSON] = []
        if delta.reasoning and self._request.include_reasoning:
            said.append({"reasoning": delta.reasoning, "reasoning_content": delta.reasoning})
        if delta.content or ((delta.logprobs or delta.token_ids) and not said and not delta.tools):
            said.append({"content": delta.content})
        said += ({"tool_calls": [_tool_delta(tool)]} for tool in delta.tools)
        if delta.last and (delta.tools or not said):
            said.append({})
        parts: list[JSON] = [{"delta": one} for one in said]
        if delta.logprobs:
            parts[0]["logprobs"] = _logprobs(self._request, delta.logprobs)
        if delta.token_ids:
            parts[0]["token_ids"] = delta.token_ids
        return parts


def _message_of(choice: Choice, request: CompletionRequest) -> JSON:
    message = assistant_message(choice)
    if request.echoed:
        message["content"] = request.echoed + (choice.content or "")
    if not request.include_reasoning:
        message.pop("reasoning_content", None)
    elif "reasoning_content" in message:
        message["reasoning"] = message["reasoning_content"]  # the newer name of it in vLLM
    return message


def _frame(kind: str, call_id: str, model: str, created_s: int) -> JSON:
    return {"id": f"chatcmpl-{call_id}", "object": kind, "created": created_s, "model": model}


def _tool_delta(tool: ToolDelta) -> JSON:
    if tool.id is None and tool.name is None:
        return {"index": tool.index, "function": {"arguments": tool.arguments}}
    function = {"name": tool.name, "arguments": tool.arguments}
    return {"index": tool.index, "id": tool.id, "type": "function", "function": function}


def _logprobs(request: CompletionRequest, tokens: tuple[TokenLogprob, ...] | None) -> JSON | None:
    if tokens is None:
        return None
    return {"content": openai_shapes.logprob_list(openai_shapes.shown(request, tokens)), "refusal": None}


def _prompt_details(request: CompletionRequest, completion: Completion) -> JSON:
    found: JSON = {}
    if request.return_token_ids is not None:
        found["prompt_token_ids"] = completion.prompt_ids if request.return_token_ids else None
    if request.prompt_logprobs is not None:
        found["prompt_logprobs"] = completion.prompt_logprobs
    return found


def _model(name: str, created_s: int) -> JSON:
    return {"id": name, "object": "model", "created": created_s, "owned_by": "agentlightning"}


def _read_text(value: Any) -> str | None:
    """Text of an external model: a string, or the text of its parts."""
    if isinstance(value, list):
        parts = [part.get("text") for part in value if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return value if isinstance(value, str) else None


def _read_arguments(value: Any) -> str:
    return orjson.dumps(value).decode() if isinstance(value, dict) else _read_text(value) or ""
