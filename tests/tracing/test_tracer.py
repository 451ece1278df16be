"""Spans of a process find the buffer of their attempt, and what is kept of them is bounded."""

from __future__ import annotations

import gc
import threading
from contextvars import ContextVar, copy_context
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Tracer as OpenTelemetryTracer

from agentlightning.store.gateway_events import BROKEN_SPANS
from agentlightning.tracing.buffer import UNFINISHED, SpanBuffer
from agentlightning.tracing.sanitize import MAX_TEXT_CHARS
from agentlightning.tracing.tracer import Tracer

HERE: ContextVar[SpanBuffer | None] = ContextVar("here", default=None)


@pytest.fixture
def tracer() -> OpenTelemetryTracer:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Tracer(HERE.get))
    return provider.get_tracer("agent")


def buffer(rollout: str = "r", most: int = 100) -> SpanBuffer:
    return SpanBuffer("run", rollout, 2, most)


def test_a_thread_that_was_only_given_the_span_is_the_attempts_too(tracer: OpenTelemetryTracer) -> None:
    own = buffer()
    copy_context().run(HERE.set, None)
    token = HERE.set(own)
    outer = tracer.start_span("outer")
    HERE.reset(token)

    def work() -> None:  # threads start with an empty context
        with tracer.start_as_current_span("inner", context=trace.set_span_in_context(outer)):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    outer.end()
    inner, recorded = own.take()
    assert (inner.name, inner.parent_id) == ("inner", recorded.id)
    assert inner.id.startswith("r.2.")
    assert len(inner.id) == len("r.2.") + 16


def test_what_is_open_at_the_end_is_kept_as_unfinished_and_nothing_comes_after(tracer: OpenTelemetryTracer) -> None:
    own = buffer()
    HERE.set(own)
    hung = tracer.start_span("hung", attributes={"n": 1})
    own.close()
    [span] = own.take()
    assert (span.name, span.attributes["n"], span.attributes[UNFINISHED]) == ("hung", 1, True)
    assert span.finished_ns >= span.started_ns
    hung.end()
    tracer.start_span("late").end()
    own.close()
    assert own.take() == []


def test_an_endless_loop_of_spans_keeps_the_first_and_counts_the_rest(tracer: OpenTelemetryTracer) -> None:
    own = buffer(most=3)
    HERE.set(own)
    for number in range(2):
        tracer.start_span(f"{number}").end()
    first = own.take()
    for number in range(2, 8):
        tracer.start_span(f"{number}").end()
    *more, note = own.take()
    assert [span.name for span in first + more] == ["0", "1", "2"]
    assert (note.name, note.attributes) == (BROKEN_SPANS, {"too_many": 5})
    assert own.take() == []
    own.count_lost(4)
    assert [span.attributes for span in own.take()] == [{"undelivered": 4}]


@pytest.mark.parametrize("bound", [{"max_bytes": 2500}, {"max_spans": 2}])
def test_an_attempt_of_many_huge_or_open_spans_keeps_the_first(tracer: OpenTelemetryTracer, bound: Any) -> None:
    own = SpanBuffer("run", "r", 2, **bound)
    HERE.set(own)
    spans = [tracer.start_span(f"{number}", attributes={"a": "x" * 900}) for number in range(3)]
    if "max_bytes" in bound:
        for span in spans:
            span.end()
    own.close()
    *kept, note = own.take()
    assert [span.name for span in kept] == ["0", "1"]
    assert note.attributes == {"too_many": 1}


def test_huge_texts_are_cut_and_counted_once_a_span(tracer: OpenTelemetryTracer) -> None:
    own = buffer()
    HERE.set(own)
    tracer.start_span(
        "huge", attributes={"a": "x" * (MAX_TEXT_CHARS + 7), "b": "y" * (2 * MAX_TEXT_CHARS), "c": "z"}
    ).end()
    span, note = own.take()
    assert span.attributes["a"].endswith("… [7 more characters]")
    assert span.attributes["c"] == "z"
    assert note.attributes == {"too_large": 1}


def test_whatever_an_agent_puts_into_a_span_can_be_recorded_and_others_are(tracer: OpenTelemetryTracer) -> None:
    own = buffer()
    HERE.set(own)
    tracer.start_span("sound").end()
    tracer.start_span("whole", attributes={"n": 2**70}).end()
    tracer.start_span("half", attributes={"n": "\ud800"}).end()
    tracer.start_span(5, kind=None, start_time="today").end()  # type: ignore[arg-type]
    tracer.start_span("seconds", start_time=1.5e9).end()  # type: ignore[arg-type]
    tracer.start_span("said", attributes={"n": 1}).end()
    tracer.start_span(BROKEN_SPANS, attributes={"cycle": "many"}).end()
    shows_nothing = tracer.start_span("nothing")
    shows_nothing.add_event("event", timestamp=Unreadable())  # type: ignore[arg-type]
    shows_nothing.end()
    *spans, note = orjson.loads(orjson.dumps(own.take()))
    assert [span["name"] for span in spans] == ["sound", "whole", "half", "seconds", "said"]
    assert [span["attributes"].get("n") for span in spans[:3]] == [None, str(2**70), "?"]
    assert all(isinstance(span["started_ns"], int) for span in spans)
    assert all(span["started_ns"] <= span["finished_ns"] for span in spans)
    assert note["attributes"] == {"undecodable": 2, "reserved_name": 1}


class Unreadable(float):
    def __int__(self) -> int:
        raise RuntimeError("no")


def test_spans_that_never_end_leave_nothing_behind_once_their_attempt_is_gone() -> None:
    own = buffer()
    routes = Tracer(lambda: own)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(routes)
    for number in range(3):
        provider.get_tracer("agent").start_span(f"{number}")
    assert len(routes._buffers) == 3
    own.close()
    assert [span.attributes[UNFINISHED] for span in own.take()] == [True] * 3
    own = buffer("next")
    gc.collect()
    assert len(routes._buffers) == 0


def test_a_failed_span_keeps_its_exception(tracer: OpenTelemetryTracer) -> None:
    own = buffer()
    HERE.set(own)
    with pytest.raises(KeyError), tracer.start_as_current_span("query", kind=trace.SpanKind.CLIENT):
        raise KeyError("singer")
    [span] = own.take()
    assert (span.kind, span.status, span.status_message) == ("client", "error", "KeyError: 'singer'")
    assert span.events[0]["name"] == "exception"
    assert span.events[0]["attributes"]["exception.type"] == "KeyError"


@settings(max_examples=50, deadline=None)
@given(tree=st.recursive(st.none(), lambda inner: st.lists(inner, max_size=4), max_leaves=25))
def test_any_tree_of_spans_is_recorded_as_that_tree(tree: object) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Tracer(HERE.get))
    tracer = provider.get_tracer("agent")
    own = SpanBuffer("run", "r", 1)
    expected: dict[str, str | None] = {}

    def walk(node: object, parent: str | None) -> None:
        with tracer.start_as_current_span("node") as span:
            name = f"r.1.{span.get_span_context().span_id:016x}"
            expected[name] = parent
            for child in node if isinstance(node, list) else ():
                walk(child, name)

    def run() -> None:
        HERE.set(own)
        walk(tree, None)

    copy_context().run(run)
    assert {span.id: span.parent_id for span in own.take()} == expected
