"""Calls of programs that are only traced get their agent's name from the spans around them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import build
from agentlightning.protocols.system_prompts import prompt_name
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


TEAM = [
    a_span("team", gen_ai__agent__name="team"),
    a_span("writer", "team", gen_ai__agent__name="writer"),
    a_span("http", "writer"),
    *(a_span("a", "b"), a_span("b", "a")),  # a circle
    a_span("c", attempt=2, gen_ai__agent__name="writer"),
]
FROM_PROMPT = prompt_name("You are the planner.")


@pytest.mark.parametrize(
    ("span", "given", "name"),
    [
        ("http", None, "writer"),  # the innermost agent around it
        ("team", None, "team"),
        ("writer", "judge", "judge"),  # the call has a name
        ("writer", FROM_PROMPT, "writer"),  # which a prompt gave
        ("a", FROM_PROMPT, FROM_PROMPT),
        *((span, None, None) for span in ("a", "c", "never sent", None)),
    ],
)
def test_a_call_is_named_by_the_agent_around_its_span(span: str | None, given: str | None, name: str | None) -> None:
    assert names(name_calls([a_call("1", span, given)], TEAM)) == [name]


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
