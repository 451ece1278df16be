"""Calls of programs that are only traced get their agent's name from the spans around them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import build
from agentlightning.adapters.agent_names import prompt_name
from agentlightning.records import Call, NewRollout, Span, WorkerStatus
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.tracing.tool_uses import name_calls, named_calls


def a_call(name: str, span: str | None, agent: str | None = None, **fields: Any) -> Call:
    return build.call(id=name, span_id=span, agent=agent, **fields)


def a_span(name: str, parent: str | None = None, attempt: int = 1, **attributes: str) -> Span:
    table = {key.replace("__", "."): value for key, value in attributes.items()}
    return build.span(name=name, id=name, parent_id=parent, attempt=attempt, attributes=table, trace_id="t")


def names(calls: list[Call]) -> list[str | None]:
    return [call.agent for call in calls]


def test_a_call_is_of_the_innermost_agent_around_its_span() -> None:
    spans = [
        a_span("team", gen_ai__agent__name="team"),
        a_span("writer", "team", gen_ai__agent__name="writer"),
        a_span("http", "writer"),
    ]
    assert names(name_calls([a_call("1", "http"), a_call("2", "team")], spans)) == ["writer", "team"]


def test_a_name_that_the_call_has_stays() -> None:
    spans = [a_span("writer", gen_ai__agent__name="writer")]
    assert names(name_calls([a_call("1", "writer", "judge")], spans)) == ["judge"]


def test_a_span_takes_precedence_over_the_name_that_a_prompt_gives() -> None:
    spans = [a_span("writer", gen_ai__agent__name="writer"), a_span("http")]
    made = prompt_name("You are the planner.")
    assert names(name_calls([a_call("1", "writer", made), a_call("2", "http", made)], spans)) == ["writer", made]


def test_broken_spans_name_nothing_and_break_nothing() -> None:
    circle = [a_span("a", "b"), a_span("b", "a")]
    other_attempt = [a_span("c", attempt=2, gen_ai__agent__name="writer")]
    calls = [a_call("1", "a"), a_call("2", "c"), a_call("3", "never sent"), a_call("4", None)]
    assert names(name_calls(calls, circle + other_attempt)) == [None] * 4


async def test_spans_are_read_from_the_store_where_a_call_lacks_its_name() -> None:
    async with InMemoryLightningStore() as store:
        run = await store.create_run("run", {})
        [rollout] = await store.enqueue([NewRollout(run_id=run.id, task={}, group_id="g")])
        worker = WorkerStatus(id="w", run_id=run.id, host="h", pid=1, running=0, seen_ns=1)
        assert len(await store.claim(worker, limit=1)) == 1
        span = replace(a_span("s", gen_ai__agent__name="writer"), run_id=run.id, rollout_id=rollout.id)
        await store.append_spans([span])
        calls = [
            a_call("1", "s", rollout_id=rollout.id, run_id=run.id),
            a_call("2", None, rollout_id=rollout.id, run_id=run.id),
        ]
        assert names(await named_calls(store, calls)) == ["writer", None]
