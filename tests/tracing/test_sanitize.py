"""Broken spans: only what is broken is lost or mended, each cause is counted, and what is sent again changes nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.records import Span
from agentlightning.store.gateway_events import BROKEN_SPANS
from agentlightning.tracing.otlp import OtlpRequest, OtlpResource, OtlpSpan
from agentlightning.tracing.sanitize import (
    MAX_ITEMS,
    MAX_SPAN_BYTES,
    MAX_TEXT_CHARS,
    SanitizedSpans,
    SpanOwner,
    SpanSanitizer,
    sanitize_request,
)

NOW = 1_700_000_000 * 10**9
OWNER = SpanOwner(run_id="run", rollout_id="rollout", attempt=1, began_ns=NOW - 100 * 10**9)


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


def take(
    *spans: OtlpSpan, sanitizer: SpanSanitizer | None = None, now_ns: int = NOW, **attributes: Any
) -> SanitizedSpans:
    resource = OtlpResource(attributes=attributes, spans=list(spans))
    return (sanitizer or SpanSanitizer(OWNER)).take([resource], now_ns)


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


def test_a_circle_loses_one_link_and_nothing_else() -> None:
    taken = take(a_span(1, parent_id=parent(3)), a_span(2, parent_id=parent(1)), a_span(3, parent_id=parent(2)))
    assert [span.parent_id for span in taken.spans] == [None, name(1), name(2)]
    assert taken.broken == {"cycle": 1}


def test_a_span_that_is_its_own_parent_becomes_a_root() -> None:
    taken = take(a_span(1, parent_id=parent(1)), a_span(2, parent_id=parent(1)))
    assert [span.parent_id for span in taken.spans] == [None, name(1)]
    assert taken.broken == {"cycle": 1}


def test_a_circle_that_closes_in_a_later_request_is_cut_there() -> None:
    sanitizer = SpanSanitizer(OWNER)
    first = take(a_span(1, parent_id=parent(2)), sanitizer=sanitizer)
    second = take(a_span(2, parent_id=parent(1)), sanitizer=sanitizer)
    assert [span.parent_id for span in first.spans + second.spans] == [name(2), None]
    assert (first.broken, second.broken) == (Counter(), {"cycle": 1})


def test_a_circle_is_cut_against_what_the_store_has_too() -> None:
    known = take(a_span(1, parent_id=parent(2))).spans
    assert take(a_span(2, parent_id=parent(1)), sanitizer=SpanSanitizer(OWNER, known)).broken == {"cycle": 1}


def test_a_circle_that_two_servers_recorded_a_part_of_each_is_not_cut_here_and_spans_below_it_are_taken() -> None:
    one, other = take(a_span(1, parent_id=parent(2))).spans, take(a_span(2, parent_id=parent(1))).spans
    taken = take(a_span(3, parent_id=parent(1)), sanitizer=SpanSanitizer(OWNER, [*one, *other]))
    assert [span.parent_id for span in taken.spans] == [name(1)]
    assert not taken.broken


def test_a_parent_that_never_came_is_no_fault() -> None:
    taken = take(a_span(1, parent_id=parent(77)))
    assert taken.spans[0].parent_id == name(77)
    assert not taken.broken


def test_spans_without_an_id_get_one_that_is_the_same_when_they_are_sent_again() -> None:
    first = take(a_span(1, span_id=""), a_span(2, span_id=""))
    second = take(a_span(1, span_id=""), a_span(2, span_id=""))
    assert len({span.id for span in first.spans}) == 2
    assert first.spans == second.spans
    assert first.broken == {"absent_id": 2}


def test_a_second_span_of_the_same_id_is_kept_under_another() -> None:
    sanitizer = SpanSanitizer(OWNER)
    taken = take(a_span(1), a_span(1, name="other"), sanitizer=sanitizer)
    assert [span.name for span in taken.spans] == ["span 1", "other"]
    assert taken.spans[0].id == name(1) != taken.spans[1].id
    assert taken.broken == {"duplicate_id": 1}
    assert take(a_span(1, name="other"), sanitizer=sanitizer).spans == taken.spans[1:]


def test_a_span_that_is_sent_again_is_the_same_span_even_after_a_restart() -> None:
    sanitizer = SpanSanitizer(OWNER)
    spans = [a_span(1, parent_id=parent(2)), a_span(2, parent_id=parent(1))]
    first = take(*spans, sanitizer=sanitizer)
    for again in (sanitizer, SpanSanitizer(OWNER, first.spans)):
        second = take(*spans, sanitizer=again)
        assert {span.id for span in second.spans} == {span.id for span in first.spans}
        assert "duplicate_id" not in second.broken


def test_text_that_is_too_long_is_cut_and_the_rest_of_the_span_stays() -> None:
    [span] = take(a_span(1, attributes={"long": "x" * (MAX_TEXT_CHARS + 7), "short": "y"})).spans
    assert span.attributes["long"] == "x" * MAX_TEXT_CHARS + "… [7 more characters]"
    assert span.attributes["short"] == "y"


def test_a_text_that_is_larger_than_a_span_may_be_leaves_room_for_the_rest_of_its_span() -> None:
    [span] = take(a_span(1, attributes={"blob": "x" * (3 * MAX_SPAN_BYTES), "gen_ai.tool.name": "search"})).spans
    assert span.attributes["gen_ai.tool.name"] == "search"
    assert len(span.attributes["blob"]) < 2 * MAX_TEXT_CHARS


def test_spans_beyond_the_bytes_of_an_attempt_are_lost_and_smaller_ones_are_not() -> None:
    sanitizer = SpanSanitizer(OWNER, max_bytes=2000)
    large = a_span(2, attributes={"text": "x" * 1500})
    taken = take(a_span(1), large, a_span(3, attributes={"text": "y" * 1500}), a_span(4), sanitizer=sanitizer)
    assert [span.id for span in taken.spans] == [name(1), name(2), name(4)]
    assert taken.broken == {"too_many": 1}
    assert take(
        a_span(3, attributes={"text": "y" * 1500}), sanitizer=SpanSanitizer(OWNER, taken.spans, max_bytes=2000)
    ).lost


def test_a_span_may_not_say_what_only_the_gateway_says() -> None:
    taken = take(a_span(1, name=BROKEN_SPANS, attributes={"cycle": 7}))
    assert (taken.spans[0].name, taken.broken) == (f"span {BROKEN_SPANS}", {"reserved_name": 1})


def test_what_the_gateway_said_itself_takes_no_place_of_an_attempts_spans() -> None:
    told = Span(id="rollout.1.broken.1", run_id="run", rollout_id="rollout", attempt=1, name=BROKEN_SPANS)
    sanitizer = SpanSanitizer(OWNER, [told], max_spans=1)
    assert (sanitizer.told, sanitizer.count) == (1, 0)
    assert len(take(a_span(1), sanitizer=sanitizer).spans) == 1


def test_a_span_of_many_large_attributes_keeps_what_fits() -> None:
    taken = take(a_span(1, attributes={f"a{number}": "x" * MAX_TEXT_CHARS for number in range(100)}))
    size = sum(len(value) for value in taken.spans[0].attributes.values())
    assert MAX_SPAN_BYTES / 2 < size < MAX_SPAN_BYTES * 1.1
    assert set(taken.spans[0].attributes) <= {f"a{number}" for number in range(100)}
    assert taken.broken == {"too_large": 1}


def test_a_span_of_too_many_events_and_attributes_keeps_the_first() -> None:
    event = {"name": "e", "time_ns": NOW, "attributes": {}}
    taken = take(
        a_span(1, events=[event] * (MAX_ITEMS + 1)), a_span(2, attributes={str(n): n for n in range(MAX_ITEMS + 1)})
    )
    assert len(taken.spans[0].events) == MAX_ITEMS
    assert len(taken.spans[1].attributes) == MAX_ITEMS
    assert taken.broken == {"too_large": 2}


def test_spans_beyond_the_most_of_an_attempt_are_lost_and_those_it_has_are_not() -> None:
    sanitizer = SpanSanitizer(OWNER, max_spans=2)
    first = take(a_span(1), a_span(2), a_span(3), sanitizer=sanitizer)
    assert ([span.id for span in first.spans], first.lost) == ([name(1), name(2)], 1)
    again = take(a_span(2), a_span(3), sanitizer=sanitizer)
    assert ([span.id for span in again.spans], again.broken) == ([name(2)], {"too_many": 1})


def test_times_that_cannot_be_become_an_instant() -> None:
    spans = [
        a_span(1, started_ns=0),
        a_span(2, finished_ns=0),
        a_span(3, started_ns=0, finished_ns=0),
        a_span(4, started_ns=NOW, finished_ns=NOW - 5),
        a_span(5, started_ns=-3, finished_ns=2**64 - 1),
    ]
    taken = take(*spans)
    assert [span.started_ns == span.finished_ns for span in taken.spans] == [True] * 5
    assert [span.started_ns for span in taken.spans] == [NOW - 10**8, NOW - 10**9 + 2, NOW, NOW, NOW]
    assert taken.broken == {"wrong_time": 5}


def test_a_clock_that_is_an_hour_off_is_set_right_and_the_order_stays() -> None:
    hour = 3600 * 10**9
    for ahead in (hour, -hour):
        sanitizer = SpanSanitizer(OWNER)
        spans = [a_span(1), a_span(2, started_ns=NOW - 5 * 10**8)]
        wrong = [
            replace(span, started_ns=span.started_ns + ahead, finished_ns=span.finished_ns + ahead) for span in spans
        ]
        taken = take(*wrong, sanitizer=sanitizer)
        assert taken.broken == {"clock_skew": 2}
        assert [NOW - span.finished_ns for span in taken.spans] == [0, 0]
        assert [span.finished_ns - span.started_ns for span in taken.spans] == [10**9 - 10**8 - 1, 4 * 10**8]
        [later] = take(replace(wrong[0], span_id=parent(8)), sanitizer=sanitizer, now_ns=NOW + 5 * 10**9).spans
        assert later.started_ns == taken.spans[0].started_ns


def test_a_clock_within_a_minute_is_left_alone() -> None:
    taken = take(a_span(1, finished_ns=NOW + 59 * 10**9))
    assert (taken.spans[0].finished_ns, taken.broken) == (NOW + 59 * 10**9, Counter())


def test_spans_of_a_file_keep_their_own_ids() -> None:
    received = OtlpRequest(resources=[OtlpResource(spans=[a_span(1, parent_id=parent(2))])], lost=2)
    taken = sanitize_request(received)
    assert [(span.id, span.parent_id, span.rollout_id) for span in taken.spans] == [(parent(1), parent(2), "")]
    assert taken.broken == {"undecodable": 2}


NUMBERS = st.integers(0, 12)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(1, 12), NUMBERS), max_size=8), max_size=4))
def test_whatever_the_links_each_circle_loses_one_and_nothing_else_changes(
    requests: list[list[tuple[int, int]]],
) -> None:
    sanitizer = SpanSanitizer(OWNER)
    recorded: dict[str, str | None] = {}
    first_sent: dict[int, int] = {}
    cut = 0
    for request in requests:
        spans = [a_span(number, parent_id=parent(above) if above else "") for number, above in request]
        taken = take(*spans, sanitizer=sanitizer)
        cut += taken.broken["cycle"]
        for number, above in request:
            first_sent.setdefault(number, above)
        for span in taken.spans:
            recorded.setdefault(span.id, span.parent_id)
    circles = {frozenset(circle) for number in first_sent if (circle := circle_of(number, first_sent))}
    assert cut == len(circles)
    for number, above in first_sent.items():
        if not circle_of(number, first_sent):
            assert recorded[name(number)] == (name(above) if above else None)
    assert all(sum(recorded[name(number)] is None for number in circle) == 1 for circle in circles)
    assert not circles_left(recorded)


def circle_of(number: int, links: dict[int, int]) -> list[int]:
    """The circle that a node is on, if any."""
    path = [number]
    while path[-1] in links and links[path[-1]] not in path:
        path.append(links[path[-1]])
    return path if links.get(path[-1]) == number else []


def circles_left(recorded: dict[str, str | None]) -> bool:
    for node in recorded:
        above = recorded[node]
        for _ in recorded:
            above = recorded.get(above) if above is not None else None
        if above in recorded:
            return True
    return False
