"""Anthropic Messages: JSON <-> CompletionRequest, Completion, Delta, ApiError; and what external models of this protocol
respond. Pure.

Driven by the gateway, which chooses the protocol by route. Whether the model thinks before it answers is its own and its
template's; the response has its thinking where `thinking` asks for it, the record always, so that the conversation goes on
exactly. Accepted without effect are cache control, metadata and
service tiers. Unknown fields are passed over, save those with which other APIs change the response.

A tool call's arguments are an object here, which the sampled text need not be: what is no JSON object travels in the key
``_arguments``, beside what could be read of it, and is unwrapped when the agent sends it back, so that nothing is lost.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import orjson

from agentlightning.protocols import decoding, fields
from agentlightning.protocols.base import ApiError, Completion, CompletionRequest, EventStream, short
from agentlightning.protocols.documents import citations, document_parts
from agentlightning.protocols.edit_fields import parse_edits
from agentlightning.protocols.fields import expected
from agentlightning.protocols.images import image_part, take_images
from agentlightning.protocols.message_blocks import (
    OMITTED,
    MessageEvents,
    MessageReader,
    arguments_text,
    finished,
    unfinished,
)
from agentlightning.records import JSON

NAME = "messages"

WITHOUT_EFFECT: dict[str, type | tuple[type, ...]] = {
    "metadata": dict,
    "service_tier": str,
    "inference_geo": str,
    "cache_control": dict,
    "diagnostics": dict,
    "speed": str,
    "billing_policy": dict,
    "fallbacks": (list, str),
    "fallback_credit_token": (str, dict),
}
"""Fields that change nothing of what is sampled; what a model is to do that declines to answer never comes to pass."""

UNSUPPORTED_PARAMS = {**fields.ENGINE_PARAMS, **fields.SAMPLING_PARAMS, **fields.TOKEN_PARAMS}
"""Fields of other APIs that Anthropic's refuses as unknown."""

NOT_OURS = ("mcp_servers", "compaction")
"""Fields for services that stand before Anthropic's models, without which a model responds all the same."""

REFUSED = ("container", "thread")
"""Fields for such services that the response would have to continue."""

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def parse(data: JSON, trained: bool = True) -> CompletionRequest:
    messages, images = take_images(_messages(data, trained))
    if not trained:
        return CompletionRequest(
            model=fields.text(data, "model"),
            messages=messages,
            tools=[_tool(tool) for tool in fields.items(data, "tools") if isinstance(tool, dict)] or None,
            stream=fields.boolean(data, "stream"),
        )
    fields.check_kinds(data, WITHOUT_EFFECT)
    limit = fields.whole(data, "max_tokens", 1)
    if limit is None:
        raise expected("a whole number of at least 1", None, "max_tokens")
    formats = _formats(data)
    if messages[-1]["role"] == "assistant":
        messages = fields.begun(messages)
        if any(formats):
            raise fields.refused(
                "output_config.format", "expected the last message to be the user's: the answer is JSON as a whole"
            )
    thinking, omitted = _thinking(data)
    tools, other_tools = _tools(data)
    parse_tools, one_call, tool_call = _tool_choice(data, tools)
    edits, unknown_edits = parse_edits(data)
    effort, output_config = _output_config(data)
    return CompletionRequest(
        include_reasoning=thinking,
        model=fields.text(data, "model"),
        messages=messages,
        images=images,
        tools=tools,
        parse_tools=parse_tools,
        one_tool_call=one_call,
        max_tokens=limit,
        stop=fields.stops(data, "stop_sequences"),
        stream=fields.boolean(data, "stream"),
        forced=fields.forced(data, hottest=1),
        not_applied=effort,
        context_edits=edits,
        refused={**fields.services(data, REFUSED), **fields.reserved_variables(data), **fields.engine_refused(data)},
        template_kwargs=fields.template_kwargs(data),
        unsupported={
            **fields.unsupported(data, UNSUPPORTED_PARAMS),
            **fields.given(data, (*decoding.GUIDED, *NOT_OURS)),
            **other_tools,
            **output_config,
            **_examples(data),
            **citations(data),
            **unknown_edits,
        },
        grammar=decoding.combined(tool_call, *formats),
        logits={} if (top_k := decoding.top_k(data)) is None else {"top_k": top_k},
        echo={OMITTED: omitted},
    )


def body(request: CompletionRequest, completion: Completion) -> bytes:
    return orjson.dumps({**finished(request, completion), **_edited(request, completion)})


def stream(request: CompletionRequest, call_id: str, model: str, created_s: int, prompt_tokens: int) -> EventStream:
    begun = unfinished(call_id, model, prompt_tokens, request.cached_tokens)
    return MessageEvents(request, begun, error, lambda completion: _edited(request, completion))


def error(refusal: ApiError) -> bytes:
    kind = ERROR_TYPES.get(refusal.status) or ("api_error" if refusal.status >= 500 else "invalid_request_error")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": refusal.message}})


reader = MessageReader


def count(tokens: int, original: int | None = None) -> bytes:
    """The body of POST messages/count_tokens; `original` is the number before context edits, where there are some."""
    edited = {} if original is None else {"context_management": {"original_input_tokens": original}}
    return orjson.dumps({"input_tokens": tokens, **edited})


def models(names: list[str], created_s: int) -> bytes:
    """The body of GET models."""
    first, last = (names[0], names[-1]) if names else (None, None)
    data = [_model(name, created_s) for name in names]
    return orjson.dumps({"data": data, "has_more": False, "first_id": first, "last_id": last})


def model(name: str, created_s: int) -> bytes:
    """The body of GET models/{name}."""
    return orjson.dumps(_model(name, created_s))


def _edited(request: CompletionRequest, completion: Completion) -> JSON:
    """The field that reports the requested context edits, where there were some."""
    if not request.context_edits:
        return {}
    return {"context_management": {"applied_edits": list(completion.applied_edits)}}


def _model(name: str, created_s: int) -> JSON:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": f"{datetime.fromtimestamp(created_s, UTC):%Y-%m-%dT%H:%M:%SZ}",
        "lifecycle": "active",
    }


# --- parsing ------------------------------------------------------------------------------------------------------------


def _messages(data: JSON, trained: bool) -> list[JSON]:
    given = fields.items(data, "messages")
    if not given and trained:
        raise expected("a list of at least one message", data.get("messages"), "messages")
    result: list[JSON] = []
    system = data.get("system")
    if system is not None:
        result.append({"role": "system", "content": _content(system, "system", trained, text_only=True)})
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise expected("an object", message, where)
        role = message.get("role")
        if role == "assistant":
            result.append(_assistant(message, where, trained))
        elif role == "user":
            result += _user(message, where, trained)
        elif role == "system":
            content = _content(message.get("content"), f"{where}.content", trained, text_only=True)
            result.append({"role": "system", "content": content})
        else:
            raise expected("user, assistant or system", role, "role", where)
    return result


def _parts(message: JSON, where: str) -> list[Any]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise expected("a string or a list of content blocks", content, "content", where)
    return content


def _user(message: JSON, where: str, trained: bool) -> list[JSON]:
    """Tool results, each a message of its own, then what else the user says."""
    results: list[JSON] = []
    said: list[JSON] = []
    for index, part in enumerate(_parts(message, where)):
        path = f"{where}.content[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_result":
            content = part.get("content")
            result = {
                "role": "tool",
                "tool_call_id": fields.text(part, "tool_use_id", at=path),
                "content": "" if content is None else _content(content, f"{path}.content", trained),
            }
            if fields.boolean(part, "is_error", at=path):
                result["is_error"] = True
            results.append(result)
        else:
            said += _block(part, path, trained)
    if said or not results:
        results.append({"role": "user", "content": _joined(said)})
    return results


def _assistant(message: JSON, where: str, trained: bool) -> JSON:
    text: list[JSON] = []
    reasoning: list[str] = []
    calls: list[JSON] = []
    for index, part in enumerate(_parts(message, where)):
        path = f"{where}.content[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            text.append({"type": "text", "text": part["text"]})
        elif kind == "thinking" and isinstance(part.get("thinking"), str):
            reasoning.append(part["thinking"])
        elif kind == "redacted_thinking":
            continue  # another model's; it has no text
        elif kind == "tool_use":
            calls.append(_tool_use(part, path))
        elif trained or not isinstance(part, dict):
            raise _not_text(part, path)
        else:
            text.append(part)
    result: JSON = {"role": "assistant", "content": _joined(text) if text or not calls else None}
    if reasoning:
        result["reasoning_content"] = "".join(reasoning)
    if calls:
        result["tool_calls"] = calls
    return result


def _tool_use(part: JSON, where: str) -> JSON:
    name = fields.text(part, "name", at=where)
    given = fields.record(part, "input", where)
    return {
        "id": fields.text(part, "id", at=where),
        "type": "function",
        "function": {"name": name, "arguments": arguments_text(given or {})},
    }


def _content(value: Any, where: str, trained: bool, text_only: bool = False) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise expected("a string or a list of text blocks", value, where)
    return _joined([one for at, part in enumerate(value) for one in _block(part, f"{where}[{at}]", trained, text_only)])


def _block(part: Any, where: str, trained: bool, text_only: bool = False) -> list[JSON]:
    """A block as parts of a message: as it is, where an external model reads it."""
    if not isinstance(part, dict):
        raise _not_text(part, where)
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return [{"type": "text", "text": part["text"]}]
    if not trained:
        return [part]
    if not text_only:
        if (image := image_part(part, where)) is not None:
            return [image]
        if (parts := document_parts(part, where)) is not None:
            return parts
    raise _not_text(part, where)


def _joined(parts: list[JSON]) -> str | list[JSON]:
    """One text where all parts are text; the parts, where an external model reads others."""
    if all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _not_text(part: Any, where: str) -> ApiError:
    what = "a text block, an image, a document, a tool call or its result, all that the trained policy reads"
    return fields.refused(where, f"expected {what}, got {short(part)}")


def _tools(data: JSON) -> tuple[list[JSON] | None, JSON]:
    """Functions in the form of Chat Completions, and the tools that Anthropic runs itself, by path."""
    result: list[JSON] = []
    others: JSON = {}
    for index, tool in enumerate(fields.items(data, "tools")):
        where = f"tools[{index}]"
        if not isinstance(tool, dict) or not isinstance(tool.get("type", ""), str | None):
            raise expected('{"name", "description", "input_schema"}', tool, where)
        if tool.get("type") not in (None, "custom"):
            others[where] = tool
            continue
        if not fields.text(tool, "name", at=where):
            raise expected("the name of a tool", tool.get("name"), "name", where)
        fields.check_kind(tool, "description", str, where)
        fields.check_kind(tool, "input_schema", dict, where)
        fields.check_kind(tool, "strict", bool, where)
        result.append(_tool(tool))
    return result or None, others


def _examples(data: JSON) -> JSON:
    """The inputs that tools give as examples: Anthropic puts them into the prompt, chat templates have no place for them."""
    return {
        f"tools[{index}].input_examples": tool["input_examples"]
        for index, tool in enumerate(fields.items(data, "tools"))
        if tool.get("input_examples")
    }


def _tool(tool: JSON) -> JSON:
    """A tool in the form of Chat Completions."""
    function: JSON = {"name": tool.get("name")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    if tool.get("input_schema") is not None:
        function["parameters"] = tool["input_schema"]
    if tool.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}


def _tool_choice(data: JSON, tools: list[JSON] | None) -> tuple[bool, bool, JSON]:
    """(tool calls are parsed, at most one is allowed, `tool_call` of the grammar)."""
    value = fields.record(data, "tool_choice")
    if value is None:
        return tools is not None, False, decoding.strict(tools)
    kind = value.get("type")
    if kind not in ("auto", "any", "tool", "none"):
        raise expected("auto, any, tool or none", kind, "type", "tool_choice")
    one_call = fields.boolean(value, "disable_parallel_tool_use", at="tool_choice")
    if kind == "none":
        return False, False, {}
    if kind == "auto":
        return tools is not None, one_call, decoding.strict(tools)
    names = [fields.text(value, "name", at="tool_choice")] if kind == "tool" else None
    return tools is not None, one_call, decoding.forced_call(names, tools)


def _formats(data: JSON) -> list[JSON]:
    """The fields for the form of the content: `output_config.format`, and its older name."""
    config = fields.record(data, "output_config") or {}
    return [decoding.content(config, "format", "output_config"), decoding.content(data, "output_format")]


def _output_config(data: JSON) -> tuple[JSON, JSON]:
    """(the effort, which changes nothing; what would change the response), by path."""
    given = fields.record(data, "output_config") or {}
    effort = fields.optional_text(given, "effort", "output_config")
    others = {
        f"output_config.{name}": value
        for name, value in given.items()
        if name not in ("effort", "format") and value is not None
    }
    return {} if effort is None else {"output_config.effort": effort}, others


def _thinking(data: JSON) -> tuple[bool, bool]:
    """(the response has blocks of the model's thinking, they are empty)."""
    value = fields.record(data, "thinking")
    if value is None:
        return False, False
    if value.get("type") not in ("enabled", "disabled", "adaptive"):
        raise expected("enabled, adaptive or disabled", value.get("type"), "type", "thinking")
    display = fields.optional_text(value, "display", "thinking")
    if display not in (None, "summarized", "omitted"):
        raise expected("summarized or omitted", display, "display", "thinking")
    return value["type"] != "disabled", display == "omitted"
