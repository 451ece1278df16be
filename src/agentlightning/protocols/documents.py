"""Documents and search results of Anthropic Messages: blocks that the policy reads as text. Pure.

Driven by messages.py. A document is text, or content of text and images; files in other formats (PDF) are refused.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from agentlightning.protocols import fields
from agentlightning.protocols.base import short
from agentlightning.protocols.images import image_part
from agentlightning.records import JSON


class _Document(Struct):
    title: fields.Text = None
    context: fields.Text = None


class _Source(Struct):
    source: fields.Record = None


class _TextSource(Struct):
    data: fields.Text = None


def document_parts(block: JSON, where: str) -> list[JSON] | None:
    """A document or a search result as parts of a message, between tags; None where the block is neither."""
    kind = block.get("type")
    if kind == "search_result":
        names, content, path = ("title", "source"), block.get("content"), f"{where}.content"
    elif kind == "document":
        fields.read(_Source, block, where)
        names, (content, path) = ("title", "context"), _of_source(block, where)
    else:
        return None
    fields.read(_Document, block, where)
    heads = [f"{name}: {block[name]}\n" for name in names if isinstance(block.get(name), str) and block[name]]
    return [_text(f"<{kind}>\n{''.join(heads)}"), *_parts(content, path), _text(f"\n</{kind}>\n")]


def citations(data: JSON) -> JSON:
    """The documents of a request that are to be cited, by path: no policy is trained to."""
    found: JSON = {}
    waiting = [(f"messages[{index}]", message) for index, message in enumerate(data["messages"])]
    for path, block in waiting:  # which grows: results of tools hold documents, too
        if not isinstance(block, dict):
            continue
        asked, content = block.get("citations"), block.get("content")
        if isinstance(asked, dict) and asked.get("enabled"):
            found[f"{path}.citations"] = asked
        if isinstance(content, list):
            waiting += [(f"{path}.content[{at}]", part) for at, part in enumerate(content)]
    return found


def _of_source(block: JSON, where: str) -> tuple[Any, str]:
    """The content of a document, and its path."""
    source = block.get("source") or {}
    if source.get("type") == "text":
        return fields.read(_TextSource, source, f"{where}.source").data or "", f"{where}.source.data"
    if source.get("type") == "content":
        return source.get("content"), f"{where}.source.content"
    raise fields.refused(
        f"{where}.source",
        f'expected a source of type "text" or "content", all documents that the trained policy reads, got {short(source)}',
    )


def _parts(content: Any, path: str) -> list[JSON]:
    if isinstance(content, str):
        return [_text(content)]
    if not isinstance(content, list):
        raise fields.expected("a string or a list of content blocks", content, path)
    return [_part(part, f"{path}[{index}]") for index, part in enumerate(content)]


def _part(part: Any, where: str) -> JSON:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return _text(part["text"])
    found = image_part(part, where)
    if found is None:
        raise fields.not_text(part, where)
    return found


def _text(text: str) -> JSON:
    return {"type": "text", "text": text}
