"""The agent, a graph that keeps its code: only the address of its model is the trainer's."""

from typing import Any

from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

import agentlightning as agl


async def think(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
    """The only node: asks the model that the rollout brought along."""
    return {"messages": [await config["configurable"]["model"].ainvoke(state["messages"])]}


builder = StateGraph(MessagesState)
builder.add_node("think", think)
builder.add_edge(START, "think")
graph = builder.compile()


async def solve(task: dict[str, Any], llm: agl.LLM) -> float:
    """Does one task and returns its reward."""
    model = ChatOpenAI(
        model=llm.model, base_url=llm.base_url, api_key=llm.api_key, http_async_client=llm.http_client, max_tokens=24
    )
    question = HumanMessage(task["question"])
    end = await graph.ainvoke({"messages": [question]}, {"configurable": {"model": model}})
    return score(task, end["messages"][-1].text)


def score(task: dict[str, Any], answer: str) -> float:
    """The reward: 1 for an answer that names the capital, else 0."""
    return float(task["answer"].lower() in answer.lower())
