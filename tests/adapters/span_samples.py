"""Spans as programs send them, made in a line."""

from __future__ import annotations

from typing import Any

import build
from agentlightning.records import Span


def a_span(name: str, parent: str | None = None, at: int = 0, until: int | None = None, **fields: Any) -> Span:
    """A span whose id is its name; keyword arguments that Span has not are attributes, with `__` for a dot."""
    own = {key: fields.pop(key) for key in ("status", "status_message", "events") if key in fields}
    attributes = {**fields.pop("attributes", {}), **{key.replace("__", "."): value for key, value in fields.items()}}
    times = {"started_ns": at, "finished_ns": at + 1 if until is None else until}
    return build.span(name=name, id=name, parent_id=parent, attributes=attributes, trace_id="t", **times, **own)


def model(name: str, parent: str | None = None, at: int = 0, **fields: Any) -> Span:
    return a_span(name, parent, at, gen_ai__operation__name="chat", **fields)


def tool(name: str, parent: str | None = None, at: int = 0, **fields: Any) -> Span:
    return a_span(name, parent, at, gen_ai__operation__name="execute_tool", **fields)


def agent(name: str, parent: str | None = None, at: int = 0, until: int = 1000, **fields: Any) -> Span:
    return a_span(name, parent, at, until, gen_ai__operation__name="invoke_agent", gen_ai__agent__name=name, **fields)
