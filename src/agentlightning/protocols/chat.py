"""OpenAI Chat Completions: JSON <-> CompletionRequest, Completion, Delta, ApiError; and what external models of this
protocol respond; and what the other protocols of OpenAI have in common with it. Pure.

Driven by the gateway, which chooses the protocol by route. Every documented field is honoured, refused, collected as
unsupported, or accepted because it has no effect on what is sampled (metadata, user, store, caching, service tiers, a
prediction); the tables below say which. Fields that the protocol does not have are passed over, save
those of the engines behind it, which would change what is sampled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import orjson
from msgspec import Meta, Struct

from agentlightning.protocols import fields
from agentlightning.protocols.base import (
    SSE_DONE,
    ApiError,
    Choice,
    Completion,
    CompletionReader,
    CompletionRequest,
    Delta,
    EventStream,
    OpenToolCalls,
    RequestImage,
    TokenLogprob,
    ToolDelta,
    assistant_message,
    sse_event,
)
from agentlightning.protocols.fields import ENGINE_PARAMS, expected
from agentlightning.protocols.images import NO_AUDIO, details, image_part, take_images
from agentlightning.records import JSON, PREFILL
from agentlightning.runtime import json_text

NAME = "chat"

ROLES = ("assistant", "developer", "system", "tool", "user")

UNSUPPORTED_PARAMS: Mapping[str, tuple[Any, ...]] = {
    **ENGINE_PARAMS, "best_of": (1,), "audio": (), "modalities": (["text"],), "moderation": (), "web_search_options": (),
    "chat_template": (), "thinking": (),
}  # fmt: skip
"""Fields that ask for another prompt or another distribution than the trained policy's own."""

PLAIN = frozenset({
    "model", "messages", "temperature", "top_p", "max_tokens", "max_completion_tokens", "n", "seed", "stop", "stream",
    "stream_options", "tools", "tool_choice", "parallel_tool_calls", "logprobs", "top_logprobs", "user", "metadata", "store",
})  # fmt: skip
"""Fields that are read at once, or not at all."""

LEGACY = "_functions"
"""Name in `echo` of a request with `functions`, whose response has `function_call` in place of tool calls."""

NOT_APPLIED = ("reasoning_effort", "verbosity", *fields.NOT_APPLIED)
"""Fields that no trained policy has a setting for; they are recorded."""


class OpenRouterReasoning(Struct):
    """OpenRouter's `reasoning`."""

    exclude: fields.Flag = None
    effort: fields.Text = None


REASONING: Mapping[str, tuple[Any, ...]] = {"max_tokens": (), "enabled": (True,)}
"""Those of its fields that ask for more or less thinking than the policy's own."""


class ChatRequest(fields.IdsRequest, kw_only=True):
    messages: list[JSON] | None = None
    functions: list[JSON] | None = None
    max_tokens: fields.Positive = None
    max_completion_tokens: fields.Positive = None
    logprobs: fields.Flag = None
    top_logprobs: fields.Alternatives = None
    parallel_tool_calls: fields.Flag = None
    continue_final_message: fields.Flag = None
    add_generation_prompt: fields.Flag = None
    include_reasoning: fields.Flag = None
    reasoning: fields.Record = None
    reasoning_effort: fields.Text = None
    verbosity: fields.Text = None
    documents: list[Any] | None = None
    enable_thinking: fields.Flag = None


def parse(data: JSON, trained: bool = True) -> CompletionRequest:
    if not trained:
        return _external_request(data)
    asked = fields.read(ChatRequest, data)
    if not asked.messages:
        raise expected("a list of at least one message", data.get("messages"), "messages")
    tools, other_tools = _tools(asked)
    parse_tools, tool_call = _tool_choice(data, tools)
    messages: list[JSON] = []
    images: tuple[RequestImage, ...] = ()
    plain, calls = True, OpenToolCalls()
    for index, message in enumerate(asked.messages):
        if not (len(message) == 2 and message.get("role") in ROLES and isinstance(message.get("content"), str)):
            message, plain = _message(message, f"messages[{index}]", calls), False
        messages.append(message)  # most are plain: nothing else can be wrong with them
    if not plain:
        messages, images = take_images(messages)
    continues, generation_prompt = _continuation(asked)
    messages = fields.begun(messages) if continues else messages
    reasoning = asked.reasoning or {}
    shows_reasoning = asked.include_reasoning is not False
    if reasoning:
        shows_reasoning = shows_reasoning and not fields.read(OpenRouterReasoning, reasoning, "reasoning").exclude
    usage = usage_options(asked)
    request = CompletionRequest(
        model=asked.model or "",
        messages=messages,
        images=images,
        tools=tools,
        parse_tools=parse_tools,
        one_tool_call=asked.parallel_tool_calls is False or bool(asked.functions),
        max_tokens=_max_tokens(asked),
        stop=fields.stops(asked.stop),
        include_stop=bool(asked.include_stop_str_in_output),
        n=asked.n or 1,
        echoed=_last_text(messages) if asked.echo else "",
        seed=asked.seed,
        logprobs=bool(asked.logprobs),
        top_logprobs=_top_logprobs(asked),
        **fields.token_options(asked),
        stream=bool(asked.stream),
        include_usage=bool(usage.include_usage),
        continuous_usage=bool(usage.include_usage and usage.continuous_usage_stats),
        include_reasoning=shows_reasoning,
        forced=fields.forced(data),
        not_applied=details(images) if images else {},
        unsupported={**generation_prompt, **other_tools},
        grammar={"tool_call": tool_call} if tool_call else {},
        echo={LEGACY: True} if asked.functions else {},
    )
    return request if data.keys() <= PLAIN else _with_rarer_fields(request, asked, data, tool_call)


def _with_rarer_fields(
    request: CompletionRequest, asked: ChatRequest, data: JSON, tool_call: JSON
) -> CompletionRequest:
    """The request with what its other fields say: most requests have none of these."""
    reasoning = asked.reasoning or {}
    return replace(
        request,
        refused={
            **fields.reserved_variables(asked.chat_template_kwargs),
            **fields.engine_refused(data),
        },
        template_kwargs={
            **fields.given(data, ("documents", "enable_thinking"), neutral=(None, [])),
            **(asked.chat_template_kwargs or {}),
        },
        not_applied={
            **fields.not_applied(data, NOT_APPLIED),
            **fields.not_applied(reasoning, ("effort",), "reasoning"),
            **request.not_applied,
        },
        unsupported={
            **fields.unsupported(data, UNSUPPORTED_PARAMS),
            **fields.unsupported(reasoning, REASONING, "reasoning"),
            **request.unsupported,
        },
        grammar=fields.combined(tool_call, fields.content(asked.response_format), fields.structured_outputs(data)),
        logits=fields.logits(asked),
    )


def body(request: CompletionRequest, completion: Completion) -> bytes:
    choices = [
        {
            "index": index,
            "message": {**_message_of(choice, request), "refusal": None},
            "logprobs": _logprobs(request, choice.logprobs),
            "finish_reason": _finish_reason(choice, request),
            **choice_ids(request, choice),
        }
        for index, choice in enumerate(completion.choices)
    ]
    head = _frame("chat.completion", completion.call_id, completion.model, completion.created_s)
    told = {"choices": choices, "usage": usage(completion), **_prompt_details(request, completion)}
    return orjson.dumps({**head, **told})


def stream(request: CompletionRequest, call_id: str, model: str, created_s: int, prompt_tokens: int) -> EventStream:
    frame = _frame("chat.completion.chunk", call_id, model, created_s)
    return _ChatEvents(request, frame, prompt_tokens)


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
        choice = first_choice(data)
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


class _ExternalMessage(Struct):
    role: str
    content: str | list[Any] | None = None
    tool_calls: list[Any] | None = None


class _ExternalChat(fields.ExternalRequest):
    messages: list[_ExternalMessage] | None = None


def _external_request(data: JSON) -> CompletionRequest:
    """The recorded fields of a request that is passed on as it is: all else is left to the external model to judge."""
    options, tools = data.get("stream_options"), data.get("tools")
    asked = fields.read(_ExternalChat, {**data, "tools": None})
    return CompletionRequest(
        model=asked.model or "",
        messages=data.get("messages") or [],
        tools=[tool for tool in tools if isinstance(tool, dict)] or None if isinstance(tools, list) else None,
        stream=bool(asked.stream),
        include_usage=bool(isinstance(options, dict) and options.get("include_usage")),
    )


def _tools(asked: ChatRequest) -> tuple[list[JSON] | None, JSON]:
    """Function tools (None where there are none), and the tools that are no functions, by path."""
    if asked.functions:
        if asked.tools:
            raise ApiError("functions: the older name of tools; expected one of them, got both", param="functions")
        for index, function in enumerate(asked.functions):
            fields.read(fields.FunctionTool, function, f"functions[{index}]")
        return [{"type": "function", "function": one} for one in asked.functions], {}
    if not asked.tools:
        return None, {}
    functions, others = fields.split_tools(asked.tools)
    for where, tool in functions.items():
        if tool.get("function") is None:
            raise expected('{"type": "function", "function": {"name": …}}', tool, where)
        fields.read(fields.FunctionTool, tool["function"], f"{where}.function")
    return list(functions.values()) or None, others


def _tool_choice(data: JSON, tools: list[JSON] | None) -> tuple[bool, JSON]:
    """The same by `tool_choice`, or by `function_call`, its older name."""
    older = data.get("function_call")
    if older is None or data.get("tool_choice") is not None:
        return tool_choice(data.get("tool_choice"), tools)
    if older not in ("auto", "none") and not (isinstance(older, dict) and isinstance(older.get("name"), str)):
        raise expected('"auto", "none" or {"name": …}', older, "function_call")
    return tool_choice({**older, "type": "function"} if isinstance(older, dict) else older, tools, "function_call")


def tool_choice(value: Any, tools: list[JSON] | None, field: str = "tool_choice") -> tuple[bool, JSON]:
    """(tool calls are parsed, `tool_call` of the grammar)."""
    if value == "none":
        return False, {}
    known = value in (None, "auto", "required") or (
        isinstance(value, dict) and value.get("type") in ("function", "allowed_tools", "custom")
    )
    if not known:
        raise expected(
            '"auto", "none", "required", or an object of type "function" or "allowed_tools"', value, "tool_choice"
        )
    if tools is None and value in (None, "auto"):
        return False, {}
    return tools is not None, fields.tool_call(value, tools, field)


def _continuation(asked: ChatRequest) -> tuple[bool, JSON]:
    """(the completion continues the last message, `add_generation_prompt` where that is not honoured), as vLLM has them."""
    continues, opens = bool(asked.continue_final_message), asked.add_generation_prompt is not False
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


def _max_tokens(asked: ChatRequest) -> int | None:
    newer, older = asked.max_completion_tokens, asked.max_tokens
    if newer is not None and older is not None and newer != older:
        raise ApiError(
            f"max_tokens: the older name of max_completion_tokens; expected one of them, got {older} and {newer}",
            param="max_tokens",
        )
    return newer if newer is not None else older


def _top_logprobs(asked: ChatRequest) -> int:
    if asked.top_logprobs and not asked.logprobs:
        raise ApiError('top_logprobs: only allowed where "logprobs" is true', param="top_logprobs")
    return asked.top_logprobs or 0


class _Function(Struct):
    name: str
    arguments: fields.Arguments


class _ToolCall(Struct):
    function: _Function
    id: fields.Text = None


class ChatMessage(Struct):
    """The fields of a message that are read; its content may hold images."""

    role: Annotated[
        Literal["assistant", "developer", "function", "system", "tool", "user"],
        Meta(description="one of assistant, developer, system, tool, user"),
    ]
    tool_call_id: fields.Text = None
    reasoning_content: fields.Text = None
    name: fields.Text = None
    refusal: fields.Text = None
    tool_calls: list[JSON] | None = None
    function_call: fields.Record = None


def _message(given: JSON, where: str, calls: OpenToolCalls) -> JSON:
    """The message, if it is one; a refusal that it repeats is its content. `calls` are the tool calls before it."""
    read = fields.read(ChatMessage, given, where)
    message = {
        name: value for name, value in given.items() if name != PREFILL
    }  # the gateway's mark means nothing in a request
    if "content" in message:
        results = ("user", "tool", "function")
        message["content"] = _content(message["content"], f"{where}.content", images=read.role in results)
    if message.get("audio") is not None:
        raise fields.refused(f"{where}.audio", f"not supported; {NO_AUDIO}")
    if read.role in ("tool", "function"):
        message["role"] = "tool"
        if answered := calls.answered(read.tool_call_id, read.name or ""):
            message["tool_call_id"] = answered
    older = message.pop("function_call", None)
    if read.tool_calls and older:
        raise fields.refused(f"{where}.function_call", "expected none beside tool_calls")
    if read.tool_calls:
        places = [f"{where}.tool_calls[{index}]" for index in range(len(read.tool_calls))]
        made = [_tool_call(call, place, calls) for call, place in zip(read.tool_calls, places, strict=True)]
        message["tool_calls"] = made
    elif older is not None:
        function = fields.read(_Function, older, f"{where}.function_call")
        written = {"name": function.name, "arguments": fields.arguments_text(function.arguments)}
        message["tool_calls"] = [{"id": calls.call(None, function.name), "type": "function", "function": written}]
    if read.reasoning_content is None and isinstance(message.get("reasoning"), str):
        message["reasoning_content"] = message["reasoning"]
    if read.refusal and not message.get("content"):
        message["content"] = read.refusal
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


def _tool_call(call: JSON, where: str, calls: OpenToolCalls) -> JSON:
    """The tool call with arguments as text and with an id."""
    if not isinstance(call.get("function"), dict) or call.get("type", "function") != "function":
        raise expected('{"id", "type": "function", "function": {"name", "arguments"}}', call, where)
    read = fields.read(_ToolCall, call, where)
    call_id = calls.call(read.id, read.function.name)
    if read.id and isinstance(read.function.arguments, str):
        return call
    function = {**call["function"], "arguments": fields.arguments_text(read.function.arguments)}
    return {"type": "function", **call, "id": call_id, "function": function}


# --- what OpenAI's protocols have in common -----------------------------------------------------------------------------


def error(refusal: ApiError) -> bytes:
    told = {"message": refusal.message, "type": refusal.type, "param": refusal.param, "code": refusal.code}
    return orjson.dumps({"error": told})


def usage_options(asked: fields.IdsRequest) -> fields.StreamOptions:
    """The chunks with token counts that are requested; stream options without a stream are refused, as OpenAI does."""
    if asked.stream_options is None:
        return fields.StreamOptions()
    if not asked.stream:
        raise ApiError('stream_options: only allowed where "stream" is true', param="stream_options")
    return fields.read(fields.StreamOptions, asked.stream_options, "stream_options")


def usage(completion: Completion) -> JSON:
    """The token counts of a completion."""
    prompt_tokens, sampled_tokens = completion.prompt_tokens, completion.sampled_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled_tokens,
        "total_tokens": prompt_tokens + sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": completion.reasoning_tokens},
    }


def choice_ids(request: CompletionRequest, choice: Choice) -> JSON:
    """The ids of a choice, null where the request says that it wants none, nothing where it does not say."""
    if request.return_token_ids is None:
        return {}
    return {"token_ids": choice.token_ids if request.return_token_ids else None}


def shown(request: CompletionRequest, tokens: tuple[TokenLogprob, ...]) -> Sequence[TokenLogprob]:
    """Tokens with their texts, or with the names of their ids where the request asks for those."""
    return [one.named() for one in tokens] if request.tokens_as_ids else tokens


class ChunkStream(ABC):
    """The chunks of a streamed response, as far as both protocols have the same.

    The last text of a choice waits for the finish reason and goes out in one chunk with it, as vLLM has it.
    """

    def __init__(self, request: CompletionRequest, frame: JSON, prompt_tokens: int) -> None:
        self._request = request
        self._count = request.n
        self._usage = request.include_usage
        self._frame = {**frame, "usage": None} if self._usage else frame
        self._ends: dict[int, Delta] = {}
        """The last of each choice."""
        self._prompt_tokens = prompt_tokens
        self._sampled: dict[int, int] | None = {} if request.continuous_usage else None
        """Sampled tokens so far, by choice, where every chunk has the counts."""

    def finish_reason(self, choice: Choice) -> str:
        """The reason as the protocol has it."""
        return choice.finish_reason

    @abstractmethod
    def parts(self, index: int, delta: Delta) -> list[JSON]:
        """The parts of choice `index` that a delta says, one for each chunk; at least one where it is the last."""

    def delta(self, index: int, delta: Delta) -> bytes:
        """More of choice `index`."""
        if delta.last:
            self._ends[index] = delta
            return b""
        return b"".join(self._chunks(index, delta))

    def last(self, completion: Completion) -> bytes:
        """The last texts with their finish reasons, the usage where asked for, and the end mark."""
        parts: list[bytes] = []
        for index, choice in enumerate(completion.choices):
            end = self._ends.get(index, Delta(last=True))
            ended = replace(end, sampled_tokens=choice.sampled_tokens)
            parts += self._chunks(index, ended, self.finish_reason(choice))
        if self._usage:
            parts.append(sse_event({**self._frame, "choices": [], "usage": usage(completion)}))
        parts.append(SSE_DONE)
        return b"".join(parts)

    def failed(self, refusal: ApiError) -> bytes:
        return b"data: " + error(refusal) + b"\n\n"

    def chunk(self, index: int, part: JSON, finish_reason: str | None = None, **more: Any) -> bytes:
        """A chunk with this part of a choice, and with what else it has."""
        choice = {"index": index, **part, "logprobs": part.get("logprobs"), "finish_reason": finish_reason}
        counts = {} if self._sampled is None else self._counts(self._sampled)
        return sse_event({**self._frame, "choices": [choice], **counts, **more})

    def _chunks(self, index: int, delta: Delta, finish_reason: str | None = None) -> list[bytes]:
        if self._sampled is not None:
            self._sampled[index] = delta.sampled_tokens
        parts = self.parts(index, delta)
        chunks = []
        for at, part in enumerate(parts, 1):
            chunks.append(self.chunk(index, part, finish_reason if at == len(parts) else None))
        return chunks

    def _counts(self, sampled: dict[int, int]) -> JSON:
        tokens = sum(sampled.values())
        counts = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self._prompt_tokens + tokens,
        }
        return {"usage": counts}


def logprob_list(tokens: Sequence[TokenLogprob]) -> list[JSON]:
    """Tokens with their alternatives, as Chat Completions and Responses list them."""

    def entry(token: TokenLogprob) -> JSON:
        return {"token": token.text, "logprob": token.logprob, "bytes": list(token.utf8)}

    return [{**entry(one), "top_logprobs": [entry(other) for other in one.top]} for one in tokens]


def first_choice(data: Any) -> JSON:
    """Choice 0 of what an external model sent; empty where there is none."""
    choices = data.get("choices") if isinstance(data, dict) else None
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and choice.get("index", 0) == 0:
            return choice
    return {}


# --- building -----------------------------------------------------------------------------------------------------------


class _ChatEvents(ChunkStream):
    def first(self) -> bytes:
        """Opens every choice, in order: SDKs number them as they come."""
        opening = {"delta": {"role": "assistant", "content": ""}}
        ids: JSON = {} if self._request.planned_ids is None else {"prompt_token_ids": self._request.planned_ids}
        chunks = [self.chunk(index, opening, **({} if index else ids)) for index in range(self._count)]
        if echoed := self._request.echoed:
            chunks += [self.chunk(index, {"delta": {"content": echoed}}) for index in range(self._count)]
        return b"".join(chunks)

    def finish_reason(self, choice: Choice) -> str:
        return _finish_reason(choice, self._request)

    def parts(self, index: int, delta: Delta) -> list[JSON]:
        """A part for each kind of text, since many clients read only one kind from each; and one without for the finish
        reason of tool calls, at which some stop reading, as OpenAI sends it."""
        said: list[JSON] = []
        if delta.reasoning and self._request.include_reasoning:
            said.append({"reasoning": delta.reasoning, "reasoning_content": delta.reasoning})
        if delta.content or ((delta.logprobs or delta.token_ids) and not said and not delta.tools):
            said.append({"content": delta.content})
        for tool in delta.tools:
            older = self._request.echo.get(LEGACY)
            said.append({"function_call": _function_delta(tool)} if older else {"tool_calls": [_tool_delta(tool)]})
        if delta.last and (delta.tools or not said):
            said.append({})
        parts: list[JSON] = []
        for one in said:
            parts.append({"delta": one})
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
    if choice.tool_calls and request.echo.get(LEGACY):
        message["function_call"] = message.pop("tool_calls")[0]["function"]
    return message


def _finish_reason(choice: Choice, request: CompletionRequest) -> str:
    older = choice.finish_reason == "tool_calls" and request.echo.get(LEGACY)
    return "function_call" if older else choice.finish_reason


def _frame(kind: str, call_id: str, model: str, created_s: int) -> JSON:
    return {"id": f"chatcmpl-{call_id}", "object": kind, "created": created_s, "model": model}


def _tool_delta(tool: ToolDelta) -> JSON:
    opened = {} if tool.id is None and tool.name is None else {"id": tool.id, "type": "function"}
    return {"index": tool.index, **opened, "function": _function_delta(tool)}


def _function_delta(tool: ToolDelta) -> JSON:
    named = {} if tool.name is None else {"name": tool.name}
    return {**named, "arguments": tool.arguments}


def _logprobs(request: CompletionRequest, tokens: tuple[TokenLogprob, ...] | None) -> JSON | None:
    if tokens is None:
        return None
    return {"content": logprob_list(shown(request, tokens)), "refusal": None}


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
    return json_text.dumps(value).decode() if isinstance(value, dict) else _read_text(value) or ""
