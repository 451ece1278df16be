"""OTLP's two encodings: what they are read into, what is lost or refused, and what is written."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)

import build
from agentlightning.errors import InputError
from agentlightning.tracing.otlp import (
    IDS,
    OtlpRequest,
    OtlpSpan,
    from_object,
    read_json,
    read_protobuf,
    read_response,
    write_json,
    write_response,
    write_status,
)

TRACE, SPAN, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "00f067aa0ba902b8"

ATTRIBUTES = [
    {"key": "text", "value": {"stringValue": "é"}},
    {"key": "whole", "value": {"intValue": "9007199254740993"}},
    {"key": "share", "value": {"doubleValue": 0.5}},
    {"key": "yes", "value": {"boolValue": True}},
    {"key": "list", "value": {"arrayValue": {"values": [{"stringValue": "a"}, {"intValue": "1"}]}}},
    {"key": "map", "value": {"kvlistValue": {"values": [{"key": "deep", "value": {"boolValue": False}}]}}},
    {"key": "none", "value": {}},
]
PLAIN = {
    "text": "é",
    "whole": 9007199254740993,
    "share": 0.5,
    "yes": True,
    "list": ["a", 1],
    "map": {"deep": False},
    "none": None,
}


def a_span(**fields: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "traceId": TRACE,
        "spanId": SPAN,
        "parentSpanId": PARENT,
        "name": "search",
        "kind": 3,
        "startTimeUnixNano": "1700000000000000001",
        "endTimeUnixNano": "1700000000000000002",
        "attributes": ATTRIBUTES,
        "status": {"code": 2, "message": "no such table"},
        "events": [{"name": "exception", "timeUnixNano": "1700000000000000001", "attributes": ATTRIBUTES[:1]}],
    }
    return {**given, **fields}


def a_request(*spans: Any) -> dict[str, Any]:
    scope = {"name": "lib", "version": "1.2", "attributes": [{"key": "x", "value": {"intValue": "1"}}]}
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "agent"}}]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": scope, "spans": list(spans)}]}]}


def message(request: dict[str, Any]) -> ExportTraceServiceRequest:
    """The same request in protobuf."""
    given = json.loads(json.dumps(request))
    for span in given["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        ids = {name: base64.b64encode(bytes.fromhex(span[name])).decode() for name in IDS}
        span |= ids
    return ParseDict(given, ExportTraceServiceRequest())


def only(received: OtlpRequest) -> OtlpSpan:
    [resource] = received.resources
    [span] = resource.spans
    return span


EXPECTED = OtlpSpan(
    trace_id=TRACE,
    span_id=SPAN,
    parent_id=PARENT,
    name="search",
    kind="client",
    started_ns=1700000000000000001,
    finished_ns=1700000000000000002,
    attributes=PLAIN | {"scope.name": "lib", "scope.version": "1.2", "scope.x": 1},
    status="error",
    status_message="no such table",
    events=[{"name": "exception", "time_ns": 1700000000000000001, "attributes": {"text": "é"}}],
)


CUT_TEXT = message(a_request(a_span())).SerializeToString().replace(b"search", b"\xff" * 6)


def test_json_and_protobuf_are_read_into_the_same_span() -> None:
    request = a_request(a_span())
    received = read_json(json.dumps(request).encode())
    assert only(received) == EXPECTED
    assert received.resources[0].attributes == {"service.name": "agent"}
    assert read_protobuf(message(request).SerializeToString()) == received


@pytest.mark.parametrize(("given", "read"), [(PARENT.upper(), PARENT), ("0000000000000000", ""), (None, ""), ("", "")])
def test_a_parent_is_read_in_the_forms_of_otlp(given: object, read: str) -> None:
    assert only(from_object(a_request(a_span(parentSpanId=given)))).parent_id == read


DEEP: dict[str, Any] = {"stringValue": "x"}
for _ in range(40):
    DEEP = {"arrayValue": {"values": [DEEP]}}


@pytest.mark.parametrize(
    "fields",
    [
        *({"spanId": value} for value in (None, "0000000000000000", "xyz", "abcd", 7)),
        *({"startTimeUnixNano": value} for value in ("soon", float("inf"), None)),
        *({"attributes": value} for value in ({"plain": "map"}, "text", [None], [{"key": 5}])),
        *({"attributes": [{"key": "x", "value": value}]} for value in ({"intValue": "many"}, {"odd": 1}, DEEP)),
        *(
            {"attributes": [{"key": "x", "value": value}]}
            for value in ({"stringValue": 5}, {"kvlistValue": {"values": [5]}})
        ),
        *({"events": value} for value in ({"name": "x"}, [7], [{"name": 1}])),
        *({"traceId": [1]}, {"parentSpanId": [1]}, {"name": 7}, {"endTimeUnixNano": "1"}, {"status": "fine"}),
    ],
)
def test_a_span_with_a_field_of_the_wrong_type_is_lost_and_others_are_read(fields: dict[str, Any]) -> None:
    received = from_object(a_request(a_span(**fields), a_span(), "no span", None))
    assert received.lost == 3
    assert only(received) == EXPECTED


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff\xfe", b'"spans"', b"[" * 100_000, CUT_TEXT])
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(InputError, match="expected"):
        read_json(body)
    with pytest.raises(InputError, match="protobuf"):
        read_protobuf(body or b"hello world")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 2000), st.integers(0, 300))
def test_no_cut_or_overwritten_message_is_anything_but_read_or_refused(noise: bytes, place: int, cut: int) -> None:
    body = message(a_request(a_span(), a_span(spanId=PARENT))).SerializeToString()
    broken = (body[: place % len(body)] + noise + body[place % len(body) + len(noise) :])[: len(body) - cut]
    try:
        received = read_protobuf(broken)
    except InputError:
        return
    assert all(len(span.span_id) in (0, 16) for resource in received.resources for span in resource.spans)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=9,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([*a_span(), "extra"]), JSON_VALUES, max_size=5))
def test_whatever_the_types_of_fields_a_span_is_read_or_lost(fields: dict[str, Any]) -> None:
    received = from_object(a_request(a_span(**fields)))
    spans = [span for resource in received.resources for span in resource.spans]
    assert len(spans) + received.lost == 1
    for span in spans:
        assert isinstance(span.name, str)
        json.dumps([span.attributes, span.events], allow_nan=False)


def test_what_is_written_is_read_back() -> None:
    span = build.span(
        id=f"0189.2.{SPAN}",
        name="search",
        parent_id=f"0189.2.{PARENT}",
        attributes=PLAIN | {"scope.name": "lib"},
        started_ns=1700000000000000001,
        finished_ns=1700000000000000002,
        trace_id=TRACE,
        kind="client",
        status="error",
        status_message="no such table",
        events=EXPECTED.events,
    )
    received = read_json(write_json([span], {"service.name": "agent"}))
    assert only(received) == replace(EXPECTED, attributes=PLAIN | {"scope.name": "lib"})
    assert received.resources[0].attributes == {"service.name": "agent"}


@pytest.mark.parametrize(
    "request_",
    [
        [],
        {"resourceSpans": {"scopeSpans": []}},
        {"resourceSpans": [{"scopeSpans": [7]}]},
        {"resourceSpans": [{"resource": 5, "scopeSpans": []}]},
        {"resourceSpans": [{"resource": {"attributes": {"a": 1}}}]},
        {"resourceSpans": [{"scopeSpans": [{"scope": {"name": 7}, "spans": []}]}]},
    ],
)
def test_a_request_of_another_shape_is_refused(request_: object) -> None:
    with pytest.raises(InputError, match="expected a JSON object with resourceSpans"):
        from_object(request_)


# --- what is around spans ---------------------------------------------------------------------------------------------


def test_answers_and_refusals_are_written_and_read() -> None:
    assert read_response(write_response(3, "too old")) == (3, "too old")
    assert read_response(b"") == read_response(b"<html>") == (0, "")
    assert write_status("é" * 100) == b"\x12\xc8\x01" + ("é" * 100).encode()


def test_more_spans_than_a_request_may_have_are_refused_before_they_are_read() -> None:
    request = a_request(*[a_span()] * 3)
    body = message(request).SerializeToString()
    assert len(read_protobuf(body, max_spans=3).resources[0].spans) == 3
    for read in (
        lambda: read_json(json.dumps(request).encode(), max_spans=2),
        lambda: read_protobuf(body, max_spans=2),
    ):
        with pytest.raises(InputError, match="at most 2 spans in one request"):
            read()


@pytest.mark.parametrize("before", [b"", b"\x3b\x3c"], ids=["", "behind an unknown group"])
@pytest.mark.parametrize("group", [b"", b"\x12\x00" * 60])
def test_groups_without_spans_are_bounded_before_they_take_memory(group: bytes, before: bytes) -> None:
    body = before + (b"\x0a" + bytes([len(group)]) + group) * 60_000
    with pytest.raises(InputError, match=r"at most (50000 spans|500000 fields)"):
        read_protobuf(body, 50_000)
    scopes = [{"scopeSpans": [{}] * (len(group) // 2)}] * 60_000
    with pytest.raises(InputError, match="at most 50000 spans"):
        read_json(json.dumps({"resourceSpans": scopes}).encode(), 50_000)


def varint(number: int) -> bytes:
    low = bytes([number & 127 | (128 if number > 127 else 0)])
    return low if number < 128 else low + varint(number >> 7)


def test_fields_are_counted_before_anything_is_made_of_them() -> None:
    attributes = b"\x4a\x00" * 500_001
    nested = b""
    for tag, inner in ((b"\x12", attributes), (b"\x12", None), (b"\x0a", None)):
        nested = b"\x3b\x3c" + tag + varint(len(inner or nested)) + (inner or nested)
    with pytest.raises(InputError, match="at most 500000 fields"):
        read_protobuf(nested, 50_000)


def test_json_of_too_many_things_is_refused_before_it_is_read() -> None:
    with pytest.raises(InputError, match="braces, brackets and quotes"):
        read_json(b'{"resourceSpans":[' + b"{}," * 8_000_000 + b"{}]}", 50_000)
