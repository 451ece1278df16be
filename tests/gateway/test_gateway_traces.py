"""OTLP/HTTP in: whose spans they are, what is broken in them, and how requests that cannot be served are refused."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import httpx
import pytest
from gateway_house import SERVER_KEY, House, path
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Status, StatusCode

from agentlightning.errors import StoreError
from agentlightning.gateway.app import App
from agentlightning.gateway.otlp import MAX_ATTEMPTS_PER_REQUEST, MAX_REQUEST_BYTES, MAX_SPANS_PER_REQUEST
from agentlightning.gateway.server import AgentLightningServer
from agentlightning.records import Claim, Finish, NewRollout, WorkerStatus
from agentlightning.store.base import RolloutQuery
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.gateway_events import BROKEN, BROKEN_SPANS, IGNORED_BASE_URL, UNKNOWN_ROUTE
from agentlightning.store.sql.store import InMemoryLightningStore

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def a_span(number: int, **fields: Any) -> dict[str, Any]:
    times = {"startTimeUnixNano": "1", "endTimeUnixNano": "2"}
    return {"traceId": TRACE, "spanId": f"{number:016x}", "name": f"span {number}", **times, **fields}


def a_request(*spans: Any, **attributes: Any) -> dict[str, Any]:
    pairs = [
        {
            "key": name.replace("__", "."),
            "value": {"stringValue": value} if isinstance(value, str) else {"intValue": value},
        }
        for name, value in attributes.items()
    ]
    return {"resourceSpans": [{"resource": {"attributes": pairs}, "scopeSpans": [{"spans": list(spans)}]}]}


async def send(house: House, claim: Claim, request: dict[str, Any], **options: Any) -> httpx.Response:
    return await house.http().post(f"{path(claim)}/v1/traces", json=request, **options)


async def names(house: House, claim: Claim) -> list[str]:
    return sorted(span.name for span in await house.store.spans([claim.rollout.id]))


# --- a real program ---------------------------------------------------------------------------------------------------


async def test_a_program_instrumented_with_opentelemetry_lands_in_the_store() -> None:
    with AgentLightningServer("memory://", server_key=SERVER_KEY) as server:
        async with LightningStoreClient(server.url, SERVER_KEY) as store:
            run = await store.create_run("traced", {})
            await store.enqueue([NewRollout(run_id=run.id, task={}, group_id="g")])
            worker = WorkerStatus(id="w", run_id=run.id, host="h", pid=1, running=0, seen_ns=0)
            (claim,) = await store.claim(worker)
            await asyncio.to_thread(trace_something, f"{server.url}/v1/traces", claim.key)
            inner, outer = sorted(await store.spans([claim.rollout.id]), key=lambda span: span.name)
    assert (outer.name, inner.name) == ("plan", "execute_tool search")
    assert inner.parent_id == outer.id
    assert inner.trace_id == outer.trace_id
    assert outer.parent_id is None
    assert (inner.status, inner.status_message) == ("error", "ValueError: no such table")
    assert inner.attributes["gen_ai.tool.name"] == "search"
    assert inner.attributes["list"] == [1, 2]
    assert inner.attributes["resource.service.name"] == "my agent"
    assert inner.attributes["scope.name"] == "agent"
    [event] = inner.events
    assert event["attributes"]["exception.type"] == "ValueError"
    assert outer.started_ns <= inner.started_ns <= event["time_ns"] <= inner.finished_ns <= outer.finished_ns


def trace_something(endpoint: str, key: str) -> None:
    provider = TracerProvider(resource=Resource.create({"service.name": "my agent"}))
    exporter = OTLPSpanExporter(endpoint, headers={"Authorization": f"Bearer {key}"})
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("agent")
    with tracer.start_as_current_span("plan"), tracer.start_as_current_span("execute_tool search") as span:
        span.set_attributes({"gen_ai.tool.name": "search", "list": [1, 2]})
        error = ValueError("no such table")
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, f"ValueError: {error}"))
    provider.shutdown()


# --- what a call says of its trace -------------------------------------------------------------------------------------


async def test_a_call_names_the_span_that_it_was_made_in_and_baggage_its_agent(house: House) -> None:
    claim = await house.claim()
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    told = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01", "baggage": "user=1,agl.agent=SQL%20writer;x=y"}
    for headers in (
        told,
        told | {"x-agl-agent": "checker"},
        {"baggage": "gen_ai.agent.name=planner", "traceparent": f"00-{TRACE}-0000000000000000-01"},
        {"traceparent": "nonsense", "baggage": "=,;agl.agent"},
        {"baggage": "agl.agent=no%00database%0Atakes%20this"},
    ):
        answer = await house.http().post(f"{path(claim)}/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
    calls = sorted(await house.store.calls([claim.rollout.id]), key=lambda call: call.started_ns)
    span_id = f"{claim.rollout.id}.1.00f067aa0ba902b7"
    assert [(call.agent, call.span_id) for call in calls] == [
        ("SQL writer", span_id),
        ("checker", span_id),
        ("planner", None),
        (None, None),
        ("nodatabasetakes this", None),
    ]


# --- encodings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
async def test_protobuf_is_answered_in_protobuf_packed_or_not(house: House, packed: bool) -> None:
    claim = await house.claim()
    request = ExportTraceServiceRequest()
    request.resource_spans.add().scope_spans.add().spans.add(span_id=b"12345678", name="x")  # without times
    body = request.SerializeToString()
    headers = {"content-type": "application/x-protobuf"} | ({"content-encoding": "gzip"} if packed else {})
    answer = await house.http().post(
        f"{path(claim)}/v1/traces", content=gzip.compress(body) if packed else body, headers=headers
    )
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-protobuf")
    said = ExportTraceServiceResponse.FromString(answer.content).partial_success
    assert (said.rejected_spans, said.error_message) == (1, "1 undecodable")
    assert await names(house, claim) == [BROKEN_SPANS]


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({"content-type": "text/plain"}, b"{}", 415),
        ({"content-type": "application/json", "content-encoding": "br"}, b"{}", 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, b"{}", 400),
        ({"content-type": "application/json", "content-encoding": "gzip"}, gzip.compress(b"{}", mtime=0)[:-9], 400),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 2 * gzip.compress(b"{}", mtime=0), 400),
        (
            {"content-type": "application/json"},
            b'{"scopeSpans": [{"spans": [%s{}]}]}' % (b"{}," * MAX_SPANS_PER_REQUEST),
            400,
        ),
        ({"content-type": "application/json"}, b"[1]", 400),
        ({"content-type": "application/x-protobuf"}, b"\xff\xff", 400),
        (
            {"content-type": "application/json", "content-encoding": "gzip"},
            gzip.compress(bytes(MAX_REQUEST_BYTES + 1), mtime=0),
            413,
        ),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused_and_not_to_be_sent_again(
    house: House, headers: dict[str, str], content: bytes, status: int
) -> None:
    claim = await house.claim()
    answer = await house.http().post(f"{path(claim)}/v1/traces", content=content, headers=headers)
    assert answer.status_code == status
    assert "retry-after" not in answer.headers
    assert await names(house, claim) == []


# --- whose ------------------------------------------------------------------------------------------------------------


async def test_a_key_says_whose_spans_they_are_and_opens_no_other_rollout(house: House) -> None:
    mine, theirs = await house.claim("a"), await house.claim("b")
    key = {"authorization": f"Bearer {mine.key}"}
    by_span = a_span(3, attributes=[{"key": "agl.rollout_id", "value": {"stringValue": theirs.rollout.id}}])
    request = a_request(a_span(1), by_span)
    answer = await house.http(address="10.0.0.9").post("/v1/traces", json=request, headers=key)
    assert answer.json()["partialSuccess"]["rejectedSpans"] == "1"
    other = (await house.store.create_run("other", {})).id
    [foreign] = await house.store.enqueue([NewRollout(run_id=other, task={}, group_id="g")])
    await house.store.claim(WorkerStatus(id="w", run_id=other, host="h", pid=1, running=0, seen_ns=0))
    for rollout_id, number, said in (
        (theirs.rollout.id, 1, "this key does not open"),
        (foreign.id, 1, "this key does not open"),
        (mine.rollout.id, 7, "does not exist"),
    ):
        asked = a_request(a_span(2), agl__rollout_id=rollout_id, agl__attempt=number)
        assert said in (await send(house, mine, asked)).json()["partialSuccess"]["errorMessage"]
    assert await names(house, theirs) == await house.store.spans([foreign.id]) == []
    assert "span 1" in await names(house, mine)


async def test_under_the_server_key_attributes_name_attempts(house: House) -> None:
    one, other = await house.claim("a"), await house.claim("b")
    by_span = a_span(3, attributes=[{"key": "agl.rollout_id", "value": {"stringValue": other.rollout.id}}])
    http, headers = house.http(address="10.0.0.9"), {"authorization": f"Bearer {SERVER_KEY}"}
    by_name = a_request(a_span(1), by_span, agl__rollout_id=one.rollout.id)
    by_name["resourceSpans"] += a_request(a_span(2))["resourceSpans"]
    answer = await http.post("/v1/traces", json=by_name, headers=headers)
    assert answer.json()["partialSuccess"]["rejectedSpans"] == "1"
    assert "no attempt named" in answer.json()["partialSuccess"]["errorMessage"]
    assert "span 1" in await names(house, one)
    assert "span 3" in await names(house, other)


async def test_admins_tokens_and_a_server_key_that_looks_like_an_attempts_name_any_attempt(house: House) -> None:
    claim = await house.claim()
    request = a_request(a_span(1), agl__rollout_id=claim.rollout.id)
    admin, reader = [await house.store.create_token("t", role) for role in ("admin", "reader")]  # type: ignore[arg-type]
    app = App(house.store, "sk-agl-server-secret")

    async def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return (await house.http(app, "10.0.0.9").post("/v1/traces", json=request, headers=headers)).status_code

    assert [await status(key) for key in (reader.secret, "sk-agl-server-guess")] == [401, 401]
    assert "span 1" not in await names(house, claim)
    assert [await status(key) for key in (admin.secret, "sk-agl-server-secret")] == [200, 200]
    assert "span 1" in await names(house, claim)
    await app.close()


async def test_a_request_that_names_very_many_attempts_is_looked_up_for_some(house: House) -> None:
    claim = await house.claim()
    request = a_request()
    for number in range(MAX_ATTEMPTS_PER_REQUEST + 5):
        request["resourceSpans"] += a_request(a_span(1), agl__rollout_id=f"r{number}")["resourceSpans"]
    answer = await send(house, claim, request)
    assert answer.json()["partialSuccess"]["rejectedSpans"] == str(MAX_ATTEMPTS_PER_REQUEST + 5)
    assert f"5 of more than {MAX_ATTEMPTS_PER_REQUEST} attempts" in answer.json()["partialSuccess"]["errorMessage"]


@pytest.mark.parametrize("key", [None, "wrong", "sk-agl-AAAA"])
async def test_without_a_key_nobody_sends_spans_from_elsewhere(house: House, key: str | None) -> None:
    claim = await house.claim()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    for url in ("/v1/traces", f"{path(claim)}/v1/traces"):
        http = house.http(address="10.0.0.9", adds_keys=False)
        assert (await http.post(url, json=a_request(a_span(1)), headers=headers)).status_code == 401
    assert await names(house, claim) == []


async def test_spans_that_come_when_the_attempt_is_over_are_taken_for_a_while(house: House) -> None:
    claim = await house.claim()
    await house.store.finish([Finish(lease=claim.lease, state="succeeded")])
    assert (await send(house, claim, a_request(a_span(1)))).status_code == 200
    assert "span 1" in await names(house, claim)


# --- broken -----------------------------------------------------------------------------------------------------------


async def test_only_what_is_broken_is_lost_and_the_rollout_says_what(house: House) -> None:
    claim = await house.claim()
    now = claim.rollout.started_ns or 0
    times = {"startTimeUnixNano": str(now), "endTimeUnixNano": str(now + 10**6)}
    request = a_request(
        a_span(1, parentSpanId=f"{2:016x}", **times),
        a_span(2, parentSpanId=f"{1:016x}", **times),
        a_span(3, parentSpanId=f"{99:016x}", **times),
        a_span(0, name="without id", **times),
        a_span(4, name=5, **times),
        "no span",
        a_span(5, **{**times, "endTimeUnixNano": "1"}),
        a_span(3, name="another", **times),
    )
    answer = await send(house, claim, request)
    assert answer.json()["partialSuccess"] == {"rejectedSpans": "4", "errorMessage": "4 undecodable"}
    await send(house, claim, request)  # exporters do
    assert await names(house, claim) == sorted([BROKEN_SPANS, "span 1", "span 2", "span 3"])
    await house.store.finish([Finish(lease=claim.lease, state="succeeded")])
    [rollout] = await house.store.rollouts(RolloutQuery(ids=[claim.rollout.id]))
    assert (rollout.warning or "").endswith(f"{BROKEN}, dropped or cut: undecodable 4")
    shown = await house.metrics()
    assert 'agl_broken_spans_total{cause="undecodable"} 8.0' in shown


async def test_a_program_cannot_say_what_the_gateway_says_of_it(house: House) -> None:
    claim = await house.claim()
    now = claim.rollout.started_ns or 0
    times = {"startTimeUnixNano": str(now), "endTimeUnixNano": str(now + 10**6)}
    names_ = (BROKEN_SPANS, BROKEN_SPANS, UNKNOWN_ROUTE)
    spans = [a_span(place, name=name, **times) for place, name in enumerate(names_, 1)]
    await send(house, claim, a_request(*spans, service__name="agent"))
    await house.store.finish([Finish(lease=claim.lease, state="succeeded")])
    [rollout] = await house.store.rollouts(RolloutQuery(ids=[claim.rollout.id]))
    assert rollout.state == "succeeded"
    assert (rollout.warning or "").endswith("reserved_name 3")
    assert IGNORED_BASE_URL in (rollout.warning or "")


class Failing(InMemoryLightningStore):
    """A store that is away when spans are to be written, as often as it is told."""

    failures = 0

    async def append_spans(self, spans: Any) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreError("the store is away")
        await super().append_spans(spans)


async def test_what_a_store_that_is_away_did_not_take_is_sent_again(make_house: Any) -> None:
    async with Failing() as store:
        house = await make_house(store)
        claim = await house.claim()
        await send(house, claim, a_request(a_span(2)))
        store.failures = 1
        request = a_request(a_span(1), "no span")
        answer = await send(house, claim, request)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert (await send(house, claim, request)).status_code == 200
        spans = {span.id: span for span in await store.spans([claim.rollout.id])}
        assert f"{claim.rollout.id}.1.{1:016x}" in spans
        causes = [span.attributes for span in spans.values() if span.name == BROKEN_SPANS]
        assert {"undecodable": 1} in causes
        await house.close()


# --- fuzz -------------------------------------------------------------------------------------------------------------

KEYS = ("key", "value", "stringValue", "intValue", "kvlistValue", "arrayValue", "values", "code", "name")
TEXTS = st.text(st.characters(exclude_categories=()), max_size=20)  # halves of characters too
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.just(TRACE),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=20,
)
FIELDS = ("traceId", "spanId", "parentSpanId", "name", "kind", "startTimeUnixNano", "attributes", "status", "events")
SPANS = st.dictionaries(st.sampled_from(FIELDS), VALUES).map(lambda fields: a_span(1) | fields)


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(SPANS | VALUES, max_size=4), VALUES, st.dictionaries(st.sampled_from(["name", "attributes"]), VALUES))
async def test_nothing_that_anybody_sends_as_a_span_is_a_500(
    house: House, spans: list[Any], resource: Any, scope: Any
) -> None:
    claim = await house.claim(group=f"g{len(house._clients)}")
    groups = [{"scope": scope, "spans": spans}]
    request = {"resourceSpans": [{"resource": {"attributes": resource}, "scopeSpans": groups}]}
    answer = await house.http().post(
        f"{path(claim)}/v1/traces",
        content=json.dumps(request).encode(),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code in (200, 400), answer.text
    recorded = [span for span in await house.store.spans([claim.rollout.id]) if span.name != BROKEN_SPANS]
    lost = int(answer.json().get("partialSuccess", {}).get("rejectedSpans", 0))
    assert len(recorded) + lost <= len(spans)
    assert lost >= sum(not isinstance(span, dict) for span in spans) or answer.status_code == 400
