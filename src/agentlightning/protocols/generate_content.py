"""Google generateContent: JSON <-> CompletionRequest, Completion, Delta, ApiError; and what external models of this protocol
respond. Pure.

Driven by the gateway, which chooses the protocol by route and, since the path names the model and says whether to stream,
adds both to the body (`with_route`). Field names may be in camel case or in snake case, as Google reads them. The model's
thoughts are given where `thinkingConfig.includeThoughts` asks for them; budgets and levels of thinking, safety settings,
labels and service tiers are accepted without effect. Unknown fields are passed over.
"""

from __future__ import annotations

from typing import Any

import orjson

from agentlightning.protocols import decoding, fields
from agentlightning.protocols.base import ApiError, Completion, CompletionRequest, EventStream
from agentlightning.protocols.content_parts import (
    CandidateEvents,
    CandidateReader,
    camel_keys,
    messages_of,
    response,
    text_of,
)
from agentlightning.protocols.fields import UnsupportedParam, expected
from agentlightning.protocols.images import RESOLUTIONS, details, take_images
from agentlightning.records import JSON

NAME = "generate_content"

CONFIG = "generationConfig"
CALLING = "functionCallingConfig"

UNSUPPORTED_PARAMS: dict[str, UnsupportedParam] = {
    "responseFormat": UnsupportedParam(dict),
    "responseModalities": UnsupportedParam(list, ([], ["TEXT"])),
    "speechConfig": UnsupportedParam(dict),
    "imageConfig": UnsupportedParam(dict),
}
"""Fields of `generationConfig` that ask for another distribution than the trained policy's own."""

CONFIG_WITHOUT_EFFECT: dict[str, type | tuple[type, ...]] = {
    "audioTimestamp": bool,
    "enableEnhancedCivicAnswers": bool,
    "modelConfig": dict,
    "routingConfig": dict,
}
WITHOUT_EFFECT: dict[str, type | tuple[type, ...]] = {
    "labels": dict,
    "modelArmorConfig": dict,
    "safetySettings": list,
    "serviceTier": str,
    "store": bool,
}
"""Fields that change nothing of what is sampled."""

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


def parse(data: JSON, trained: bool = True) -> CompletionRequest:
    data = camel_keys(data)
    messages, images = take_images(_instruction(data, trained) + messages_of(data.get("contents"), trained))
    if not trained:
        return CompletionRequest(
            model=fields.text(data, "model"),
            messages=messages,
            tools=_external_tools(data),
            stream=fields.boolean(data, "stream"),
        )
    fields.check_kinds(data, WITHOUT_EFFECT)
    config = camel_keys(fields.record(data, CONFIG) or {})
    _check_kinds(config, CONFIG_WITHOUT_EFFECT, CONFIG)
    tools, provider_tools = _tools(data)
    parse_tools, tool_call = _tool_choice(data, tools)
    logprobs = fields.boolean(config, "responseLogprobs", at=CONFIG)
    return CompletionRequest(
        model=fields.text(data, "model"),
        messages=messages,
        images=images,
        tools=tools,
        parse_tools=parse_tools,
        max_tokens=fields.whole(config, "maxOutputTokens", 1, at=CONFIG),
        stop=_stops(config),
        n=_count(config),
        seed=fields.whole(config, "seed", -fields.MAX_INTEGER - 1, at=CONFIG),
        logprobs=logprobs,
        top_logprobs=_top_logprobs(config, logprobs),
        stream=fields.boolean(data, "stream"),
        forced=_forced(config),
        not_applied={**_resolution(config), **details(images, "mediaResolution")},
        refused=fields.services(data, REFUSED),
        unsupported={**_unsupported(config), **provider_tools},
        grammar=decoding.combined(tool_call, _format(config)),
        logits=_logits(config),
        echo={"_thoughts": _shows_thoughts(config)},
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


def count_request(data: JSON) -> JSON:
    """The request whose tokens POST models/{name}:countTokens counts: the body itself, or the one that it holds."""
    data = camel_keys(data)
    inner = fields.record(data, "generateContentRequest")
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


def _instruction(data: JSON, trained: bool) -> list[JSON]:
    given = fields.record(data, "systemInstruction")
    if given is None:
        return []
    return [{"role": "system", "content": text_of(given, "systemInstruction", trained)}]


def _tools(data: JSON) -> tuple[list[JSON] | None, JSON]:
    """(functions in the form of Chat Completions, the provider's own tools by their paths)."""
    functions: list[JSON] = []
    others: JSON = {}
    for index, tool in enumerate(fields.items(data, "tools")):
        where = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise expected('{"functionDeclarations": […]}', tool, where)
        given = camel_keys(tool)
        for at, one in enumerate(fields.items(given, "functionDeclarations", where)):
            functions.append(_function(one, f"{where}.functionDeclarations[{at}]"))
        for name, value in given.items():
            if name != "functionDeclarations" and value is not None:
                others[f"{where}.{name}"] = value
    return functions or None, others


def _function(declared: Any, where: str) -> JSON:
    if not isinstance(declared, dict):
        raise expected('{"name": …, "parameters": …}', declared, where)
    given = camel_keys(declared)
    if not fields.text(given, "name", at=where):
        raise expected("the name of a function", given.get("name"), "name", where)
    function: JSON = {"name": given["name"]}
    if (description := fields.optional_text(given, "description", where)) is not None:
        function["description"] = description
    parameters = fields.record(given, "parameters", where)
    schema = fields.record(given, "parametersJsonSchema", where)
    if schema is not None:
        function["parameters"] = schema
    elif parameters is not None:
        function["parameters"] = _json_schema(parameters)
    return {"type": "function", "function": function}


def _external_tools(data: JSON) -> list[JSON] | None:
    """Tools for the record of an external call: functions in the one form, all else as it is."""
    result: list[JSON] = []
    for tool in fields.items(data, "tools"):
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


def _tool_choice(data: JSON, tools: list[JSON] | None) -> tuple[bool, JSON]:
    """(function calls are parsed, `tool_call` of the grammar)."""
    config = camel_keys(fields.record(data, "toolConfig") or {})
    value = camel_keys(fields.record(config, CALLING, "toolConfig") or {})
    path = f"toolConfig.{CALLING}"
    mode = fields.optional_text(value, "mode", path)
    allowed = fields.items(value, "allowedFunctionNames", path)
    if mode not in (None, "MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"):
        raise expected("AUTO, ANY, NONE or VALIDATED", mode, "mode", path)
    if mode == "NONE":
        return False, {}
    if mode == "ANY" or (mode == "VALIDATED" and tools is not None):
        call = decoding.forced_call(allowed or None, tools, path)
        return True, {"required": mode == "ANY", "names": call["names"], "field": path}  # several calls may come
    return tools is not None, {}


def _format(config: JSON) -> JSON:
    """``content`` of the grammar by the schema or the type of the response."""
    kind = fields.optional_text(config, "responseMimeType", CONFIG)
    google = fields.record(config, "responseSchema", CONFIG)
    schema = fields.record(config, "responseJsonSchema", CONFIG)
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


def _logits(config: JSON) -> JSON:
    found = {
        "presence_penalty": fields.number(config, "presencePenalty", -2, 2, at=CONFIG),
        "frequency_penalty": fields.number(config, "frequencyPenalty", -2, 2, at=CONFIG),
        "top_k": fields.whole(config, "topK", 0, at=CONFIG),
    }
    return {name: value for name, value in found.items() if value}


def _stops(config: JSON) -> tuple[str, ...]:
    given = fields.items(config, "stopSequences", CONFIG)
    if not all(isinstance(one, str) and one for one in given):
        raise expected("a list of strings, none empty", given, "stopSequences", CONFIG)
    return tuple(fields.bounded(given, "stopSequences", fields.MAX_STOPS, CONFIG))


def _count(config: JSON) -> int:
    return fields.whole(config, "candidateCount", 1, fields.MAX_CHOICES, at=CONFIG) or 1


def _top_logprobs(config: JSON, logprobs: bool) -> int:
    count = fields.whole(config, "logprobs", 0, fields.MAX_TOP_LOGPROBS, at=CONFIG) or 0
    if count and not logprobs:
        raise ApiError(f'{CONFIG}.logprobs: only allowed where "responseLogprobs" is true', param=f"{CONFIG}.logprobs")
    return count


def _forced(config: JSON) -> JSON:
    given = {
        "temperature": fields.number(config, "temperature", 0, 2, at=CONFIG),
        "top_p": fields.number(config, "topP", 0, 1, at=CONFIG),
    }
    return {name: value for name, value in given.items() if value is not None}


def _unsupported(config: JSON) -> JSON:
    for name, param in UNSUPPORTED_PARAMS.items():
        fields.check_kind(config, name, param.kind, CONFIG)
    return {f"{CONFIG}.{name}": value for name, value in fields.unsupported(config, UNSUPPORTED_PARAMS).items()}


def _resolution(config: JSON) -> JSON:
    """The size in which images are to be read, where the request says one: the model's processor has its own."""
    given = config.get("mediaResolution")
    if given not in (None, *RESOLUTIONS):
        raise expected(f"one of {', '.join(RESOLUTIONS)}", given, "mediaResolution", CONFIG)
    return {} if given in (None, RESOLUTIONS[0]) else {f"{CONFIG}.mediaResolution": given}


def _shows_thoughts(config: JSON) -> bool:
    thinking = camel_keys(fields.record(config, "thinkingConfig", CONFIG) or {})
    path = f"{CONFIG}.thinkingConfig"
    fields.check_kind(thinking, "thinkingBudget", int, path)
    fields.check_kind(thinking, "thinkingLevel", str, path)
    return fields.boolean(thinking, "includeThoughts", at=path)


def _check_kinds(data: JSON, kinds: dict[str, type | tuple[type, ...]], at: str) -> None:
    for name, kind in kinds.items():
        fields.check_kind(data, name, kind, at)
