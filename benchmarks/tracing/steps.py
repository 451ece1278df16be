"""The agent whose steps benchmarks/tracing.py times: a LangGraph graph with one node, a model call and a tool in it.

Plain framework code that runs in the worker of ours and in AgentOps's environment alike; who traces decorates the tool, as
its users do. A step is one run of the graph.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

SCHEMA = "You write SQL for the tables singer(id, name, age, country) and concert(id, singer_id, year, venue)."
QUESTION = "How many singers from France gave a concert after 2014?"

Tool = Callable[[str], str]


def execute(sql: str) -> str:
    """Stands for what an agent does beside its model calls."""
    return f"{len(sql)} characters"


async def time_block(block: dict[str, Any], tool: Tool) -> dict[str, float]:
    """Milliseconds of `steps` steps: {"wall": median, "least": minimum, "cpu": mean of the process's CPU time}."""
    model = ChatOpenAI(model=block["model"], base_url=block["base_url"], api_key=block["api_key"], max_retries=0)

    async def writer(state: MessagesState) -> dict[str, Any]:
        answer = await model.ainvoke(state["messages"])
        return {"messages": [answer, HumanMessage(tool(str(answer.content)))]}

    builder = StateGraph(MessagesState)
    builder.add_node("writer", writer)
    builder.add_edge(START, "writer")
    graph = builder.compile()
    question = {"messages": [SystemMessage(SCHEMA), HumanMessage(QUESTION)]}
    await graph.ainvoke(question)  # opens the connection
    walls = []
    began = time.process_time()
    for _ in range(block["steps"]):
        start = time.perf_counter()
        await graph.ainvoke(question)
        walls.append(time.perf_counter() - start)
    cpu = time.process_time() - began
    figures = {"wall": statistics.median(walls), "least": min(walls), "cpu": cpu / len(walls)}
    return {name: 1000 * seconds for name, seconds in figures.items()}


async def plain(task: dict[str, Any], llm: Any) -> float:
    """In a worker that traces nothing."""
    return await _in_worker(task, llm, execute)


async def traced(task: dict[str, Any], llm: Any) -> float:
    """In a worker that traces."""
    import agentlightning

    return await _in_worker(task, llm, agentlightning.operation(kind="tool")(execute))


async def _in_worker(task: dict[str, Any], llm: Any, tool: Tool) -> float:
    block = {**task, "model": llm.model, "base_url": llm.base_url, "api_key": llm.api_key}
    figures = await time_block(block, tool)
    await asyncio.to_thread(Path(task["report"]).write_text, json.dumps(figures))
    return 1.0
