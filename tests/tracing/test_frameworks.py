"""Each framework says whose call it is, live, as real agents of it run against a server that notes what it is sent."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
from calls_noted import CallsNoted, serve
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from openai import AsyncOpenAI
from openinference.instrumentation.langchain import LangChainInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentlightning.errors import ConfigError
from agentlightning.gateway.asgi_response import parent_span
from agentlightning.tracing.frameworks import current_agent, find_instrumentations, use_agent
from agentlightning.tracing.propagation import ContextPropagator
from agentlightning.tracing.tracer import Tracer

INFO = ModelInfo(vision=False, function_calling=True, json_output=False, structured_output=False, family="unknown")


@pytest.fixture
async def noted() -> AsyncIterator[CallsNoted]:
    async with serve() as calls, httpx2.AsyncClient() as client:
        calls.client, calls.synchronous = client, httpx2.Client()
        context = ContextPropagator(calls.url)
        context.install()
        yield calls
        context.remove()
        calls.synchronous.close()


def graph(**nodes: Any) -> Any:
    """A LangGraph graph of these nodes, one after the other."""
    builder = StateGraph(MessagesState)
    last = START
    for name, node in nodes.items():
        builder.add_node(name, node)
        builder.add_edge(last, name)
        last = name
    return builder.compile()


def chat_model(noted: CallsNoted) -> ChatOpenAI:
    """With a client of this test's event loop: those that langchain-openai makes itself are kept for all."""
    clients = {"http_async_client": noted.client, "http_client": noted.synchronous}
    return ChatOpenAI(model="m", base_url=f"{noted.url}/v1", api_key="k", **clients)


def model_node(noted: CallsNoted) -> Any:
    model = chat_model(noted)

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    return ask


QUESTION = {"messages": [("user", "How many singers are there?")]}


async def test_a_synchronous_langgraph_node_names_its_calls_from_its_thread(noted: CallsNoted) -> None:
    model = chat_model(noted)
    made = graph(checker=lambda state: {"messages": [model.invoke(state["messages"])]})
    await asyncio.to_thread(made.invoke, QUESTION)
    await made.ainvoke(QUESTION)
    assert noted.agents == ["checker", "checker"]


async def test_a_prebuilt_agent_counts_as_the_node_that_it_stands_in(noted: CallsNoted) -> None:
    prebuilt = graph(agent=model_node(noted))
    await graph(researcher=prebuilt).ainvoke(QUESTION)
    await prebuilt.ainvoke(QUESTION)
    await graph(team=graph(writer=prebuilt)).ainvoke(QUESTION)
    assert noted.agents == ["researcher", "agent", "writer"]


@pytest.mark.parametrize("disabled", [True, False])
async def test_an_agent_of_the_openai_sdk_names_its_calls_whether_it_traces_or_not(
    noted: CallsNoted, disabled: bool
) -> None:
    set_tracing_disabled(disabled)
    model = OpenAIChatCompletionsModel(
        "m", AsyncOpenAI(base_url=f"{noted.url}/v1", api_key="k", http_client=noted.client)
    )

    @function_tool
    async def ask_expert(question: str) -> str:
        return str((await Runner.run(Agent(name="expert", model=model), question)).final_output)

    noted.script = [{"name": "ask_expert", "arguments": '{"question": "q"}'}]
    await Runner.run(Agent(name="searcher", model=model, tools=[ask_expert]), "hi")
    set_tracing_disabled(True)
    assert noted.agents == ["searcher", "expert", "searcher"]


async def test_members_of_an_autogen_team_name_their_calls(noted: CallsNoted) -> None:
    client = OpenAIChatCompletionClient(
        model="m", base_url=f"{noted.url}/v1", api_key="k", model_info=INFO, http_client=noted.client
    )
    members = [AssistantAgent("solver", client), AssistantAgent("critic", client)]
    await RoundRobinGroupChat(members, termination_condition=MaxMessageTermination(3)).run(task="x")
    assert noted.agents == ["solver", "critic"]


async def test_a_span_that_names_an_agent_names_the_calls_below_it(noted: CallsNoted) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Tracer(lambda: None))
    tracer = provider.get_tracer("framework")
    client = AsyncOpenAI(base_url=f"{noted.url}/v1", api_key="k", http_client=noted.client)

    async def ask() -> None:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])

    with tracer.start_as_current_span("invoke_agent planner", attributes={"gen_ai.agent.name": "planner"}):
        await ask()
        with tracer.start_as_current_span("step"), tracer.start_as_current_span("inner"):
            await ask()
            with tracer.start_as_current_span("other", attributes={"agent.name": "executor"}):
                await ask()
        await ask()
    await ask()
    assert noted.agents == ["planner", "planner", "executor", "planner", None]


async def test_a_call_says_within_which_nodes_span_it_is_made_where_openinference_traces(noted: CallsNoted) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    LangChainInstrumentor().instrument(tracer_provider=provider)
    try:
        await graph(writer=model_node(noted)).ainvoke(QUESTION)
    finally:
        LangChainInstrumentor().uninstrument()
    [writer] = [span for span in exporter.get_finished_spans() if span.name == "writer"]
    assert parent_span(noted.headers[0]["traceparent"].encode(), "r", 1) == f"r.1.{writer.context.span_id:016x}"


async def test_nodes_that_run_side_by_side_name_their_calls_unless_the_code_itself_does(noted: CallsNoted) -> None:
    ask = model_node(noted)

    async def named(state: MessagesState) -> Any:
        with use_agent("judge"):
            return await ask(state)

    builder = StateGraph(MessagesState)
    for name, node in {"left": ask, "middle": named, "right": ask}.items():
        builder.add_node(name, node)
        builder.add_edge(START, name)
    await builder.compile().ainvoke(QUESTION)
    assert sorted(map(str, noted.agents)) == ["judge", "left", "right"]


@pytest.mark.parametrize(
    "module", ["agents.tracing.scope", "autogen_core._message_handler_context", "langchain_core.runnables.config"]
)
def test_another_release_of_a_framework_leaves_calls_without_a_name(module: str) -> None:
    loaded = sys.modules[module]
    sys.modules[module] = type(sys)("without what is read")
    try:
        assert current_agent() is None
    finally:
        sys.modules[module] = loaded


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("openai_agents", "openinference.instrumentation.openai_agents"),
        ("openai-agents", "openinference.instrumentation.openai_agents"),
        ("httpx", "opentelemetry.instrumentation.httpx"),
        ("opentelemetry-instrumentation-langchain", "opentelemetry.instrumentation.langchain"),
        ("openinference-instrumentation-langchain", "openinference.instrumentation.langchain"),
    ],
)
def test_an_instrumentation_is_found_by_its_name_or_by_its_package(name: str, module: str) -> None:
    [entry] = find_instrumentations([name])
    assert entry.module == module


def test_an_absent_instrumentation_is_named_with_the_package_to_install() -> None:
    with pytest.raises(ConfigError, match=r"'crewai'.*pip install openinference-instrumentation-crewai.*langchain"):
        find_instrumentations(["langchain", "crewai"])
