"""Spans and names of agents that run in a worker's process."""

import asyncio
import signal
from pathlib import Path

import pytest
from runner_bench import DEADLINE_S, Bench, written

from agentlightning.records import JSON, Rollout, Span

SAYS_MORE = """
import agentlightning as agl

@agl.operation(kind="tool")
def search(query, limit=3):
    return ["a", "b"]

async def solve(task, llm):
    with agl.operation("plan", agent="planner", depth=2):
        search("singers")
        agl.emit_message("I have two hits", hits=2)
    agl.emit_object({"found": ["a", "b"]}, "facts")
    try:
        raise ValueError("no such table")
    except ValueError as error:
        agl.emit_exception(error)
    return "done"

def score(task, result):
    return float(sum(span.status == "error" for span in result.spans))
"""


async def spans_of(bench: Bench, rollout: Rollout) -> dict[str, Span]:
    return {span.name: span for span in await bench.store.spans([rollout.id])}


async def test_what_an_agent_says_is_recorded_as_spans_of_its_attempt_which_its_reward_function_sees(
    bench: Bench, tmp_path: Path
) -> None:
    spec = bench.file(tmp_path, SAYS_MORE)
    bench.worker_process("--agent", spec, "--reward", spec.replace(":solve", ":score"))
    [rollout] = await bench.settled(await bench.enqueue({"n": 1}))
    assert (rollout.state, rollout.reward) == ("succeeded", 1.0), rollout.error
    spans = await spans_of(bench, rollout)
    assert set(spans) == {"plan", "search", "agl.message", "agl.object", "agl.exception"}
    assert {span.attempt for span in spans.values()} == {1}
    plan, search = spans["plan"], spans["search"]
    assert search.parent_id == plan.id
    assert spans["agl.message"].parent_id == plan.id
    assert plan.parent_id is None
    assert (plan.attributes["gen_ai.agent.name"], plan.attributes["depth"]) == ("planner", 2)
    assert search.attributes["gen_ai.tool.call.arguments"] == '{"query":"singers"}'
    assert spans["agl.exception"].events[0]["attributes"]["exception.message"] == "no such table"
    assert plan.started_ns <= search.started_ns <= search.finished_ns <= plan.finished_ns


HANGS = """
import asyncio
from pathlib import Path
import agentlightning as agl

async def solve(task, llm):
    with agl.operation("begun"):
        with agl.operation("done"):
            pass
        Path(task["sign"]).write_text("here\\n")
        await asyncio.sleep(3600)
"""


async def recorded(bench: Bench, rollout: Rollout, name: str) -> Span:
    """The span once it is in the store."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while name not in (found := await spans_of(bench, rollout)):
        assert asyncio.get_running_loop().time() < deadline, f"{name} did not come; {sorted(found)} did"
        await asyncio.sleep(0.05)
    return found[name]


async def test_a_worker_that_is_killed_leaves_what_its_agent_had_done(bench: Bench, tmp_path: Path) -> None:
    process = bench.worker_process("--agent", bench.file(tmp_path, HANGS))
    [rollout] = await bench.enqueue({"sign": str(tmp_path / "sign")})
    assert (await recorded(bench, rollout, "done")).status == "unset"
    process.kill()
    assert set(await spans_of(bench, rollout)) == {"done"}


async def test_a_lost_attempt_keeps_its_spans_those_that_were_open_too(bench: Bench, tmp_path: Path) -> None:
    process = bench.worker_process("--agent", bench.file(tmp_path, HANGS), "--drain-timeout-s", "0")
    [rollout] = await bench.enqueue({"sign": str(tmp_path / "sign")})
    await written(tmp_path / "sign")
    process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(bench.ended, process)
    [attempt] = await bench.attempts(rollout)
    assert attempt.state == "lost"
    assert set(await spans_of(bench, rollout)) == {"begun", "done"}


OWN_PROVIDER = """
from pathlib import Path
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter

class ToFile(SpanExporter):
    def export(self, spans):
        with open(FILE, "a") as out:
            out.writelines(f"{span.name}\\n" for span in spans)

FILE = Path(__file__).with_name("exported")
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ToFile()))
trace.set_tracer_provider(provider)

def solve(task, llm):
    with trace.get_tracer("mine").start_as_current_span("mine", attributes={"answer": 42}):
        return 1.0
"""


async def test_an_agents_own_tracer_provider_goes_on_and_its_spans_come_here_too(bench: Bench, tmp_path: Path) -> None:
    bench.worker_process("--agent", bench.file(tmp_path, OWN_PROVIDER))
    [rollout] = await bench.settled(await bench.enqueue({"n": 1}))
    span = (await spans_of(bench, rollout))["mine"]
    assert (span.attributes["answer"], span.attributes["scope.name"]) == (42, "mine")
    assert await written(tmp_path / "exported") == "mine\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"trace": False}, set()),
        ({"trace": ["langchain"]}, {"own", "LangGraph", "writer"}),
    ],
)
async def test_the_runs_configuration_says_what_is_traced(
    bench: Bench, tmp_path: Path, settings: JSON, names: set[str]
) -> None:
    run = await bench.store.create_run("traced", {"agent": settings})
    bench.run_id = run.id
    bench.worker_process("--agent", bench.file(tmp_path, GRAPH))
    [rollout] = await bench.settled(await bench.enqueue({"n": 1}))
    assert rollout.state == "succeeded", rollout.error
    spans = await spans_of(bench, rollout)
    assert set(spans) == names
    if "writer" in names:
        assert spans["writer"].parent_id == spans["LangGraph"].id


GRAPH = """
import agentlightning as agl
from langgraph.graph import START, MessagesState, StateGraph

def writer(state):
    with agl.operation("own"):
        return {"messages": [("ai", "done")]}

graph = StateGraph(MessagesState).add_node("writer", writer).add_edge(START, "writer").compile()

async def solve(task, llm):
    await graph.ainvoke({"messages": [("user", "x")]})
    return 1.0
"""


ALONE = """
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
import httpx2

INFO = ModelInfo(vision=False, function_calling=True, json_output=False, structured_output=False, family="unknown")

def answer(request):
    SEEN.append(request.headers.get("x-agl-agent"))
    message = {"role": "assistant", "content": "42"}
    return httpx2.Response(200, json={"id": "c", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}})

SEEN = []

async def solve(task, llm):
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as http_client:
        client = OpenAIChatCompletionClient(model=llm.model, base_url=llm.base_url, api_key="k", model_info=INFO,
            http_client=http_client)
        await AssistantAgent("solver", client).run(task="x")
    return float(SEEN == ["solver"])
"""


@pytest.mark.slow
async def test_an_autogen_agent_that_runs_alone_is_named_by_the_span_that_autogen_opens(
    bench: Bench, tmp_path: Path
) -> None:
    bench.worker_process("--agent", bench.file(tmp_path, ALONE))
    [rollout] = await bench.settled(await bench.enqueue({"n": 1}))
    assert (rollout.reward, rollout.error) == (1.0, None)
    assert "invoke_agent solver" in await spans_of(bench, rollout)
