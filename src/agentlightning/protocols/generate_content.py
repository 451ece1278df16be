"""Google generateContent: JSON <-> CompletionRequest, Completion, Delta, ApiError; and what external models of this protocol
respond. Pure.

Driven by the gateway, which chooses the protocol by route and, since the path names the model and says whether to stream,
adds both to the body (`with_route`). Field names may be in camel case or in snake case, as Google reads them. The model's
thoughts are given where `thinkingConfig.includeThoughts` asks for them; budgets and levels of thinking, safety settings,
labels and service tiers are accepted without effect. Unknown fields are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from msgspec import Meta, Struct

from agentlightning.protocols import fields
from agentlightning.protocols.base import (
    EVENTS,
    ApiError,
    Choice,
    Completion,
    CompletionReader,
    CompletionRequest,
    Delta,
    EventStream,
    OpenToolCalls,
    TokenLogprob,
    ToolDelta,
    short,
    sse_event,
)
from agentlightning.protocols.fields import expected
from agentlightning.protocols.images import RESOLUTIONS, blob_part, details, take_images
from agentlightning.protocols.messages import arguments_text, tool_input
from agentlightning.records import JSON
from agentlightning.runtime import json_text

NAME = "generate_content"

CONFIG = "generationConfig"
CALLING = "functionCallingConfig"

UNSUPPORTED_PARAMS: Mapping[str, tuple[Any, ...]] = {
    "responseFormat": (), "responseModalities": ([], ["TEXT"]), "speechConfig": (), "imageConfig": (),
}  # fmt: skip
"""Fields of `generationConfig` that ask for another distribution than the trained policy's own."""

REFUSED = ("cachedContent",)
"""Fields for services that stand before Google's models, without which the response would be another."""

STATUSES = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 408: "DEADLINE_EXCEEDED",
    409: "ABORTED", 429: "RESOURCE_EXHAUSTED", 499: "CANCELLED", 500: "INTERNAL", 503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}  # fmt: skip


def with_route(data: JSON, model: str, streamed: bool = False, as_array: bool = False) -> JSON:
    """The body with what its path says. as_array: a stream is one JSON array of responses, no events."""
    return {**data, "model": model, "stream": streamed, "asArray": streamed and as_array}


class GenerateContentRequest(fields.ExternalRequest, rename="camel"):
    as_array: fields.Flag = None
    generation_config: fields.Record = None
    tool_config: fields.Record = None


class GenerationConfig(Struct, rename="camel"):
    temperature: fields.Temperature = None
    top_p: fields.Share = None
    top_k: fields.Whole = None
    seed: fields.Seed = None
    candidate_count: fields.Choices = None
    max_output_tokens: fields.Positive = None
    stop_sequences: Annotated[list[fields.Word], Meta(description="a list of strings, none empty")] | None = None
    presence_penalty: fields.Penalty = None
    frequency_penalty: fields.Penalty = None
    response_logprobs: fields.Flag = None
    logprobs: fields.Alternatives = None
    response_mime_type: fields.Text = None
    response_schema: fields.Record = None
    response_json_schema: fields.Record = None
    media_resolution: (
        Annotated[
            Literal[RESOLUTIONS], Meta(description=f"one of {', '.join(RESOLUTIONS)}")  # type: ignore[valid-type]
        ]
        | None
    ) = None
    thinking_config: fields.Record = None


class ThinkingConfig(Struct, rename="camel"):
    include_thoughts: fields.Flag = None


def parse(data: JSON, trained: bool = True) -> CompletionRequest:
    data = camel_keys(data)
    data["tools"] = _listed(data.get("tools"))
    asked = fields.read(GenerateContentRequest, data)
    system = data.get("systemInstruction")
    instruction = [] if system is None else [
        {"role": "system", "content": text_of(system, "systemInstruction", trained)}
    ]  # fmt: skip
    messages, images = take_images(instruction + messages_of(data.get("contents"), trained))
    stream_type = b"application/json" if asked.as_array else EVENTS
    if not trained:
        return CompletionRequest(
            model=asked.model or "",
            messages=messages,
            tools=_external_tools(asked.tools),
            stream=bool(asked.stream),
            stream_type=stream_type,
        )
    given = camel_keys(asked.generation_config or {})
    config = fields.read(GenerationConfig, given, CONFIG)
    tools, provider_tools = _tools(asked.tools)
    parse_tools, tool_call = _tool_choice(asked.tool_config, tools)
    if config.logprobs and not config.response_logprobs:
        raise ApiError(f'{CONFIG}.logprobs: only allowed where "responseLogprobs" is true', param=f"{CONFIG}.logprobs")
    thinking = fields.read(ThinkingConfig, camel_keys(config.thinking_config or {}), f"{CONFIG}.thinkingConfig")
    forced = {"temperature": config.temperature, "top_p": config.top_p}
    logits = {
        "presence_penalty": config.presence_penalty,
        "frequency_penalty": config.frequency_penalty,
        "top_k": config.top_k,
    }
    resolution = config.media_resolution not in (None, RESOLUTIONS[0])
    return CompletionRequest(
        model=asked.model or "",
        messages=messages,
        images=images,
        tools=tools,
        parse_tools=parse_tools,
        max_tokens=config.max_output_tokens,
        stop=fields.bounded(config.stop_sequences, f"{CONFIG}.stopSequences", fields.MAX_STOPS),
        n=config.candidate_count or 1,
        seed=config.seed,
        logprobs=bool(config.response_logprobs),
        top_logprobs=config.logprobs or 0,
        stream=bool(asked.stream),
        stream_type=stream_type,
        forced={name: value for name, value in forced.items() if value is not None},
        not_applied={
            **({f"{CONFIG}.mediaResolution": config.media_resolution} if resolution else {}),
            **details(images, "mediaResolution"),
        },
        refused=fields.services(data, REFUSED),
        unsupported={**fields.unsupported(given, UNSUPPORTED_PARAMS, CONFIG), **provider_tools},
        grammar=fields.combined(tool_call, _format(config)),
        logits={name: value for name, value in logits.items() if value},
        echo={"_thoughts": bool(thinking.include_thoughts)},
    )


def body(request: CompletionRequest, completion: Completion) -> bytes:
    return json_text.dumps(response(completion, thoughts=bool(request.echo.get("_thoughts"))))


def stream(request: CompletionRequest, call_id: str, model: str, created_s: int, prompt_tokens: int) -> EventStream:
    thoughts, as_array = bool(request.echo.get("_thoughts")), request.stream_type != EVENTS
    return CandidateEvents(call_id, model, prompt_tokens, thoughts, as_array)


def error(refusal: ApiError) -> bytes:
    status = refusal.status
    known = "UNAVAILABLE" if status >= 500 else "INVALID_ARGUMENT"
    said: JSON = {"code": status, "message": refusal.message, "status": STATUSES.get(status, known)}
    details: list[JSON] = []
    if refusal.param is not None:
        violation = {"field": refusal.param, "description": refusal.message}
        details.append({"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [violation]})
    if refusal.retry_after_s is not None:
        delay = f"{refusal.retry_after_s}s"
        details.append({"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": delay})
    return orjson.dumps({"error": {**said, "details": details} if details else said})


class _CountRequest(Struct, rename="camel"):
    generate_content_request: fields.Record = None


def count_request(data: JSON) -> JSON:
    """The request whose tokens POST models/{name}:countTokens counts: the body itself, or the one that it holds."""
    data = camel_keys(data)
    inner = fields.read(_CountRequest, data).generate_content_request
    return data if inner is None else inner


def count(tokens: int) -> bytes:
    """The body of POST models/{name}:countTokens."""
    return orjson.dumps({"totalTokens": tokens, "promptTokensDetails": [{"modality": "TEXT", "tokenCount": tokens}]})


def models(names: list[str], created_s: int) -> bytes:
    """The body of GET models, which has no place for the time of their making."""
    return orjson.dumps({"models": [_model(name) for name in names]})


def model(name: str, created_s: int) -> bytes:
    """The body of GET models/{name}."""
    return orjson.dumps(_model(name))


def external_settings(data: JSON) -> JSON:
    """The settings of a request to an external model under the names of Chat Completions, for limits and the record."""
    config = data.get(CONFIG) or data.get("generation_config")
    given = camel_keys(config) if isinstance(config, dict) else {}
    names = {"n": "candidateCount", "max_tokens": "maxOutputTokens", "temperature": "temperature", "top_p": "topP"}
    return {ours: given[theirs] for ours, theirs in names.items() if given.get(theirs) is not None}


def _model(name: str) -> JSON:
    return {
        "name": f"models/{name}",
        "version": "1",
        "displayName": name,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }


# --- parsing ------------------------------------------------------------------------------------------------------------


class _Declarations(Struct, rename="camel"):
    function_declarations: list[Any] | None = None


class _Declaration(Struct, rename="camel"):
    name: Annotated[str, Meta(min_length=1, description="the name of a function")]
    description: fields.Text = None
    parameters: fields.Record = None
    parameters_json_schema: fields.Record = None


def _tools(tools: list[Any] | None) -> tuple[list[JSON] | None, JSON]:
    """(functions in the form of Chat Completions, the provider's own tools by their paths)."""
    functions: list[JSON] = []
    others: JSON = {}
    for index, tool in enumerate(tools or ()):
        where = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise expected('{"functionDeclarations": […]}', tool, where)
        given = camel_keys(tool)
        for at, one in enumerate(fields.read(_Declarations, given, where).function_declarations or ()):
            functions.append(_function(one, f"{where}.functionDeclarations[{at}]"))
        for name, value in given.items():
            if name != "functionDeclarations" and value is not None:
                others[f"{where}.{name}"] = value
    return functions or None, others


def _function(declared: Any, where: str) -> JSON:
    if not isinstance(declared, dict):
        raise expected('{"name": …, "parameters": …}', declared, where)
    given = fields.read(_Declaration, camel_keys(declared), where)
    schema = given.parameters_json_schema
    if schema is None and given.parameters is not None:
        schema = _json_schema(given.parameters)
    function = {"name": given.name, "description": given.description, "parameters": schema}
    return {"type": "function", "function": {name: one for name, one in function.items() if one is not None}}


def _external_tools(tools: list[Any] | None) -> list[JSON] | None:
    """Tools for the record of an external call: functions in the one form, all else as it is."""
    result: list[JSON] = []
    for tool in tools or ():
        declared = camel_keys(tool).get("functionDeclarations") if isinstance(tool, dict) else None
        named = [one for one in declared if isinstance(one, dict)] if isinstance(declared, list) else []
        if named:
            result += [{"type": "function", "function": one} for one in named]
        elif isinstance(tool, dict):
            result.append(tool)
    return result or None


TYPES = ("STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL")
MAX_DIGITS = 19
"""Digits of an int64, which is what a count may be; int() takes 4,300 at most."""
COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def _json_schema(schema: JSON) -> JSON:
    """Google's Schema as JSON Schema: types in lower case, counts (which may be texts there) as numbers, null as a type."""
    result = camel_keys(schema)
    result.pop("propertyOrdering", None)
    if result.get("format") == "enum":  # says what `enum` says
        del result["format"]
    kind = result.get("type")
    if kind == "TYPE_UNSPECIFIED":
        del result["type"]
    elif isinstance(kind, str) and kind in TYPES:
        result["type"] = kind.lower()
    if result.pop("nullable", None) is True:
        if isinstance(result.get("type"), str):
            result["type"] = [result["type"], "null"]
        if isinstance(result.get("enum"), list):
            result["enum"] = [*result["enum"], None]
    for name in COUNTS:
        value = result.get(name)
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < MAX_DIGITS:
            result[name] = int(value)
    if isinstance(named := result.get("properties"), dict):
        result["properties"] = {name: _inner_schema(one) for name, one in named.items()}
    for name in ("items", "additionalProperties"):
        if name in result:
            result[name] = _inner_schema(result[name])
    for name in ("anyOf", "prefixItems"):
        if isinstance(several := result.get(name), list):
            result[name] = [_inner_schema(one) for one in several]
    return result


def _inner_schema(value: Any) -> Any:
    return _json_schema(value) if isinstance(value, dict) else value


class _ToolConfig(Struct, rename="camel"):
    function_calling_config: fields.Record = None


class _Calling(Struct, rename="camel"):
    mode: Annotated[
        Literal["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"], Meta(description="AUTO, ANY, NONE or VALIDATED")
    ] | None = None  # fmt: skip
    allowed_function_names: list[Any] | None = None


def _tool_choice(given: JSON | None, tools: list[JSON] | None) -> tuple[bool, JSON]:
    """(function calls are parsed, `tool_call` of the grammar)."""
    config = fields.read(_ToolConfig, camel_keys(given or {}), "toolConfig")
    path = f"toolConfig.{CALLING}"
    calling = fields.read(_Calling, camel_keys(config.function_calling_config or {}), path)
    mode = calling.mode
    if mode == "NONE":
        return False, {}
    if mode == "ANY" or (mode == "VALIDATED" and tools is not None):
        call = fields.forced_call(calling.allowed_function_names or None, tools, path)
        return True, {"required": mode == "ANY", "names": call["names"], "field": path}  # several calls may come
    return tools is not None, {}


def _format(config: GenerationConfig) -> JSON:
    """``content`` of the grammar by the schema or the type of the response."""
    kind, google, schema = config.response_mime_type, config.response_schema, config.response_json_schema
    if schema is not None or google is not None:
        name = "responseJsonSchema" if schema is not None else "responseSchema"
        shown = schema if schema is not None else _json_schema(google or {})
        if kind == "text/x.enum":
            return {"content": {"kind": "choice", "choices": _choices(shown, name), "field": f"{CONFIG}.{name}"}}
        return {"content": {"kind": "json_schema", "schema": shown, "field": f"{CONFIG}.{name}"}}
    if kind == "application/json":
        return {"content": {"kind": "json_object", "field": f"{CONFIG}.responseMimeType"}}
    if kind == "text/x.enum":
        raise expected("a schema with an enum beside text/x.enum", None, "responseSchema", CONFIG)
    if kind not in (None, "", "text/plain"):
        raise expected("text/plain, application/json or text/x.enum", kind, "responseMimeType", CONFIG)
    return {}


def _choices(schema: JSON, name: str) -> list[str]:
    """The answers that a schema allows, which are written as they are."""
    found = schema.get("enum")
    if not isinstance(found, list) or not found or not all(isinstance(one, str) and one for one in found):
        raise expected("an enum of texts, none empty, beside text/x.enum", found, f"{name}.enum", CONFIG)
    return found


# --- contents --------------------------------------------------------------------------------------------------------


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


def _listed(value: Any) -> Any:
    """The value as a list, where it is one object or text in place of a list of one."""
    return [value] if isinstance(value, dict | str) else value


def messages_of(contents: Any, trained: bool) -> list[JSON]:
    """Contents as messages in the form of Chat Completions. Raises ApiError."""
    contents = _listed(contents)
    if not isinstance(contents, list) or (trained and not contents):
        if contents is None and not trained:
            return []
        raise expected("a list of at least one content", contents, "contents")
    history = _History(trained)
    for index, content in enumerate(contents):
        history.add(content, f"contents[{index}]")
    return history.messages


def text_of(content: Any, where: str, trained: bool) -> Any:
    """The text of a content; its parts, where an external model reads others."""
    parts = _parts(content, where)
    for part, path in parts:
        if trained and not _is_text(part):
            raise _not_text(part, path)
    return _joined([part for part, _ in parts])


class _Parts(Struct):
    parts: list[Any] | None = None


class _Function(Struct):
    """A functionCall or a functionResponse."""

    id: fields.Text = None
    name: fields.Text = None
    args: fields.Arguments | None = None
    response: fields.Record = None
    parts: list[Any] | None = None


def _parts(content: Any, where: str) -> list[tuple[JSON, str]]:
    """The parts of a content, which may be a text, and their paths."""
    content = {"parts": content} if isinstance(content, str) else content
    if not isinstance(content, dict):
        raise expected("an object", content, where)
    given = fields.read(_Parts, {"parts": _listed(content.get("parts"))}, where).parts or ()
    parts = [{"text": part} if isinstance(part, str) else part for part in given]
    return [(_part(part, f"{where}.parts[{at}]"), f"{where}.parts[{at}]") for at, part in enumerate(parts)]


class _History:
    """Messages so far. Consecutive contents of the model are one message: SDKs keep each chunk of a stream as a content."""

    def __init__(self, trained: bool) -> None:
        self.messages: list[JSON] = []
        self._trained = trained
        self._calls = OpenToolCalls()

    def add(self, content: Any, where: str) -> None:
        """Take in one content."""
        role = content.get("role") or "user" if isinstance(content, dict) else "user"
        if role not in ROLES:
            raise expected("user or model", role, "role", where)
        (self._add_model if role == "model" else self._add_user)(_parts(content, where))

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
        call = fields.read(_Function, _part(part["functionCall"], where), where)
        name = call.name or ""
        arguments = call.args if isinstance(call.args, str) else arguments_text(call.args or {})
        function = {"name": name, "arguments": arguments}
        return {"id": self._calls.call(call.id, name), "type": "function", "function": function}

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
        given = fields.read(_Function, _part(part["functionResponse"], where), where)
        result, inner = given.response or {}, given.parts or []
        if self._trained:
            places = [f"{where}.parts[{at}]" for at in range(len(inner))]
            inner = [_image(_part(one, place), place) for one, place in zip(inner, places, strict=True)]
        text = _result_text(result)
        message: JSON = {
            "role": "tool",
            "tool_call_id": self._calls.answered(given.id, given.name or ""),
            "content": _joined([{"text": text}, *inner]) if inner else text,
        }
        if "error" in result and "output" not in result:
            message["is_error"] = True
        return message


def _result_text(result: JSON) -> str:
    """The text that a function returned, under `output` or `error`, or else the whole response."""
    for name in ("output", "error"):
        if name in result and len(result) == 1:
            value = result[name]
            return value if isinstance(value, str) else orjson.dumps(value).decode()
    return orjson.dumps(result).decode()


def _part(part: Any, where: str) -> JSON:
    if not isinstance(part, dict):
        raise expected("an object", part, where)
    return camel_keys(part)


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
    """The chunks of one streamed response: each is a response that holds what is new; events, or members of an array."""

    def __init__(self, call_id: str, model: str, prompt_tokens: int, thoughts: bool, as_array: bool = False) -> None:
        self._array = as_array
        self._begun = False
        self._frame = {
            "usageMetadata": {"promptTokenCount": prompt_tokens, "totalTokenCount": prompt_tokens},
            "modelVersion": model,
            "responseId": call_id,
        }
        self._thoughts = thoughts
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
        chunks = [
            self._chunk(index, self._closed(index) or [{"text": ""}], {**_end(choice)}, counts)
            for index, choice in enumerate(completion.choices)
        ]
        return b"".join(chunks) + (b"]" if self._array else b"")

    def failed(self, refusal: ApiError) -> bytes:
        if self._array:
            return (b",\r\n" if self._begun else b"[") + error(refusal) + b"]"
        return b"data: " + error(refusal) + b"\n\n"

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
        data = {"candidates": [candidate], **self._frame, **(counts or {})}
        if not self._array:
            return sse_event(data)
        before, self._begun = b",\r\n" if self._begun else b"[", True
        return before + json_text.dumps(data)


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


reader = CandidateReader


def _first_candidate(data: JSON) -> JSON:
    candidates = data.get("candidates")
    for candidate in candidates if isinstance(candidates, list) else ():
        if isinstance(candidate, dict) and not candidate.get("index"):
            return candidate
    return {}
