"""Another system prompt for a request, in the form of its own protocol. Pure.

Driven by the gateway before a request is parsed: calls of the policy and those that go to external models as they came are
then alike. Protocols without a system prompt (completions, embeddings, tokens) are left as they are, and so is whatever is
not of the form that the protocol asks for: its parser refuses that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentlightning.protocols import chat, generate_content, messages, responses
from agentlightning.records import JSON

SYSTEM_ROLES = ("system", "developer")

Edit = Callable[[str], str]
Marks = tuple[str, str]


def replace_system(protocol: str, data: JSON, text: str) -> tuple[JSON, str | None]:
    """The request with `text` for its system prompt, and what that was ('' where it had none); None where the protocol has
    no place for one.

    Several system messages at its beginning become one. What a Responses request has of them among its input goes into its
    instructions: these are sent with every request, while earlier input comes back by `previous_response_id`.
    """
    if protocol == chat.NAME and isinstance(data.get("messages"), list):
        system, others = _leading(data["messages"])
        role = system[0]["role"] if system else "system"
        made = {"role": role, "content": text}
        return {**data, "messages": [made, *others]}, _joined(each.get("content") for each in system)
    if protocol == responses.NAME:
        items = data["input"] if isinstance(data.get("input"), list) else []
        system, others = _leading(items)
        before = _joined([data.get("instructions"), *(each.get("content") for each in system)])
        return {**data, "instructions": text, **({"input": others} if system else {})}, before
    if protocol == messages.NAME:
        given = data.get("system")
        blocks = [block for block in given if isinstance(block, dict)] if isinstance(given, list) else []
        cached = [block["cache_control"] for block in blocks if "cache_control" in block][-1:]
        block = {"type": "text", "text": text, **({"cache_control": cached[0]} if cached else {})}
        return {**data, "system": [block] if blocks else text}, _joined([given])
    if protocol == generate_content.NAME:
        name = _google_name(data)
        given = data.get(name)
        kept = given if isinstance(given, dict) else {}
        return {**data, name: {**kept, "parts": [{"text": text}]}}, _joined([kept.get("parts")])
    return data, None


def replace_between(protocol: str, data: JSON, marks: Marks, text: str) -> tuple[JSON, str | None]:
    """The request with `text` between two marks of its system prompt, which stay, and what stood there; None where no text
    of the system prompt has them."""
    before: list[str] = []

    def edit(given: str) -> str:
        begin, found, rest = given.partition(marks[0])
        inner, ended, after = rest.partition(marks[1])
        if not (found and ended) or before:
            return given
        before.append(inner)
        return f"{begin}{marks[0]}{text}{marks[1]}{after}"

    changed: JSON = {}
    if protocol == messages.NAME and "system" in data:
        changed = {"system": _edited(data["system"], edit)}
    elif protocol == generate_content.NAME and isinstance(given := data.get(name := _google_name(data)), dict):
        changed = {name: {**given, "parts": _edited(given.get("parts"), edit)}}
    elif protocol in (chat.NAME, responses.NAME):
        name = "messages" if protocol == chat.NAME else "input"
        if protocol == responses.NAME and isinstance(data.get("instructions"), str):
            changed = {"instructions": edit(data["instructions"])}
        if isinstance(data.get(name), list):
            system, others = _leading(data[name])
            edited = [{**each, "content": _edited(each.get("content"), edit)} for each in system]
            changed[name] = [*edited, *others]
    return ({**data, **changed}, before[0]) if before else (data, None)


def _leading(items: list[Any]) -> tuple[list[JSON], list[Any]]:
    """The system messages that a conversation begins with, and the rest."""
    count = 0
    while count < len(items) and isinstance(items[count], dict) and items[count].get("role") in SYSTEM_ROLES:
        count += 1
    return items[:count], items[count:]


def _google_name(data: JSON) -> str:
    return "system_instruction" if "system_instruction" in data else "systemInstruction"


def _edited(content: Any, edit: Edit) -> Any:
    """The content with its texts edited: a text, or a list of parts that have one."""
    if isinstance(content, str):
        return edit(content)
    if isinstance(content, list):  # parts have no lists of parts: the parser refuses those
        return [each if isinstance(each, list) else _edited(each, edit) for each in content]
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        return {**content, "text": edit(content["text"])}
    return content


def _joined(contents: Any) -> str:
    texts: list[str] = []

    def collect(text: str) -> str:
        texts.append(text)
        return text

    for content in contents:
        _edited(content, collect)
    return "\n\n".join(texts)
