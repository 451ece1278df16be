"""Namespaces and freeform tools of OpenAI Responses as plain functions, and calls of those folded back. Pure.

Codex gives tools in namespaces ({"type": "namespace", "name": "multi_agent_v1", "tools": […]}) and freeform ones ({"type":
"custom"}), whose input is any text. Chat templates know functions only: a tool of a namespace becomes the function
NAMESPACE__TOOL, a freeform one a function with the one argument `input`. Driven by the parser of the protocol before it
reads a request, and by what writes its items.
"""

from __future__ import annotations

from typing import Any

import orjson

from agentlightning.records import JSON

JOINT = "__"
INPUT = "input"

FOLDS = "_folds"
"""Key of `CompletionRequest.echo`: by the function's name, what it was in the request."""


def flatten(data: JSON) -> tuple[JSON, JSON]:
    """(the request with functions only, what they were by their names). What has another shape is left to the parser."""
    folds: JSON = {}
    tools = data.get("tools")
    if isinstance(tools, list) and any(_kind(tool) in ("namespace", "custom") for tool in tools):
        data = {**data, "tools": [flat for tool in tools for flat in _flat_tools(tool, folds)]}
    items = data.get("input")
    if isinstance(items, list) and any(_is_folded(item) for item in items):
        data = {**data, "input": [_flat_item(item) for item in items]}
    if isinstance(choice := data.get("tool_choice"), dict):
        data = {**data, "tool_choice": _flat_choice(choice)}
    return data, folds


def fold(item: JSON, folds: JSON) -> JSON:
    """A function call item as a call of the tool that the request had."""
    was = folds.get(item["name"])
    if was is None:
        return item
    folded = {**item, "name": was["name"]}
    if "namespace" in was:
        folded["namespace"] = was["namespace"]
    if was.get("custom"):
        folded["type"] = "custom_tool_call"
        folded[INPUT] = freeform(folded.pop("arguments"))
    return folded


def freeform(arguments: str) -> str:
    """The text that a call gives a freeform tool; arguments of another form are the text themselves.

    >>> freeform('{"input": "ls"}'), freeform("ls")
    ('ls', 'ls')
    """
    try:
        value: Any = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else arguments


def _flat_tools(tool: Any, folds: JSON, namespace: str = "") -> list[Any]:
    kind = _kind(tool)
    if kind == "namespace" and not namespace and isinstance(tool.get("tools"), list) and _is_name(tool.get("name")):
        return [flat for one in tool["tools"] for flat in _flat_tools(one, folds, tool["name"])]
    if kind not in ("function", "custom") or not _is_name(tool.get("name")) or not (namespace or kind == "custom"):
        return [tool]
    flat = tool if kind == "function" else _function(tool)
    name = f"{namespace}{JOINT}{tool['name']}" if namespace else tool["name"]
    where = {"namespace": namespace} if namespace else {}
    folds[name] = {"name": tool["name"], **where, **({"custom": True} if kind == "custom" else {})}
    return [{**flat, "name": name}]


def _function(tool: JSON) -> JSON:
    """A freeform tool as a function; the grammar of its input, which is not enforced, stands in the description."""
    form = tool.get("format")
    grammar = form.get("definition") if isinstance(form, dict) else None
    said = f"Text in this grammar:\n{grammar}" if isinstance(grammar, str) else "Any text."
    schema = {"type": "object", "properties": {INPUT: {"type": "string", "description": said}}, "required": [INPUT]}
    function: JSON = {"type": "function", "name": tool["name"], "parameters": schema}
    return {**function, "description": tool["description"]} if "description" in tool else function


def _is_folded(item: Any) -> bool:
    kind = _kind(item)
    return kind in ("custom_tool_call", "custom_tool_call_output") or (kind == "function_call" and "namespace" in item)


def _flat_item(item: Any) -> Any:
    if not _is_folded(item):
        return item
    if item["type"] == "custom_tool_call_output":
        return {**item, "type": "function_call_output"}
    flat = _flat_name(item)
    if flat["type"] == "custom_tool_call" and isinstance(flat.get(INPUT), str):
        flat["type"] = "function_call"
        flat["arguments"] = orjson.dumps({INPUT: flat.pop(INPUT)}).decode()
    return flat


def _flat_choice(choice: JSON) -> JSON:
    """A `tool_choice`, which names a tool, or lists those that are allowed."""
    allowed = choice.get("tools")
    if isinstance(allowed, list):
        return {**choice, "tools": [_flat_name(one) if isinstance(one, dict) else one for one in allowed]}
    return _flat_name(choice)


def _flat_name(named: JSON) -> JSON:
    flat = dict(named)
    namespace = flat.pop("namespace", None)
    if _is_name(namespace) and isinstance(flat.get("name"), str):
        flat["name"] = f"{namespace}{JOINT}{flat['name']}"
    return flat


def _kind(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else None


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)
