"""Ollama's ``/api/chat``: JSON <-> CompletionRequest, Completion, Delta, ApiError. Pure.

Driven by the gateway, which chooses the protocol by route. A request is read as one of Chat Completions once its options
have OpenAI's names; the response is one JSON object, or a line of JSON for each piece of a stream, which is the default.
Options that concern Ollama's own server (num_ctx, num_gpu, keep_alive, …) are passed over.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any

import orjson
from msgspec import Meta

from agentlightning.protocols import chat, fields
from agentlightning.protocols.base import (
    ApiError,
    Choice,
    Completion,
    CompletionRequest,
    Delta,
    EventStream,
    TokenLogprob,
    assistant_message,
)
from agentlightning.protocols.fields import expected
from agentlightning.protocols.messages import tool_input
from agentlightning.protocols.openai_shapes import logprob_list
from agentlightning.records import JSON
from agentlightning.runtime import json_text

NAME = "ollama"

LINES = b"application/x-ndjson"

VERSION = b'{"version":"0.12.11"}'
"""Of the API that is spoken here."""

UNSUPPORTED_OPTIONS: dict[str, tuple[Any, ...]] = {"typical_p": (1,), "tfs_z": (1,), "mirostat": (0,)}
"""Options that change the sampled distribution, with the values that change nothing."""


class OllamaRequest(fields.ExternalRequest, kw_only=True):
    messages: list[JSON] | None = None
    options: fields.Record = None
    format: Annotated[str | JSON, Meta(description='"json" or a JSON schema')] | None = None
    think: bool | str | None = None
    logprobs: fields.Flag = None
    top_logprobs: fields.Alternatives = None


class Options(fields.SampledRequest, kw_only=True):
    """Those that are read; `stop`, `seed` and most others have the names that they have in OpenAI's API."""

    num_predict: Annotated[int, Meta(ge=-2, le=fields.MAX_INTEGER)] | None = None
    """Tokens of the completion; below 0 as many as fit."""
    repeat_penalty: fields.Repetition = None


def parse(data: JSON, trained: bool = True) -> CompletionRequest:
    asked = fields.read(OllamaRequest, data)
    stream = asked.stream is not False
    if not trained:
        return replace(chat.parse(data, trained=False), stream=stream, stream_type=LINES)
    given = asked.options or {}
    options = fields.read(Options, given, "options")
    messages = [_message(message, f"messages[{index}]") for index, message in enumerate(asked.messages or ())]
    read = chat.parse({"model": asked.model, "messages": messages, "tools": asked.tools})
    return replace(
        read,
        max_tokens=options.num_predict if (options.num_predict or 0) > 0 else None,
        stop=fields.stops(options.stop, "options.stop"),
        seed=options.seed,
        logprobs=bool(asked.logprobs),
        top_logprobs=asked.top_logprobs or 0,
        stream=stream,
        stream_type=LINES,
        include_reasoning=asked.think is not False,
        forced=fields.forced(given),
        not_applied={**read.not_applied, **fields.not_applied(data, ("think",))},
        unsupported={**read.unsupported, **fields.unsupported(given, UNSUPPORTED_OPTIONS, "options")},
        grammar=fields.combined(read.grammar.get("tool_call", {}), _format(asked.format)),
        logits=fields.logits(options)
        | ({"repetition_penalty": penalty} if (penalty := options.repeat_penalty) and penalty != 1 else {}),
    )


def body(request: CompletionRequest, completion: Completion) -> bytes:
    message = _message_of(completion.choices[0], request)
    return json_text.dumps({**_frame(completion.model, completion.created_s), "message": message, **_end(completion)})


def stream(request: CompletionRequest, call_id: str, model: str, created_s: int, prompt_tokens: int) -> EventStream:
    return _Lines(request, _frame(model, created_s))


def error(refusal: ApiError) -> bytes:
    return orjson.dumps({"error": refusal.message})


def models(names: list[str], created_s: int) -> bytes:
    """The body of GET /api/tags."""
    modified = _time(created_s)
    return orjson.dumps({"models": [{"name": name, "model": name, "modified_at": modified} for name in names]})


reader = chat.ChatReader


# --- parsing ------------------------------------------------------------------------------------------------------------


def _message(given: JSON, where: str) -> JSON:
    """The message in the form of Chat Completions, where images are parts and a result has the tool's name as its own."""
    message = {name: value for name, value in given.items() if name not in ("images", "thinking", "tool_name")}
    if given.get("tool_name") is not None:
        message["name"] = given["tool_name"]
    if isinstance(given.get("thinking"), str):
        message["reasoning_content"] = given["thinking"]
    images = given.get("images")
    if not images:
        return message
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise expected("a list of image files in base64", images, "images", where)
    parts = [{"type": "image_url", "image_url": f"data:;base64,{image}"} for image in images]
    return {**message, "content": [{"type": "text", "text": message.get("content") or ""}, *parts]}


def _format(given: str | JSON | None) -> JSON:
    if isinstance(given, dict):
        return fields.content({"type": "json_schema", "json_schema": {"schema": given}}, "format")
    if given not in (None, "", "json"):
        raise expected('"json" or a JSON schema', given, "format")
    return fields.content({"type": "json_object"} if given else None, "format")


# --- building -----------------------------------------------------------------------------------------------------------


def _time(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _frame(model: str, created_s: int) -> JSON:
    return {"model": model, "created_at": _time(created_s)}


def _end(completion: Completion) -> JSON:
    """Fields of the last piece."""
    choice = completion.choices[0]
    lasted_ns = max(0, (completion.completed_s or completion.created_s) - completion.created_s) * 10**9
    return {
        **_logprobs(choice.logprobs),
        "done": True,
        "done_reason": "length" if choice.finish_reason == "length" else "stop",
        "total_duration": lasted_ns,
        "load_duration": 0,
        "prompt_eval_count": completion.prompt_tokens,
        "prompt_eval_duration": 0,
        "eval_count": completion.sampled_tokens,
        "eval_duration": lasted_ns,
    }


def _logprobs(tokens: tuple[TokenLogprob, ...] | None) -> JSON:
    return {"logprobs": logprob_list(tokens)} if tokens else {}


def _message_of(choice: Choice, request: CompletionRequest) -> JSON:
    said = assistant_message(choice)
    message: JSON = {"role": "assistant", "content": said["content"] or ""}
    if choice.reasoning and request.include_reasoning:
        message["thinking"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [_call(one.id, one.name, one.arguments) for one in choice.tool_calls]
    return message


def _call(call_id: str, name: str, arguments: str) -> JSON:
    return {"id": call_id, "function": {"name": name, "arguments": tool_input(arguments)}}


class _Lines:
    """The lines of one streamed response. A tool call goes out once it is whole."""

    def __init__(self, request: CompletionRequest, frame: JSON) -> None:
        self._request = request
        self._frame = frame
        self._calls: list[tuple[str, str, list[str]]] = []
        """Id, name and pieces of the arguments of tool calls that were not sent yet."""

    def first(self) -> bytes:
        """Nothing: a response has no opening of its own."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """More thinking, text or tool calls. There is one choice."""
        for tool in delta.tools:
            if tool.name is not None:
                self._calls.append((tool.id or "", tool.name, []))
            if self._calls:
                self._calls[-1][2].append(tool.arguments)
        message: JSON = {"role": "assistant", "content": delta.content}
        if delta.reasoning and self._request.include_reasoning:
            message["thinking"] = delta.reasoning
        if len(message) == 2 and not delta.content and not delta.logprobs:
            return b""
        return self._line({"message": message, **_logprobs(delta.logprobs), "done": False})

    def last(self, completion: Completion) -> bytes:
        """The tool calls, and the end."""
        said: JSON = {"role": "assistant", "content": ""}
        lines = b""
        if self._calls:
            calls = [_call(call_id, name, "".join(pieces)) for call_id, name, pieces in self._calls]
            lines = self._line({"message": {**said, "tool_calls": calls}, "done": False})
        end = _end(completion)
        end.pop("logprobs", None)  # they went out with their tokens
        return lines + self._line({"message": said, **end})

    def failed(self, refusal: ApiError) -> bytes:
        return error(refusal) + b"\n"

    def _line(self, data: JSON) -> bytes:
        return json_text.dumps({**self._frame, **data}) + b"\n"
