"""Items of OpenAI Responses behind recorded messages, as an `item_reference` names them. Pure.

Driven by gateway/stored_responses.py. The items of a completion have the ids that the agent saw (``rs_CALL``, ``msg_CALL``,
``fc_CALL_0``). Message n of a call's input has ``msg_CALL_in_n``, and so on by its kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from agentlightning.protocols.base import ApiError, short
from agentlightning.protocols.response_items import call_item, message_item, reasoning_item
from agentlightning.records import JSON, Call

ITEM_ID = re.compile(r"(?:rs|msg|fc|fco)_([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(_in_\d+)?(?:_(\d{1,4}))?\Z")
"""Group 1 is the call; group 2 is there in the ids of its input, group 3 is the number among items of a kind."""

REFERENCE = "item_reference"

MAX_REFERENCES = 1024
"""Of one request."""
MAX_REFERENCED_BYTES = 8 << 20
"""Of the items that a request refers to, as JSON, each as often as it is named: an id of fifty bytes may name megabytes."""


def _items_before(call: Call) -> list[JSON]:
    """The items of a call's own messages, without instructions."""
    items: list[JSON] = []
    for index, message in enumerate(call.messages):
        if not message.get("instructions"):
            items += _items(message, f"{call.id}_in_{index}")
    return items


def _completion_items(call: Call) -> list[JSON]:
    """The items of a call's completion."""
    return _items(call.completion, call.id)


def referenced_ids(data: JSON) -> list[str]:
    """The ids of the items that the input of a request refers to. Raises ApiError where one is no id."""
    given = data.get("input")
    found: list[str] = []
    for index, item in enumerate(given if isinstance(given, list) else ()):
        if is_reference(item):
            name = item.get("id")
            if not isinstance(name, str) or not name:
                path = f"input[{index}].id"
                raise ApiError(f"{path}: expected the id of an item, got {short(name)}", param=path)
            found.append(name)
    if len(found) > MAX_REFERENCES:
        raise ApiError(f"input: expected at most {MAX_REFERENCES} references to items, got {len(found)}", param="input")
    return found


def is_reference(item: Any) -> bool:
    """True for an item that is the id of another; its type may be left out where it has nothing else."""
    if not isinstance(item, dict):
        return False
    return item.get("type") == REFERENCE or (item.get("type") is None and set(item) <= {"type", "id"} and "id" in item)


def call_of_item(item_id: str) -> str:
    """Id of the recorded call behind the id of an item; '' where it is none of ours.

    >>> call_of_item("fc_01970000-1111-7222-8333-444455556666_0"), call_of_item("msg_1")
    ('01970000-1111-7222-8333-444455556666', '')
    """
    found = ITEM_ID.match(item_id)
    return "" if found is None else found[1]


def dereferenced(data: JSON, calls: Mapping[str, Call]) -> JSON:
    """The request with the items that it refers to in place of their ids. Raises ApiError where `calls` lack one."""
    known: dict[str, JSON] = {}
    for call_id in {call_of_item(name) for name in referenced_ids(data)} & calls.keys():
        call = calls[call_id]
        known |= {item["id"]: item for item in (*_items_before(call), *_completion_items(call))}
    items: list[Any] = []
    size = 0
    for index, item in enumerate(data["input"]):
        if not is_reference(item):
            items.append(item)
            continue
        found = known.get(item["id"])
        if found is not None:
            items.append(found)
            size += len(orjson.dumps(found))
            if size > MAX_REFERENCED_BYTES:
                raise ApiError(
                    f"input: expected references to items of at most {MAX_REFERENCED_BYTES} bytes in all", param="input"
                )
        elif not _is_later_message(item["id"], calls):
            raise ApiError(
                f"input[{index}].id: this attempt has no item {item['id']!r}",
                status=404,
                param=f"input[{index}].id",
                code="item_not_found",
            )
    return {**data, "input": items}


def _is_later_message(item_id: str, calls: Mapping[str, Call]) -> bool:
    """True for the second or a later message of a streamed response: the record has the texts of all in its first one. Each
    came after a tool call or the reasoning."""
    found = ITEM_ID.match(item_id)
    if found is None or found[2] or not found[3] or found[1] not in calls or not item_id.startswith("msg_"):
        return False
    said = calls[found[1]].completion
    return bool(said.get("content")) and 0 < int(found[3]) <= len(said.get("tool_calls") or ()) + (
        "reasoning_content" in said
    )


def _items(message: JSON, name: str) -> list[JSON]:
    """The items that a message is; `name` is what their ids have after the kind."""
    role = message.get("role")
    if role == "assistant":
        return _assistant_items(message, name)
    if role == "tool":
        return [
            {
                "id": f"fco_{name}",
                "type": "function_call_output",
                "call_id": message.get("tool_call_id") or "",
                "output": _parts(message.get("content"), _input_part, texts_alone=True),
                "status": "completed",
            }
        ]
    content = _parts(message.get("content"), _input_part)
    return [{"id": f"msg_{name}", "type": "message", "role": role, "status": "completed", "content": content}]


def _assistant_items(message: JSON, name: str) -> list[JSON]:
    items: list[JSON] = []
    content, calls = message.get("content"), message.get("tool_calls") or ()
    if reasoning := message.get("reasoning_content"):
        items.append(reasoning_item(f"rs_{name}", reasoning, {}, "completed"))
    if content or not calls:
        item = message_item(f"msg_{name}", "", "completed")
        items.append({**item, "content": _parts(content or "", _output_part)})
    for index, call in enumerate(calls):
        function = call.get("function") or {}
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else ""
        items.append(
            call_item(f"fc_{name}_{index}", call.get("id") or "", function.get("name") or "", text, "completed")
        )
    return items


def _parts(content: Any, part: Callable[[str], JSON], texts_alone: bool = False) -> Any:
    """Content as Responses has it: parts, or one text where `texts_alone` says so; parts that are no text stay."""
    if not isinstance(content, list):
        return content or "" if texts_alone else [part(content or "")]
    return [part(one["text"]) if isinstance(one, dict) and isinstance(one.get("text"), str) else one for one in content]


def _input_part(text: str) -> JSON:
    return {"type": "input_text", "text": text}


def _output_part(text: str) -> JSON:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
