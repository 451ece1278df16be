"""Spans as programs send them, made in a line, and the rollout that they are made the record of."""

from __future__ import annotations

from typing import Any

from agentlightning.records import RetryPolicy, Rollout, Sampling, Span

ROLLOUT = Rollout(
    id="r",
    run_id="run",
    task={},
    group_id="g",
    replica=0,
    mode="train",
    step=0,
    sampling=Sampling(),
    retry=RetryPolicy(),
    priority=0,
    state="running",
    attempt=1,
    lost=0,
    created_ns=0,
)


def a_span(name: str, parent: str | None = None, at: int = 0, until: int | None = None, **fields: Any) -> Span:
    """A span whose id is its name; keyword arguments that Span has not are attributes, with `__` for a dot."""
    own = {key: fields.pop(key) for key in ("status", "status_message", "events", "trace_id", "kind") if key in fields}
    attributes = {**fields.pop("attributes", {}), **{key.replace("__", "."): value for key, value in fields.items()}}
    return Span(
        id=name,
        run_id="",
        rollout_id="",
        attempt=1,
        name=own.pop("label", name),
        parent_id=parent,
        attributes=attributes,
        started_ns=at,
        finished_ns=at + 1 if until is None else until,
        **{"trace_id": "t", **own},
    )


def model(name: str, parent: str | None = None, at: int = 0, **fields: Any) -> Span:
    return a_span(name, parent, at, gen_ai__operation__name="chat", **fields)


def tool(name: str, parent: str | None = None, at: int = 0, **fields: Any) -> Span:
    return a_span(name, parent, at, gen_ai__operation__name="execute_tool", **fields)


def agent(name: str, parent: str | None = None, at: int = 0, until: int = 1000, **fields: Any) -> Span:
    return a_span(name, parent, at, until, gen_ai__operation__name="invoke_agent", gen_ai__agent__name=name, **fields)
