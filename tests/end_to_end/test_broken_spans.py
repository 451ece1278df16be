"""An agent that sends every kind of broken span beside good ones: the run loses what is broken, keeps the rest, and says so.

A whole ``agl train`` as processes: the agent earns its rewards as it would without, sends its spans over OTLP to its
attempt's URL, some of them twice, and opens others in the worker's own process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Folder
from training import Training

from agentlightning.adapters.span_tree import SpanTree
from agentlightning.store.base import RolloutQuery
from agentlightning.store.gateway_events import BROKEN_SPANS
from agentlightning.store.open import open_store
from agentlightning.store.rules import broken_warning

pytestmark = [pytest.mark.slow, pytest.mark.long]

STEPS, TASKS, GROUP = 2, 2, 2

AGENT = """
import asyncio
import gzip
import json
import time
import urllib.error
import urllib.request
from pathlib import Path

from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agentlightning.demo import lookup

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
HOUR = 3600 * 10**9
BOMB = gzip.compress(bytes(33 * 1024 * 1024))


def spans():
    now = time.time_ns()

    def span(number, name, parent=0, start=now, end=now + 10**6, **fields):
        times = {"startTimeUnixNano": str(start), "endTimeUnixNano": str(end)}
        above = {"parentSpanId": f"{parent:016x}"} if parent else {}
        return {"traceId": TRACE, "spanId": f"{number:016x}", "name": name, **above, **times, **fields}

    return [
        span(1, "plan"),
        span(2, "execute_tool search", parent=1),
        span(3, "one of a circle", parent=4),
        span(4, "other of a circle", parent=3),
        span(5, "its own parent", parent=5),
        span(6, "of a parent that never came", parent=99),
        span(7, "huge", attributes=[
            {"key": "blob", "value": {"stringValue": "x" * (3 * 1024 * 1024)}},
            {"key": "gen_ai.tool.name", "value": {"stringValue": "search"}},
        ]),
        span(8, 5, attributes={"not": "pairs"}, status="bad", events=7),
        span(9, "of a clock ahead", start=now + HOUR, end=now + HOUR + 10**6),
        span(10, "ends before it begins", end=now - 5),
        span(11, "of a time that cannot be", end=2**63),
        span(2, "of another one's id", parent=1),
        span(0, "without an id"),
        span(12, "gateway.broken_spans", attributes=[{"key": "cycle", "value": {"stringValue": "many"}}]),
        "no span at all",
    ]


def binary():
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    now = time.time_ns()
    for number, name in ((20, "in protobuf"), (0, "without an id")):
        scope.spans.add(
            span_id=number.to_bytes(8, "big"), name=name, start_time_unix_nano=now, end_time_unix_nano=now
        )
    return request.SerializeToString()


def send(llm, body, **headers):
    headers = {"authorization": "Bearer " + llm.api_key} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    try:
        with urllib.request.urlopen(urllib.request.Request(llm.base_url + "/traces", body, headers)) as reply:
            return reply.status
    except urllib.error.HTTPError as refused:
        return refused.code


def send_all(llm):
    request = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans()}]}]}).encode()
    return [
        send(llm, request, content_type="application/json"),
        send(llm, gzip.compress(request), content_type="application/json", content_encoding="gzip"),
        send(llm, binary(), content_type="application/x-protobuf"),
        send(llm, binary().replace(b"in protobuf", b"\\xff" * 11), content_type="application/x-protobuf"),
        send(llm, b"{", content_type="application/json"),
        send(llm, BOMB, content_type="application/json", content_encoding="gzip"),
    ]


async def solve(task, llm):
    reward = await lookup.solve(task, llm)
    said = await asyncio.to_thread(send_all, llm)
    assert said == [200, 200, 200, 400, 400, 413], said
    tracer = trace.get_tracer("agent")
    tracer.start_span("in process", attributes={"n": 2**70, "half": "\\ud800"}).end()
    tracer.start_span("of no kind", kind=None, start_time="today").end()
    Path("rewards", llm.base_url.split("/r/")[1].split("/")[0]).write_text(str(reward))
    return reward
"""

RUN = """
[model]
path = "{model}"
[agent]
run = "agent.py:solve"
workers = 1
[data]
train = "train.jsonl"
val = "val.jsonl"
[algorithm]
group_size = {group}
[trainer]
steps = {steps}
tasks_per_step = {tasks}
[eval]
sampled = false
tasks = 1
[engine]
"""

EXPECTED = {"reserved_name": 1, "too_large": 1, "undecodable": 7}
"""Of every rollout, by cause; what was sent again counts once."""

KEPT = {
    "plan": None,
    "execute_tool search": "plan",
    "one of a circle": None,
    "other of a circle": "one of a circle",
    "its own parent": None,
    "of a parent that never came": None,
    "huge": None,
    "of a clock ahead": None,
    "in protobuf": None,
    "in process": None,
}
"""The name of each span's parent, by its own."""


async def test_an_agent_of_broken_spans_loses_what_is_broken_and_the_run_says_so(folder: Folder, model: Path) -> None:
    training = Training(folder, model)
    folder.write("agent.py", AGENT)
    folder.write("run.toml", RUN.format(model=model, steps=STEPS, tasks=TASKS, group=GROUP))
    rewards = folder.path / "rewards"
    rewards.mkdir()
    assert await training.ended(training.start()) == 0, training.output

    async with open_store(training.store) as store:
        rollouts = await store.rollouts(RolloutQuery(run_id=training.run_id))
        trained = [rollout for rollout in rollouts if rollout.mode == "train"]
        assert len(trained) == STEPS * TASKS * GROUP
        assert {rollout.error for rollout in rollouts} == {None}
        assert {rollout.state for rollout in rollouts} == {"succeeded"}
        assert {rollout.id: rollout.reward for rollout in rollouts} == {
            file.name: float(file.read_text()) for file in rewards.iterdir()
        }
        assert {rollout.warning for rollout in rollouts} == {broken_warning(EXPECTED)}
        assert all(rollout.calls for rollout in rollouts)
        for rollout in rollouts:
            spans = [span for span in await store.spans([rollout.id]) if span.name != BROKEN_SPANS]
            tree = SpanTree(spans)
            parents = {span.name: above.name if (above := tree.parent(span)) else None for span in spans}
            assert parents == KEPT
            assert len(spans) == len(KEPT)
            by_name = {span.name: span for span in spans}
            assert by_name["huge"].attributes["gen_ai.tool.name"] == "search"
            assert len(by_name["huge"].attributes["blob"]) < 200_000
            assert by_name["in process"].attributes["n"] == str(2**70)

    assert training.metric("rollout/broken_spans") == [TASKS * GROUP * sum(EXPECTED.values())] * STEPS
    for cause, count in EXPECTED.items():
        assert training.metric(f"rollout/broken_spans/{cause}") == [TASKS * GROUP * count] * STEPS
    env = {"AGL_STORE": training.store}
    listed = folder.run("rollouts", "list", training.run_id, env=env)
    assert listed.stdout.count("broken spans, dropped or cut") == len(rollouts), listed.stderr
    shown = folder.run("rollouts", "show", rollouts[0].id, "--spans", env=env)
    assert broken_warning(EXPECTED) in shown.stdout, shown.stderr
    assert "execute_tool search" in shown.stdout
