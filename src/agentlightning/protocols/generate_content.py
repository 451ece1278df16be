"""Google generateContent: JSON <-> CompletionRequest, Completion, Delta, ApiError; and what external models of this protocol
respond. Pure.

Driven by the gateway, which chooses the protocol by route and, since the path names the model and says whether to stream,
adds both to the body (`with_route`). Field names may be in camel case or in snake case, as Google reads them. The model's
thoughts are given where `thinkingConfig.includeThoughts` asks for them; budgets and levels of thinking, safety settings,
labels and service tiers are accepted without effect. Unknown fields are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from msgspec import Meta, Struct

from agentlightning.protocols import fields
from agentlightning.protocols.base import ApiError, Completion, CompletionRequest, EventStream
from agentlightning.protocols.content_parts import (
    CandidateEvents,
    CandidateReader,
    camel_keys,
    messages_of,
    response,
    text_of,
)
from agentlightning.protocols.fields import expected
from agentlightning.protocols.images import RESOLUTIONS, details, take_images
from agentlightning.records import JSON

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
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def with_route(data: JSON, model: str, streamed: bool) -> JSON:
    """The body with what its path says, in the fields that the other protocols have in the body."""
    return {**data, "model": model, "stream": streamed}


class GenerateContentRequest(fields.ExternalRequest, rename="camel"):
    system_instruction: fields.Record = None
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
    asked = fields.read(GenerateContentRequest, data)
    system = asked.system_instruction
    instruction = [] if system is None else [
        {"role": "system", "content": text_of(system, "systemInstruction", trained)}
    ]  # fmt: skip
    messages, images = take_images(instruction + messages_of(data.get("contents"), trained))
    if not trained:
        return CompletionRequest(
            model=asked.model or "", messages=messages, tools=_external_tools(asked.tools), stream=bool(asked.stream)
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
    return orjson.dumps(response(completion, thoughts=bool(request.echo.get("_thoughts"))))


def stream(request: CompletionRequest, call_id: str, model: str, created_s: int, prompt_tokens: int) -> EventStream:
    thoughts = bool(request.echo.get("_thoughts"))
    return CandidateEvents(call_id, model, prompt_tokens, thoughts, error)


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


reader = CandidateReader


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
    function: JSON = {"name": given.name}
    if given.description is not None:
        function["description"] = given.description
    if given.parameters_json_schema is not None:
        function["parameters"] = given.parameters_json_schema
    elif given.parameters is not None:
        function["parameters"] = _json_schema(given.parameters)
    return {"type": "function", "function": function}


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
