"""Compaction of a Responses conversation: POST responses/compact as a wire format, and the items that it leaves. Pure.

A compaction is a call of the policy like any other: it reads the conversation, continues it exactly, and writes a summary,
which is recorded and trained. The agent gets its own messages back, and the summary sealed in a `compaction` item; where it
sends that item again, the policy reads the summary as a message of the user.
"""

from __future__ import annotations

import base64
import time
from typing import Any

import orjson

from agentlightning.protocols import responses
from agentlightning.protocols.base import ApiError, Completion, CompletionRequest, EventStream
from agentlightning.protocols.fields import expected
from agentlightning.protocols.response_items import SEALED
from agentlightning.protocols.response_object import usage
from agentlightning.records import JSON

NAME = responses.NAME

INSTRUCTION = (
    "Summarise the conversation so far for another assistant that continues the task without seeing it: what was asked, "
    "what was done and found, decisions and constraints, and what remains to be done. Answer with the summary only."
)
"""The message that asks the policy for the summary."""


def parse(data: JSON, trained: bool = True) -> CompletionRequest:
    if not trained:
        return responses.parse(data, trained=False)
    if data.get("input") is None and data.get("previous_response_id") is None:
        raise expected("a text, a list of items, or previous_response_id", None, "input")
    kept = ("model", "instructions", "previous_response_id", "prompt_cache_key", "tools")
    given = {name: data[name] for name in kept if data.get(name) is not None}
    request = responses.parse({**given, "input": _with_instruction(data.get("input")), "store": False})
    return request


def body(request: CompletionRequest, completion: Completion) -> bytes:
    """The messages of the user, which stay as they are, and the summary of all else."""
    output: list[JSON] = []
    for index, message in enumerate(request.messages[:-1]):
        if message.get("role") == "user" and isinstance(message.get("content"), str):
            item_id = f"msg_{completion.call_id}_in_{index}"
            content = [{"type": "input_text", "text": message["content"]}]
            output.append({"id": item_id, "type": "message", "role": "user", "status": "completed", "content": content})
    sealed = SEALED + base64.b64encode((completion.choices[0].content or "").encode()).decode()
    output.append({"id": f"cmp_{completion.call_id}", "type": "compaction", "encrypted_content": sealed})
    whole = {
        "id": f"resp_{completion.call_id}",
        "object": "response.compaction",
        "created_at": completion.created_s or int(time.time()),
        "output": output,
        "usage": usage(completion),
    }
    return orjson.dumps(whole)


def stream(request: CompletionRequest, call_id: str, model: str, created_s: int, prompt_tokens: int) -> EventStream:
    raise ApiError("stream: a compaction is never streamed", param="stream")


error = responses.error
reader = responses.reader


def _with_instruction(given: Any) -> Any:
    """The input with the message that asks for the summary at its end."""
    asked = {"type": "message", "role": "user", "content": INSTRUCTION}
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}, asked]
    if given is None:
        return [asked]
    return [*given, asked] if isinstance(given, list) else given
