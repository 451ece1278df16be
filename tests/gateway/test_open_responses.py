"""What Open Responses requires of a server over HTTP: every field of a response, of its items and of its events."""

from __future__ import annotations

import json
from typing import Any

from gateway_house import House, path
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from agentlightning.protocols.base import EventReader
from agentlightning.records import Claim

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}\n</tool_call>'
ASKED = {"type": "message", "role": "user", "content": "What's the weather like in San Francisco?"}

TEXT_OR_NONE, COUNT, NUMBER = (str, type(None)), int, (int, float)
RESPONSE: dict[str, Any] = {
    "id": str, "object": str, "created_at": COUNT, "completed_at": (int, type(None)), "status": str,
    "incomplete_details": (dict, type(None)), "model": str, "previous_response_id": TEXT_OR_NONE,
    "instructions": TEXT_OR_NONE, "output": list, "error": (dict, type(None)), "tools": list, "tool_choice": (str, dict),
    "truncation": str, "parallel_tool_calls": bool, "text": dict, "top_p": NUMBER, "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER, "top_logprobs": COUNT, "temperature": NUMBER, "reasoning": (dict, type(None)),
    "user": TEXT_OR_NONE, "usage": (dict, type(None)), "max_output_tokens": (int, type(None)),
    "max_tool_calls": (int, type(None)), "store": bool, "background": bool, "service_tier": str, "metadata": dict,
    "safety_identifier": TEXT_OR_NONE, "prompt_cache_key": TEXT_OR_NONE,
}  # fmt: skip
"""All of them are required."""
USAGE = {
    "input_tokens": int, "output_tokens": int, "total_tokens": int, "input_tokens_details": dict,
    "output_tokens_details": dict,
}  # fmt: skip
ITEMS: dict[str, dict[str, Any]] = {
    "message": {"id": str, "status": str, "role": str, "content": list},
    "function_call": {"id": str, "call_id": str, "name": str, "arguments": str, "status": str},
    "function_call_output": {"id": str, "call_id": str, "output": (str, list), "status": str},
    "reasoning": {"id": str, "summary": list},
    "compaction": {"id": str, "encrypted_content": str},
}
FUNCTION = {"name": str, "description": TEXT_OR_NONE, "parameters": (dict, type(None)), "strict": (bool, type(None))}
OF_ITEM = {"item_id": str, "output_index": int}
OF_PART = {**OF_ITEM, "content_index": int}
EVENTS: dict[str, dict[str, Any]] = {
    "response.created": {"response": dict},
    "response.in_progress": {"response": dict},
    "response.completed": {"response": dict},
    "response.incomplete": {"response": dict},
    "response.output_item.added": {"output_index": int, "item": dict},
    "response.output_item.done": {"output_index": int, "item": dict},
    "response.content_part.added": {**OF_PART, "part": dict},
    "response.content_part.done": {**OF_PART, "part": dict},
    "response.output_text.delta": {**OF_PART, "delta": str, "logprobs": list},
    "response.output_text.done": {**OF_PART, "text": str, "logprobs": list},
    "response.function_call_arguments.delta": {**OF_ITEM, "delta": str},
    "response.function_call_arguments.done": {**OF_ITEM, "arguments": str},
}


def has(value: Any, fields: dict[str, Any]) -> None:
    """Every field is there, with a value of its kind."""
    wrong = [name for name, kind in fields.items() if name not in value or not isinstance(value[name], kind)]
    assert not wrong, {name: value.get(name, "missing") for name in wrong}


def check_response(found: Any) -> Any:
    """The response is whole, by Open Responses and by the SDK."""
    Response.model_validate(found)
    has(found, RESPONSE)
    for item in found["output"]:
        check_item(item)
    for tool in found["tools"]:
        has(tool, FUNCTION)
    has(found["reasoning"], {"effort": TEXT_OR_NONE, "summary": TEXT_OR_NONE})
    has(found["text"]["format"], {"type": str})
    assert found["text"].get("verbosity", "low") in ("low", "medium", "high")
    assert found["truncation"] in ("auto", "disabled")
    if found["usage"] is not None:
        has(found["usage"], USAGE)
        has(found["usage"]["input_tokens_details"], {"cached_tokens": int})
        has(found["usage"]["output_tokens_details"], {"reasoning_tokens": int})
    return found


def check_item(item: Any) -> None:
    has(item, ITEMS[item["type"]])
    assert item.get("status", "completed") in ("in_progress", "completed", "incomplete")
    if item["type"] == "message":
        assert item["role"] in ("user", "assistant", "system", "developer")
        for part in item["content"]:
            has(part, {"annotations": list, "text": str} if part["type"] == "output_text" else {"text": str})


async def ask(house: House, claim: Claim, **given: Any) -> Any:
    """A response that is not streamed."""
    reply = await house.http().post(f"{path(claim)}/v1/responses", json={"model": "policy", **given})
    assert reply.status_code == 200, reply.text
    return check_response(reply.json())


async def stream(house: House, claim: Claim, **given: Any) -> list[Any]:
    """The events of a streamed one, each checked."""
    reply = await house.http().post(f"{path(claim)}/v1/responses", json={"model": "policy", "stream": True, **given})
    assert (reply.status_code, reply.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    *parts, end = EventReader().feed(reply.content)
    assert end == b"[DONE]"
    found = [json.loads(data) for data in parts]
    for event in found:
        EVENT.validate_python(event)
        has(event, EVENTS[event["type"]])
        if "response" in event:
            check_response(event["response"])
        if "item" in event:
            check_item(event["item"])
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_a_basic_response_has_every_required_field(house: House) -> None:
    found = await ask(house, await house.claim(), input=[{"type": "message", "role": "user", "content": "Say hello."}])
    assert found["status"] == "completed"
    assert found["completed_at"] >= found["created_at"]
    assert [item["type"] for item in found["output"]] == ["message"]


async def test_a_stream_opens_grows_and_ends_in_order_with_numbers_from_zero(house: House) -> None:
    events = await stream(house, await house.claim(), input=[{"role": "user", "content": "Count from 1 to 5."}])
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[-1]["response"]["status"] == "completed"


async def test_a_streamed_tool_call_has_its_own_events(house: House) -> None:
    house.say(CALL)
    events = await stream(house, await house.claim(), input=[ASKED], tools=[TOOL])
    added, done = (
        [event["item"] for event in events if event["type"] == f"response.output_item.{what}"]
        for what in ("added", "done")
    )
    assert [item["type"] for item in added] == [item["type"] for item in done] == ["function_call"]
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    (whole,) = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert "".join(deltas) == whole["arguments"] == done[0]["arguments"]


async def test_settings_of_the_request_are_repeated_in_full(house: House) -> None:
    given = {
        "instructions": "Be brief.", "max_output_tokens": 20, "max_tool_calls": 3, "metadata": {"a": "b"},
        "prompt_cache_key": "k", "safety_identifier": "s", "user": "u", "store": False, "top_logprobs": 2,
        "reasoning": {"summary": "auto"}, "service_tier": "auto", "parallel_tool_calls": True, "truncation": "disabled",
    }  # fmt: skip
    found = await ask(house, await house.claim(), input="Hi", **given)
    expected = {**given, "reasoning": {"effort": None, "summary": "auto"}, "service_tier": "default"}
    assert {name: found[name] for name in expected} == expected
