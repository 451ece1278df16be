"""Broken spans: each is dropped or cut and counted by cause, and what is sent again changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.records import Span
from agentlightning.store.gateway_events import BROKEN_SPANS
from agentlightning.tracing.otlp import OtlpRequest, OtlpResource, OtlpSpan
from agentlightning.tracing.sanitize import (
    MAX_SPAN_BYTES,
    MAX_TEXT_CHARS,
    SanitizedSpans,
    SpanOwner,
    SpanSanitizer,
    sanitize_request,
)

NOW = 1_700_000_000 * 10**9
OWNER = SpanOwner(run_id="run", rollout_id="rollout", attempt=1)


def a_span(number: int, **fields: Any) -> OtlpSpan:
    given: dict[str, Any] = {
        "span_id": f"{number:016x}",
        "name": f"span {number}",
        "started_ns": NOW - 10**9 + number,
        "finished_ns": NOW - 10**8,
    }
    return OtlpSpan(**{**given, **fields})


def parent(number: int) -> str:
    return f"{number:016x}"


def name(number: int) -> str:
    return f"rollout.1.{number:016x}"


def take(*spans: OtlpSpan, sanitizer: SpanSanitizer | None = None, **attributes: Any) -> SanitizedSpans:
    resource = OtlpResource(attributes=attributes, spans=list(spans))
    return (sanitizer or SpanSanitizer(OWNER)).take([resource])


def test_a_sound_span_is_recorded_as_it_came_with_what_its_resource_says() -> None:
    given = a_span(1, parent_id=parent(9), trace_id="ab" * 16, attributes={"x": [1]}, kind="client", status="ok")
    taken = take(given, **{"service.name": "agent"})
    [span] = taken.spans
    assert (span.id, span.parent_id, span.trace_id) == (name(1), name(9), "ab" * 16)
    assert (span.run_id, span.rollout_id, span.attempt) == ("run", "rollout", 1)
    assert span.attributes == {"x": [1], "resource.service.name": "agent"}
    assert (span.started_ns, span.finished_ns) == (given.started_ns, given.finished_ns)
    assert (span.kind, span.status) == ("client", "ok")
    assert not taken.broken


def test_a_span_that_is_sent_again_is_the_same_span_even_after_a_restart() -> None:
    sanitizer = SpanSanitizer(OWNER)
    spans = [a_span(1, parent_id=parent(2)), a_span(2, parent_id=parent(1))]
    first = take(*spans, sanitizer=sanitizer)
    for again in (sanitizer, SpanSanitizer(OWNER, first.spans)):
        second = take(*spans, sanitizer=again)
        assert {span.id for span in second.spans} == {span.id for span in first.spans}


def test_spans_beyond_the_bytes_or_the_number_of_an_attempt_are_lost_and_others_are_not() -> None:
    sanitizer = SpanSanitizer(OWNER, max_bytes=2000)
    large = a_span(2, attributes={"text": "x" * 1500})
    taken = take(a_span(1), large, a_span(3, attributes={"text": "y" * 1500}), a_span(4), sanitizer=sanitizer)
    assert [span.id for span in taken.spans] == [name(1), name(2), name(4)]
    assert taken.broken == {"too_many": 1}
    assert take(
        a_span(3, attributes={"text": "y" * 1500}), sanitizer=SpanSanitizer(OWNER, taken.spans, max_bytes=2000)
    ).lost
    few = SpanSanitizer(OWNER, max_spans=2)
    assert [span.id for span in take(a_span(1), a_span(2), a_span(3), sanitizer=few).spans] == [name(1), name(2)]
    again = take(a_span(2), a_span(3), sanitizer=few)
    assert ([span.id for span in again.spans], again.broken) == ([name(2)], {"too_many": 1})


def test_a_span_may_not_say_what_only_the_gateway_says() -> None:
    taken = take(a_span(1, name=BROKEN_SPANS, attributes={"cycle": 7}))
    assert (taken.spans, taken.broken) == ([], {"reserved_name": 1})
    told = Span(id="rollout.1.broken.1", run_id="run", rollout_id="rollout", attempt=1, name=BROKEN_SPANS)
    sanitizer = SpanSanitizer(OWNER, [told], max_spans=1)  # it takes no place of the attempt's own
    assert (sanitizer.told, len(take(a_span(1), sanitizer=sanitizer).spans)) == (1, 1)


def test_a_span_of_many_large_attributes_keeps_what_fits() -> None:
    long, blob = "x" * (MAX_TEXT_CHARS + 7), "x" * (3 * MAX_SPAN_BYTES)
    [span] = take(a_span(1, attributes={"long": long, "blob": blob, "gen_ai.tool.name": "search"})).spans
    assert span.attributes["long"] == "x" * MAX_TEXT_CHARS + "… [7 more characters]"
    assert (span.attributes["gen_ai.tool.name"], len(span.attributes["blob"]) < 2 * MAX_TEXT_CHARS) == ("search", True)
    taken = take(a_span(1, attributes={f"a{number}": "x" * MAX_TEXT_CHARS for number in range(100)}))
    size = sum(len(value) for value in taken.spans[0].attributes.values())
    assert MAX_SPAN_BYTES / 2 < size < MAX_SPAN_BYTES * 1.1
    assert set(taken.spans[0].attributes) <= {f"a{number}" for number in range(100)}
    assert taken.broken == {"too_large": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"span_id": ""},
        {"started_ns": 0},
        {"started_ns": NOW, "finished_ns": NOW - 5},
        {"finished_ns": 2**63},
    ],
)
def test_a_span_that_no_store_takes_cannot_be_made(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="an id, a start and an end"):
        a_span(1, **fields)


def test_spans_of_a_file_keep_their_own_ids() -> None:
    received = OtlpRequest(resources=[OtlpResource(spans=[a_span(1, parent_id=parent(2))])], lost=2)
    taken = sanitize_request(received)
    assert [(span.id, span.parent_id, span.rollout_id) for span in taken.spans] == [(parent(1), parent(2), "")]
    assert taken.broken == {"undecodable": 2}
