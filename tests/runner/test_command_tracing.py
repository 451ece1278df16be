"""A program that is instrumented with OpenTelemetry, and knows nothing of us, leaves its spans with its attempt."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from test_command import an_llm

import build
from agentlightning.gateway.server import AgentLightningServer
from agentlightning.records import Claim, NewRollout, Span, WorkerStatus
from agentlightning.runner.agent import llm_for
from agentlightning.runner.command import CommandRunner, tracing_environment
from agentlightning.runner.connection_pool import ConnectionPool
from agentlightning.store.client import LightningStoreClient

KEY = "server-key"
NODE = Path(__file__).parent / "node"

PYTHON_PROGRAM = """
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("agent")
with tracer.start_as_current_span("plan"), tracer.start_as_current_span("execute_tool search") as span:
    span.set_attribute("gen_ai.tool.name", "search")
print(1.0)
"""


@pytest.fixture
async def served() -> AsyncIterator[tuple[str, LightningStoreClient, Claim]]:
    """The URL of a server, its store, and an attempt that has begun."""
    with AgentLightningServer("memory://", server_key=KEY) as server:
        async with LightningStoreClient(server.url, KEY) as store:
            run = await store.create_run("traced", {})
            await store.enqueue([NewRollout(run_id=run.id, task={}, group_id="g")])
            (claim,) = await store.claim(WorkerStatus(id="w", run_id=run.id, host="h", pid=1, running=0, seen_ns=0))
            yield server.url, store, claim


async def spans_after(command: str, served: tuple[str, LightningStoreClient, Claim]) -> dict[str, Span]:
    url, store, claim = served
    runner = CommandRunner(command)
    try:
        await runner.run(claim, llm_for(claim, url, "policy", ConnectionPool()))
    finally:
        runner.close()
    return {span.name: span for span in await store.spans([claim.rollout.id])}


def check(spans: dict[str, Span], claim: Claim, clock_step_ns: int = 0) -> None:
    plan, tool = spans["plan"], spans["execute_tool search"]
    assert len(spans) == 2
    assert tool.parent_id == plan.id
    assert tool.attributes["gen_ai.tool.name"] == "search"
    assert plan.attributes["resource.agl.rollout_id"] == claim.rollout.id
    assert plan.started_ns <= tool.started_ns <= tool.finished_ns <= plan.finished_ns + clock_step_ns


async def test_a_python_program_leaves_its_spans(
    served: tuple[str, LightningStoreClient, Claim], tmp_path: Path
) -> None:
    program = tmp_path / "agent.py"
    program.write_text(PYTHON_PROGRAM)
    check(await spans_after(f"{shlex.quote(sys.executable)} {shlex.quote(str(program))}", served), served[2])


@pytest.mark.skipif(
    shutil.which("node") is None or not (NODE / "node_modules").is_dir(),
    reason="needs Node and its packages: `make node-packages` installs them where npm is there",
)
async def test_a_node_program_leaves_its_spans(served: tuple[str, LightningStoreClient, Claim]) -> None:
    spans = await spans_after(f"node {shlex.quote(str(NODE / 'traced.mjs'))}", served)
    # OpenTelemetry for JavaScript begins a span at a whole millisecond and adds a finer duration: an end is up to 1 ms off.
    check(spans, served[2], clock_step_ns=1_000_000)


def test_a_program_with_a_collector_of_its_own_keeps_it_and_its_spans_name_the_attempt() -> None:
    claim = build.claim("r1", task={})
    named = f"agl.rollout_id={claim.rollout.id},agl.attempt=1"
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        assert tracing_environment({name: "http://mine:4318"}, claim, an_llm(claim)) == {
            "OTEL_RESOURCE_ATTRIBUTES": named
        }
    nothing = {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}  # as OpenTelemetry reads it
    assert "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" in tracing_environment(nothing, claim, an_llm(claim))
    given = tracing_environment({"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine"}, claim, an_llm(claim))
    assert given["OTEL_RESOURCE_ATTRIBUTES"] == f"service.name=mine,{named}"
    assert given["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == "http://127.0.0.1:9/r/r1/1/v1/traces"
