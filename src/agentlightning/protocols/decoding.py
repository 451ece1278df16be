"""Fields about decoding: the grammar that a completion must follow, and penalties, biases and cuts of the logits.

Used by the protocols' parsers; each gives the fields that it has. The result is plain JSON that knows no tokenizer and no
template: rendering/grammar.py makes a grammar of it that engines decode under, and that learners rebuild their masks from.

    grammar   {"content": {"kind": "json_schema", "schema": {…}, "field": "response_format"},
               "tool_call": {"required": true, "names": ["search"], "field": "tool_choice"}}      each key where asked for
    logits    {"presence_penalty": .5, "logit_bias": {"17": -100}, "top_k": 20}                   without neutral values

Kinds of content: json_schema (schema), json_object, regex (pattern), choice (choices), lark (lark).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from msgspec import Meta, Struct

from agentlightning.protocols import fields
from agentlightning.protocols.base import ApiError, check_parts
from agentlightning.protocols.fields import SampledRequest, expected
from agentlightning.records import JSON

STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")
"""Fields of vLLM's `structured_outputs`, of which a request has one."""

WITHOUT_EFFECT = frozenset({"disable_fallback", "disable_any_whitespace", "disable_additional_properties", "backend"})
"""Options of `structured_outputs` beside these: white space is always settled, and there is one backend."""

GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
"""Older names of vLLM, and those of SGLang and llama.cpp, for what `structured_outputs` says."""


_LOGITS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "min_tokens", "ignore_eos")


def logits(asked: SampledRequest) -> JSON:
    """Penalties, `logit_bias`, `top_k`, `min_p` and vLLM's bounds on tokens, where they are not neutral."""
    found: JSON = {name: value for name in _LOGITS if (value := getattr(asked, name))}
    if found.get("repetition_penalty") == 1:
        del found["repetition_penalty"]
    if (top_k := asked.top_k) is not None and top_k > 0:
        found["top_k"] = top_k
    if asked.logit_bias and (bias := _logit_bias(asked.logit_bias)):
        found["logit_bias"] = bias
    if (ids := asked.allowed_token_ids) is not None:
        if not 0 < len(ids) <= fields.MAX_BIASED:
            raise expected(f"1 to {fields.MAX_BIASED} token ids", ids, "allowed_token_ids")
        found["allowed_token_ids"] = sorted(set(ids))
    return found


class Format(Struct):
    """A form of the content; Chat has the schema one level deeper."""

    type: Annotated[Literal["text", "json_object", "json_schema"], Meta(description="text, json_object or json_schema")]
    schema: fields.Record = None
    description: fields.Text = None
    json_schema: fields.Record = None


class _Schema(Struct):
    schema: fields.Record = None
    description: fields.Text = None


def content(value: JSON | None, path: str = "response_format") -> JSON:
    """``content`` of the grammar by a format as the OpenAI protocols have it, or Anthropic's; empty for text."""
    if value is None:
        return {}
    form = fields.read(Format, value, path)
    if form.type == "text":
        return {}
    if form.type == "json_object":
        return {"content": {"kind": "json_object", "field": path}}
    holder: Format | _Schema = form
    if "schema" not in value and form.json_schema is not None:
        holder = fields.read(_Schema, form.json_schema, f"{path}.json_schema")
    shown: JSON = {
        "kind": "json_schema",
        "schema": holder.schema or {},
        "field": path,
    }  # OpenAI's may be left out: any JSON
    if holder.description:
        shown["description"] = holder.description
    return {"content": shown}


def structured_outputs(data: JSON) -> JSON:
    """``content`` of the grammar by vLLM's `structured_outputs` or the older fields; empty where there is none."""
    given = data.get("structured_outputs")
    named = [name for name in GUIDED if name in data]
    if given is None and not named:
        return {}
    found = [] if given is None else _structured(given)
    found += [_content(GUIDED[name], data, name, name) for name in named if data[name] not in (None, False)]
    if len(found) > 1:
        raise ApiError(
            f"{found[1]['field']}: expected one grammar in a request, and {found[0]['field']} gives one",
            param=found[1]["field"],
        )
    return {"content": found[0]} if found else {}


def _structured(given: JSON) -> list[JSON]:
    for name in given:
        if name not in STRUCTURED and name not in WITHOUT_EFFECT and given[name] is not None:
            raise expected(f"one of {', '.join(STRUCTURED)}", name, "structured_outputs")
    found = [
        _content(name, given, name, f"structured_outputs.{name}")
        for name in STRUCTURED
        if given.get(name) not in (None, False)
    ]
    if not found and "structural_tag" not in given:
        raise expected(f"one of {', '.join(STRUCTURED)}", given, "structured_outputs")
    return found


def _content(kind: str, data: JSON, name: str, path: str) -> JSON:
    value = data[name]
    if kind == "json":
        schema = _json_object(value) if isinstance(value, str) else value
        if not isinstance(schema, dict):
            raise expected("a JSON schema", value, path)
        check_parts(schema, path)
        return {"kind": "json_schema", "schema": schema, "field": path}
    if kind == "json_object":
        if value is not True:
            raise expected("true or false", value, path)
        return {"kind": "json_object", "field": path}
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
            raise expected("a list of texts, none empty", value, path)
        return {"kind": "choice", "choices": value, "field": path}
    if not isinstance(value, str) or not value:
        raise expected("a text that is not empty", value, path)
    return {"kind": "regex", "pattern": value, "field": path} if kind == "regex" else {
        "kind": "lark", "lark": value, "field": path,
    }  # fmt: skip


def combined(tool_call: JSON, *contents: JSON) -> JSON:
    """The grammar of a request from its parts. Raises ApiError where two say what the content must be."""
    found = [one["content"] for one in contents if one]
    if len(found) > 1:
        raise ApiError(
            f"{found[1]['field']}: expected one grammar in a request, and {found[0]['field']} gives one",
            param=found[1]["field"],
        )
    return {**({"content": found[0]} if found else {}), **({"tool_call": tool_call} if tool_call else {})}


def tool_call(choice: Any, tools: list[JSON] | None, field: str = "tool_choice") -> JSON:
    """``tool_call`` of the grammar by OpenAI's `tool_choice` and `strict` of the tools; empty where neither asks for one.

    Raises ApiError where a name is none of the tools'.
    """
    named = _names(tools)
    if choice == "required":
        _need_tools(named, field)
        return {"required": True, "names": None, "field": field}
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        inner = choice.get("function") or choice.get("custom")
        name = (inner if isinstance(inner, dict) else choice).get("name")
        return {"required": True, "names": [_known(name, named, field)], "one": True, "field": field}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(choice, named, field)
    return strict(tools)


def strict(tools: list[JSON] | None) -> JSON:
    """``tool_call`` of the grammar where a tool is `strict`: calls follow the schemas, and none need be made."""
    for index, tool in enumerate(tools or ()):
        if tool["function"].get("strict") is True:
            return {"required": False, "names": None, "field": f"tools[{index}].function.strict"}
    return {}


def forced_call(names: list[str] | None, tools: list[JSON] | None, field: str = "tool_choice") -> JSON:
    """``tool_call`` of the grammar where a call must be made: of the tool in `names`, or of any."""
    named = _names(tools)
    if names is None:
        _need_tools(named, field)
        return {"required": True, "names": None, "field": field}
    return {"required": True, "names": [_known(name, named, field) for name in names], "one": True, "field": field}


def _allowed(choice: JSON, named: list[str], field: str) -> JSON:
    given = choice.get("allowed_tools") if isinstance(choice.get("allowed_tools"), dict) else choice
    assert given is not None
    mode, listed = given.get("mode", "auto"), given.get("tools")
    if mode not in ("auto", "required"):
        raise expected("auto or required", mode, "mode", field)
    if not isinstance(listed, list) or not listed:
        raise expected("a list of at least one tool", listed, "tools", field)
    names = []
    for tool in listed:
        inner = tool.get("function") if isinstance(tool, dict) and isinstance(tool.get("function"), dict) else tool
        names.append(_known(inner.get("name") if isinstance(inner, dict) else None, named, field))
    return {"required": mode == "required", "names": names, "field": field}


def _known(name: Any, named: list[str], field: str) -> str:
    if not isinstance(name, str) or name not in named:
        raise expected(f"the name of one of the tools ({', '.join(named) or 'there are none'})", name, field)
    return name


def _need_tools(named: list[str], field: str) -> None:
    if not named:
        raise ApiError(f"{field}: a tool call is required, and the request has no tools", param=field)


def _names(tools: list[JSON] | None) -> list[str]:
    return [tool["function"]["name"] for tool in tools or ()]


def _json_object(text: str) -> JSON | None:
    """The object that a text is the JSON of; None where it is none."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _logit_bias(given: Mapping[str, float]) -> Mapping[str, float]:
    """By token id as text, as JSON has it."""
    if len(given) > fields.MAX_BIASED:
        raise ApiError(f"logit_bias: expected at most {fields.MAX_BIASED} tokens, got {len(given)}", param="logit_bias")
    for token in given:
        if not token.isdecimal() or not token.isascii() or len(token) > 10:
            raise expected("token ids as keys", token, "logit_bias")
    return {str(int(token)): bias for token, bias in given.items() if bias}
