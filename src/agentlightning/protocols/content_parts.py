"""Contents of Google generateContent: parts as messages, completions as parts, whole or streamed, and what external models
respond. Pure.

A function call's arguments are an object here, as in Anthropic Messages: what is no JSON object travels under ``_arguments``
(message_blocks.py). A call goes out once its arguments are whole, as Google's own models send them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import orjson
from msgspec import Struct

from agentlightning.protocols import fields, sse
from agentlightning.protocols.base import (
    ApiError,
    Choice,
    Completion,
    CompletionReader,
    Delta,
    TokenLogprob,
    ToolDelta,
    short,
)
from agentlightning.protocols.fields import expected
from agentlightning.protocols.images import blob_part
from agentlightning.protocols.message_blocks import arguments_text, tool_input
from agentlightning.records import JSON

FINISH_REASONS = {"length": "MAX_TOKENS"}
"""All else is STOP, calls of functions too."""

READ_REASONS = {"MAX_TOKENS": "length", "STOP": "stop"}

ROLES = ("user", "model", "function")

_SNAKE = re.compile(r"_([a-z0-9])")


def camel_keys(record: JSON) -> JSON:
    """The record with its own field names in camel case: Google reads both.

    >>> camel_keys({"system_instruction": {"parts": []}, "topK": 3})
    {'systemInstruction': {'parts': []}, 'topK': 3}
    """
    if not any("_" in name for name in record):
        return dict(record)
    return {_SNAKE.sub(lambda found: found[1].upper(), name): value for name, value in record.items()}


# --- requests -----------------------------------------------------------------------------------------------------------


def messages_of(contents: Any, trained: bool) -> list[JSON]:
    """Contents as messages in the form of Chat Completions. Raises ApiError."""
    if not isinstance(contents, list) or (trained and not contents):
        if contents is None and not trained:
            return []
        raise expected("a list of at least one content", contents, "contents")
    history = _History(trained)
    for index, content in enumerate(contents):
        history.add(content, f"contents[{index}]")
    return history.messages


def text_of(content: JSON, where: str, trained: bool) -> Any:
    """The text of a content; its parts, where an external model reads others."""
    parts = [
        _part(part, f"{where}.parts[{at}]") for at, part in enumerate(fields.read(_Parts, content, where).parts or ())
    ]
    for at, part in enumerate(parts):
        if trained and not _is_text(part):
            raise _not_text(part, f"{where}.parts[{at}]")
    return _joined(parts)


class _Parts(Struct):
    parts: list[Any] | None = None


class _FunctionCall(Struct):
    id: fields.Text = None
    name: fields.Text = None
    args: fields.Record = None


class _FunctionResponse(Struct):
    id: fields.Text = None
    name: fields.Text = None
    response: fields.Record = None
    parts: list[Any] | None = None


class _History:
    """Messages so far. Consecutive contents of the model are one message: SDKs keep each chunk of a stream as a content."""

    def __init__(self, trained: bool) -> None:
        self.messages: list[JSON] = []
        self._trained = trained
        self._calls = 0
        self._unanswered: list[tuple[str, str]] = []
        """Id and name of function calls without a response yet."""

    def add(self, content: Any, where: str) -> None:
        """Take in one content."""
        if not isinstance(content, dict):
            raise expected("an object", content, where)
        role = content.get("role") or "user"
        if role not in ROLES:
            raise expected("user or model", role, "role", where)
        given = enumerate(fields.read(_Parts, content, where).parts or ())
        parts = [(_part(part, f"{where}.parts[{at}]"), f"{where}.parts[{at}]") for at, part in given]
        if role == "model":
            self._add_model(parts)
        else:
            self._add_user(parts)

    def _add_model(self, parts: list[tuple[JSON, str]]) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": None})
        message = self.messages[-1]
        for part, where in parts:
            if part.get("functionCall") is not None:
                message.setdefault("tool_calls", []).append(self._call(part, where))
            elif part.get("thought") is True and isinstance(part.get("text"), str):
                message["reasoning_content"] = message.get("reasoning_content", "") + part["text"]
            elif _is_text(part):
                _append(message, part.get("text", ""))
            elif self._trained:
                raise _not_text(part, where)
            else:
                _append(message, [part])
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""

    def _call(self, part: JSON, where: str) -> JSON:
        where = f"{where}.functionCall"
        call = fields.read(_FunctionCall, camel_keys(_record(part["functionCall"], where)), where)
        name, call_id = call.name or "", call.id or f"call_{self._calls}"
        self._calls += 1
        self._unanswered.append((call_id, name))
        arguments = arguments_text(call.args or {})
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _add_user(self, parts: list[tuple[JSON, str]]) -> None:
        said: list[JSON] = []
        answered = False
        for part, where in parts:
            if part.get("functionResponse") is not None:
                self.messages.append(self._result(part, where))
                answered = True
            else:
                said.append(_image(part, where) if self._trained and not _is_text(part) else part)
        if said or not answered:
            self.messages.append({"role": "user", "content": _joined(said)})

    def _result(self, part: JSON, where: str) -> JSON:
        where = f"{where}.functionResponse"
        given = fields.read(_FunctionResponse, camel_keys(_record(part["functionResponse"], where)), where)
        result, inner = given.response or {}, given.parts or []
        if self._trained:
            places = [f"{where}.parts[{at}]" for at in range(len(inner))]
            inner = [_image(_part(one, place), place) for one, place in zip(inner, places, strict=True)]
        text = _result_text(result)
        message: JSON = {
            "role": "tool",
            "tool_call_id": self._answered(given.id, given.name or ""),
            "content": _joined([{"text": text}, *inner]) if inner else text,
        }
        if "error" in result and "output" not in result:
            message["is_error"] = True
        return message

    def _answered(self, given: str | None, name: str) -> str:
        """The id of the call that a response answers: by its id, else the first open one of that name, else of any."""
        named = next((one for one in self._unanswered if one[0] == given or (not given and one[1] == name)), None)
        found = named or (self._unanswered[0] if self._unanswered and not given else None)
        if found is None:
            return given or name
        self._unanswered.remove(found)
        return found[0]


def _result_text(result: JSON) -> str:
    """The text that a function returned, under `output` or `error`, or else the whole response."""
    for name in ("output", "error"):
        if name in result and len(result) == 1:
            value = result[name]
            return value if isinstance(value, str) else orjson.dumps(value).decode()
    return orjson.dumps(result).decode()


def _part(part: Any, where: str) -> JSON:
    return camel_keys(_record(part, where))


def _record(value: Any, where: str) -> JSON:
    if not isinstance(value, dict):
        raise expected("an object", value, where)
    return value


def _is_text(part: JSON) -> bool:
    """True for a text, and for a part that has nothing but a signature."""
    others = part.keys() - {"text", "thought", "thoughtSignature", "partMetadata", "videoMetadata"}
    if any(part[name] is not None for name in others):
        return False
    return isinstance(part.get("text", ""), str)


def _append(message: JSON, more: str | list[JSON]) -> None:
    before = message["content"]
    if isinstance(more, str) and isinstance(before, str | None):
        message["content"] = (before or "") + more
    else:
        listed = before if isinstance(before, list) else [] if before is None else [{"text": before}]
        message["content"] = [*listed, *([{"text": more}] if isinstance(more, str) else more)]


def _joined(parts: list[JSON]) -> str | list[JSON]:
    """One text where all parts are text; else the parts: with images in our form, or as an external model reads them."""
    if all(_is_text(part) for part in parts):
        return "".join(part.get("text", "") for part in parts)
    if any(part.get("type") == "image" for part in parts):
        return [{"type": "text", "text": part.get("text", "")} if _is_text(part) else part for part in parts]
    return parts


def _image(part: JSON, where: str) -> JSON:
    found = blob_part(part, where)
    if found is None:
        raise _not_text(part, where)
    return found


def _not_text(part: Any, where: str) -> ApiError:
    what = "a text, an image of the user, a functionCall or a functionResponse, all that the trained policy reads"
    return fields.refused(where, f"expected {what}, got {short(part)}")


# --- responses ----------------------------------------------------------------------------------------------------------


def response(completion: Completion, *, thoughts: bool) -> JSON:
    """The response of a whole completion."""
    return {
        "candidates": [_candidate(index, choice, thoughts) for index, choice in enumerate(completion.choices)],
        "usageMetadata": usage(completion),
        "modelVersion": completion.model,
        "responseId": completion.call_id,
    }


def _candidate(index: int, choice: Choice, thoughts: bool) -> JSON:
    parts: list[JSON] = []
    if choice.reasoning and thoughts:
        parts.append({"text": choice.reasoning, "thought": True})
    if choice.content or not choice.tool_calls:
        parts.append({"text": choice.content or ""})
    parts += [_call_part(call.id, call.name, call.arguments) for call in choice.tool_calls]
    candidate: JSON = {"content": {"parts": parts, "role": "model"}, **_end(choice), "index": index}
    if choice.logprobs is not None:
        candidate |= _logprobs(choice.logprobs)
    return candidate


def _call_part(call_id: str, name: str, arguments: str) -> JSON:
    return {"functionCall": {"id": call_id, "name": name, "args": tool_input(arguments)}}


def _end(choice: Choice) -> JSON:
    return {"finishReason": FINISH_REASONS.get(choice.finish_reason, "STOP")}


def _logprobs(tokens: Sequence[TokenLogprob]) -> JSON:
    def entry(token: TokenLogprob) -> JSON:
        return {"token": token.text, "logProbability": token.logprob}

    return {
        "logprobsResult": {
            "topCandidates": [{"candidates": [entry(other) for other in one.top]} for one in tokens],
            "chosenCandidates": [entry(one) for one in tokens],
        },
    }


def usage(completion: Completion) -> JSON:
    """The token counts; those that continue an earlier call are counted as cached."""
    counts = {
        "promptTokenCount": completion.prompt_tokens,
        "candidatesTokenCount": completion.sampled_tokens,
        "totalTokenCount": completion.prompt_tokens + completion.sampled_tokens,
    }
    return {**counts, "cachedContentTokenCount": completion.cached_tokens} if completion.cached_tokens else counts


class CandidateEvents:
    """The chunks of one streamed response: each is a response that holds what is new."""

    def __init__(
        self, call_id: str, model: str, prompt_tokens: int, thoughts: bool, error: Callable[[ApiError], bytes]
    ) -> None:
        self._frame = {
            "usageMetadata": {"promptTokenCount": prompt_tokens, "totalTokenCount": prompt_tokens},
            "modelVersion": model,
            "responseId": call_id,
        }
        self._thoughts = thoughts
        self._error = error
        self._open: dict[int, tuple[str, str, list[str]]] = {}
        """By choice, the function call under way: id, name, pieces of its arguments."""
        self._logprobs: dict[int, list[TokenLogprob]] = {}
        """By choice, log-probabilities of tokens whose text is held back."""

    def first(self) -> bytes:
        """Nothing: a response has no opening of its own."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """More thoughts, text, or function calls of one choice."""
        if delta.logprobs:
            self._logprobs.setdefault(index, []).extend(delta.logprobs)
        parts: list[JSON] = []
        if delta.reasoning and self._thoughts:
            parts.append({"text": delta.reasoning, "thought": True})
        if delta.content:
            parts += self._closed(index)
            parts.append({"text": delta.content})
        for tool in delta.tools:
            parts += self._tool(index, tool)
        return self._chunk(index, parts) if parts else b""

    def last(self, completion: Completion) -> bytes:
        """The rest of every choice, why it ended, and the counts."""
        counts = {"usageMetadata": usage(completion)}
        return b"".join(
            self._chunk(index, self._closed(index) or [{"text": ""}], {**_end(choice)}, counts)
            for index, choice in enumerate(completion.choices)
        )

    def failed(self, refusal: ApiError) -> bytes:
        return b"data: " + self._error(refusal) + b"\n\n"

    def _tool(self, index: int, tool: ToolDelta) -> list[JSON]:
        closed: list[JSON] = []
        if tool.name is not None:
            closed = self._closed(index)
            self._open[index] = (tool.id or "", tool.name, [])
        if index in self._open:
            self._open[index][2].append(tool.arguments)
        return closed

    def _closed(self, index: int) -> list[JSON]:
        """The function call under way, which has ended."""
        if index not in self._open:
            return []
        call_id, name, pieces = self._open.pop(index)
        return [_call_part(call_id, name, "".join(pieces))]

    def _chunk(self, index: int, parts: list[JSON], end: JSON | None = None, counts: JSON | None = None) -> bytes:
        candidate: JSON = {"content": {"parts": parts, "role": "model"}, **(end or {}), "index": index}
        if tokens := self._logprobs.pop(index, None):
            candidate |= _logprobs(tokens)
        return sse.event({"candidates": [candidate], **self._frame, **(counts or {})})


# --- external models ----------------------------------------------------------------------------------------------------


class CandidateReader(CompletionReader):
    """The first candidate of an external model's response, whole or in chunks. Unknown fields are passed over."""

    def whole(self, body: JSON) -> None:
        self.event(body)

    def event(self, data: JSON) -> None:
        self.count_choices({"choices": data.get("candidates")}, "content")
        candidate = _first_candidate(data)
        content = candidate.get("content")
        parts = content.get("parts") if isinstance(content, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict):
                self._take(part)
        if isinstance(reason := candidate.get("finishReason"), str):
            self.finish_reason = READ_REASONS.get(reason, reason.lower())
            if reason == "STOP" and "tool_calls" in self.message:
                self.finish_reason = "tool_calls"
        self._count(data.get("usageMetadata"))

    def _take(self, part: JSON) -> None:
        call = part.get("functionCall")
        if isinstance(call, dict):
            args = call.get("args")
            calls = self.message.setdefault("tool_calls", [])
            function = {
                "name": str(call.get("name") or ""),
                "arguments": arguments_text(args if isinstance(args, dict) else {}),
            }
            call_id = str(call.get("id") or f"call_{len(calls)}")
            calls.append({"id": call_id, "type": "function", "function": function})
        else:
            self.add_text("reasoning_content" if part.get("thought") is True else "content", part.get("text"))

    def _count(self, given: Any) -> None:
        if isinstance(given, dict):
            sampled = [given.get(name) for name in ("candidatesTokenCount", "thoughtsTokenCount")]
            known = [number for number in sampled if isinstance(number, int)]
            counts = {"prompt": given.get("promptTokenCount"), "sampled": sum(known) if known else None}
            self.read_usage({"usage": counts}, "prompt", "sampled")


def _first_candidate(data: JSON) -> JSON:
    candidates = data.get("candidates")
    for candidate in candidates if isinstance(candidates, list) else ():
        if isinstance(candidate, dict) and not candidate.get("index"):
            return candidate
    return {}
