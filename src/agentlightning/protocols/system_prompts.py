"""Another system prompt in a request, in the form of every protocol. Pure. The gateway's prompt rules drive it."""

from __future__ import annotations

from typing import Any

from agentlightning.records import JSON

SYSTEM_ROLES = ("system", "developer")


def replace_system(protocol: str, data: JSON, text: str) -> tuple[JSON, str | None]:
    """The request with `text` for its system prompt, and what that was ('' where it had none); None where the protocol has
    no place for one.

    Several system messages at its beginning become one. What a Responses request has of them among its input goes into its
    instructions: these are sent with every request, while earlier input comes back by `previous_response_id`.
    """
    if protocol == "chat" and isinstance(data.get("messages"), list):
        system, others = _leading(data["messages"])
        role = system[0]["role"] if system else "system"
        made = {"role": role, "content": text}
        return {**data, "messages": [made, *others]}, _joined(each.get("content") for each in system)
    if protocol == "responses":
        items = data["input"] if isinstance(data.get("input"), list) else []
        system, others = _leading(items)
        before = _joined([data.get("instructions"), *(each.get("content") for each in system)])
        return {**data, "instructions": text, **({"input": others} if system else {})}, before
    if protocol == "messages":
        given = data.get("system")
        blocks = [block for block in given if isinstance(block, dict)] if isinstance(given, list) else []
        cached = [block["cache_control"] for block in blocks if "cache_control" in block][-1:]
        block = {"type": "text", "text": text, **({"cache_control": cached[0]} if cached else {})}
        return {**data, "system": [block] if blocks else text}, _joined([given])
    if protocol == "generate_content":
        name = _google_name(data)
        given = data.get(name)
        kept = given if isinstance(given, dict) else {"parts": given}
        return {**data, name: {**kept, "parts": [{"text": text}]}}, _joined([kept.get("parts")])
    return data, None


def _leading(items: list[Any]) -> tuple[list[JSON], list[Any]]:
    """The system messages that a conversation begins with, and the rest."""
    count = 0
    while count < len(items) and isinstance(items[count], dict) and items[count].get("role") in SYSTEM_ROLES:
        count += 1
    return items[:count], items[count:]


def _google_name(data: JSON) -> str:
    return "system_instruction" if "system_instruction" in data else "systemInstruction"


def _joined(contents: Any) -> str:
    """The texts of contents: a text each, or a list of parts that have one."""
    texts: list[str] = []
    for content in contents:
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                texts.append(text)
    return "\n\n".join(texts)
