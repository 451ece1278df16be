"""A rollout as one trace, and where traces go: a collector that is real, slow, away or that refuses; a file."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import build
from agentlightning.errors import ConfigError
from agentlightning.records import Call, Finish, NewRollout, Sampling, Span, VersionSpan, WorkerStatus
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.tracing.exporters import (
    MAX_REQUEST_BYTES,
    ExportRejected,
    OtlpFileExporter,
    OtlpHttpExporter,
    finished_rollouts,
    headers_of,
    resource_of,
    send_rollouts,
    trace_of,
)
from agentlightning.tracing.otlp import hex_of, read_json, read_protobuf, write_protobuf, write_response

ROLLOUT = build.rollout(
    "0189", 0.5, task={"question": "2 + 2?"}, step=3, attempt=2, created_ns=50, started_ns=100, finished_ns=900
)


def a_call(name: str, **fields: Any) -> Call:
    given: dict[str, Any] = {
        "suffix_ids": [1, 2],
        "sampled_ids": [3],
        "versions": [VersionSpan(version=7, start=0, end=1)],
        "model": "tiny",
        "sampling": Sampling(max_tokens=9),
        "started_ns": 200,
        "finished_ns": 300,
        "messages": [{"role": "user", "content": "2 + 2?"}],
        "completion": {"role": "assistant", "content": "4"},
    }
    return build.call(ROLLOUT, name, **{**given, **fields})


def a_span(digits: str, **fields: Any) -> Span:
    return build.span(ROLLOUT, id=f"0189.2.{digits}", **{"trace_id": "ab" * 16, **fields})


FIRST, SECOND = "00f067aa0ba902b7", "00f067aa0ba902b8"


def test_a_rollout_is_one_trace_whose_root_says_what_it_was() -> None:
    root, chat, *others = trace_of(
        ROLLOUT,
        [a_call("c1")],
        [a_span(FIRST), a_span(SECOND, parent_id=f"0189.2.{FIRST}"), a_span(FIRST, attempt=1)],
        [build.reward(ROLLOUT, 0.5, name="answer"), build.reward(ROLLOUT, 9.0, attempt=1, name="old")],
    )
    assert {span.trace_id for span in (root, chat, *others)} == {root.trace_id}
    assert len({hex_of(span.id) for span in (root, chat, *others)} - {""}) == 4
    assert [span.parent_id for span in (root, chat, *others)] == [None, root.id, root.id, f"0189.2.{FIRST}"]
    assert root.attributes["agl.reward"] == 0.5
    assert root.attributes["agl.rewards.answer"] == 0.5
    assert "agl.rewards.old" not in root.attributes
    assert (root.attributes["input.value"], root.attributes["output.value"]) == ('{"question":"2 + 2?"}', "4")
    assert (root.status, root.started_ns, root.finished_ns) == ("ok", 100, 900)
    assert others[0].attributes["agl.trace_id"] == "ab" * 16


def test_a_call_is_a_chat_span_of_the_genai_conventions_with_its_whole_prompt() -> None:
    asks = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    tools = [{"type": "function", "function": {"name": "add"}}]
    first = a_call("c1", completion={"role": "assistant", "content": None, "tool_calls": [asks]}, tools=tools)
    second = a_call(
        "c2",
        parent_id="c1",
        messages=[{"role": "tool", "tool_call_id": "t1", "content": "4"}],
        agent="writer",
        span_id=f"0189.2.{FIRST}",
    )
    outside = a_call("c1", policy="", versions=[], usage={"prompt_tokens": 11, "sampled_tokens": 5})
    external = trace_of(ROLLOUT, [outside], [], [])[1].attributes  # it says how many tokens it used
    assert (external["gen_ai.usage.input_tokens"], external["gen_ai.usage.output_tokens"]) == (11, 5)
    assert "agl.policy" not in external
    _, _, chat, tool = trace_of(
        ROLLOUT, [first, second], [a_span(FIRST)], [build.reward(ROLLOUT, -0.1, call_id="c2", name="air.retries")]
    )
    assert chat.parent_id == tool.id
    assert (chat.name, chat.kind) == ("chat tiny", "client")
    said = chat.attributes
    assert json.loads(said["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "2 + 2?"}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "t1", "name": "add", "arguments": '{"a": 2}'}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "t1", "response": "4"}]},
    ]
    assert json.loads(said["gen_ai.output.messages"]) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "4"}], "finish_reason": "stop"}
    ]
    assert json.loads(said["gen_ai.tool.definitions"]) == tools
    assert said["llm.input_messages.1.message.tool_calls.0.tool_call.function.name"] == "add"
    assert said["gen_ai.agent.name"] == "writer"
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (2, 1)
    assert (said["agl.policy_version"], said["agl.rewards.air.retries"]) == (7, -0.1)


def test_protobuf_that_is_written_is_read_back() -> None:
    events = [{"name": "exception", "time_ns": 5, "attributes": {"x": [1, {"y": None}]}}]
    trace = trace_of(ROLLOUT, [a_call("c1")], [a_span(FIRST, events=events, status="error")], [])
    [resource] = read_protobuf(write_protobuf(trace, resource_of("run"))).resources
    assert resource.attributes == resource_of("run")
    assert [span.span_id for span in resource.spans] == [hex_of(span.id) for span in trace]
    assert resource.spans[2].events == events
    assert resource.spans[1].attributes == trace[1].attributes | {"scope.name": "agentlightning"}


# --- where traces go --------------------------------------------------------------------------------------------------


@dataclass
class Receiver:
    """A collector: answers with each of `statuses` in turn, then takes what comes."""

    url: str = ""
    statuses: list[int] = field(default_factory=list)
    taken: list[ExportTraceServiceRequest] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    body: bytes = b""
    """Of its answers."""

    async def answer(self, request: web.Request) -> web.Response:
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.statuses:
            return web.Response(status=self.statuses.pop(0), text="no such project")
        self.taken.append(ExportTraceServiceRequest.FromString(await request.read()))  # aiohttp unpacks gzip
        return web.Response(body=self.body, content_type="application/x-protobuf")

    def names(self) -> list[str]:
        return [
            span.name
            for request in self.taken
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    app = web.Application(client_max_size=MAX_REQUEST_BYTES)
    app.router.add_post("/v1/traces", receiver.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    yield receiver
    await runner.cleanup()


async def a_run(store: InMemoryLightningStore, count: int) -> str:
    run_id = (await store.create_run("traced", {})).id
    await store.enqueue([NewRollout(run_id=run_id, task={}, group_id="g", replica=number) for number in range(count)])
    worker = WorkerStatus(id="w", run_id=run_id, host="h", pid=1, running=0, seen_ns=0)
    for claim in await store.claim(worker, limit=count):
        place = {"run_id": run_id, "rollout_id": claim.rollout.id, "attempt": 1}
        await store.append_calls([a_call(f"c-{claim.rollout.id}", **place)])
        await store.finish([Finish(lease=claim.lease, state="succeeded")])
    return run_id


async def test_finished_rollouts_are_sent_in_protobuf_with_the_given_headers(receiver: Receiver) -> None:
    async with (
        InMemoryLightningStore() as store,
        OtlpHttpExporter(receiver.url, {"authorization": "Basic x"}) as exporter,
    ):
        run_id = await a_run(store, 20)
        sent = [
            await send_rollouts(store, rollouts, exporter, resource_of(run_id))
            async for rollouts in finished_rollouts(store, run_id)
        ]
        assert sent == [32, 8]
        assert [rollouts async for rollouts in finished_rollouts(store, run_id, after=20)] == []
    assert sorted(set(receiver.names())) == ["chat tiny", "rollout"]
    assert len(receiver.names()) == 40
    assert receiver.headers[0]["authorization"] == "Basic x"
    assert receiver.headers[0]["content-encoding"] == "gzip"


async def test_a_collector_that_is_away_is_asked_again_for_a_while_and_one_that_refuses_is_not(
    receiver: Receiver,
) -> None:
    receiver.statuses = [503, 429]
    async with OtlpHttpExporter(receiver.url, {}, first_pause_s=0.0) as exporter:
        await exporter.send(trace_of(ROLLOUT, [], [], []), {})
        receiver.statuses = [404]
        with pytest.raises(ExportRejected, match="HTTP 404: no such project"):
            await exporter.send(trace_of(ROLLOUT, [], [], []), {})
    assert (receiver.names(), receiver.statuses) == (["rollout"], [])
    async with OtlpHttpExporter("http://127.0.0.1:9/v1/traces", {}, timeout_s=0.0) as exporter:
        with pytest.raises(ExportRejected, match="took no traces for 0 s"):
            await exporter.send(trace_of(ROLLOUT, [], [], []), {})


async def test_what_is_too_much_for_one_request_goes_in_several_and_what_is_rejected_is_counted(
    receiver: Receiver,
) -> None:
    spans = [a_span(f"{number:016x}", attributes={"text": "x" * (MAX_REQUEST_BYTES // 3)}) for number in range(1, 6)]
    receiver.body = write_response(1, "too old")
    async with OtlpHttpExporter(receiver.url, {}) as exporter:
        await exporter.send(spans, {})
        assert (exporter.rejected, exporter.reason) == (len(receiver.taken), "too old")
    assert len(receiver.taken) > 1
    assert len(receiver.names()) == 5


async def test_a_file_has_a_request_a_line(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    trace = trace_of(ROLLOUT, [a_call("c1")], [], [])
    async with OtlpFileExporter(path) as exporter:
        await exporter.send(trace, resource_of("run"))
        await exporter.send(trace[:1], resource_of("run"))
    first, second = [read_json(line) for line in path.read_bytes().splitlines()]
    assert [span.name for span in first.resources[0].spans] == ["rollout", "chat tiny"]
    assert [span.name for span in second.resources[0].spans] == ["rollout"]
    with pytest.raises(ConfigError, match="expected a new file"):
        await OtlpFileExporter(path).__aenter__()


def test_headers_of_traces_count_before_those_of_everything() -> None:
    everything = {"OTEL_EXPORTER_OTLP_HEADERS": "a=1"}
    assert headers_of(everything) == {"a": "1"}
    assert headers_of(everything | {"OTEL_EXPORTER_OTLP_TRACES_HEADERS": "B=x%20y, c = 2,junk"}) == {
        "b": "x y",
        "c": "2",
    }
    assert headers_of({"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer a;b"}) == {"authorization": "Bearer a;b"}
    assert headers_of({}) == {}
