"""A LangGraph agent that answers what an order costs: a model that may call one tool. It knows nothing of prompt searches.

`solve` asks for its system prompt by name, so that it is a template of the run. `solve_as_it_was` has its prompt in its
code, as most agents do; there the gateway replaces it, by the rule in rule.toml.
"""

from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from orders import PRICES

SYSTEM = "You answer questions about the orders of a shop."


@tool
def look_up(order: str) -> str:
    """The price of an order."""
    return str(PRICES.get(order, "no such order"))


async def think(state: MessagesState, config: RunnableConfig) -> dict:
    model = config["configurable"]["model"].bind_tools([look_up])
    return {"messages": [await model.ainvoke(state["messages"])]}


builder = StateGraph(MessagesState)
builder.add_node("think", think)
builder.add_node("tools", ToolNode([look_up]))
builder.add_edge(START, "think")
builder.add_conditional_edges("think", tools_condition)
builder.add_edge("tools", "think")
graph = builder.compile()


async def solve(task: dict, llm) -> str:
    """The answer, under the prompt template `system` of the run."""
    return await answer(task, llm, llm.prompt("system"))


async def solve_as_it_was(task: dict, llm) -> str:
    """The answer, under the prompt of this file."""
    return await answer(task, llm, SYSTEM)


async def answer(task: dict, llm, system: str) -> str:
    model = ChatOpenAI(
        model=llm.model,
        base_url=llm.base_url,
        api_key=llm.api_key,
        http_async_client=llm.http_client,
        http_client=llm.sync_http_client,
    )
    begin = {"messages": [("system", system), ("user", task["question"])]}
    try:
        end = await graph.ainvoke(begin, {"configurable": {"model": model}, "recursion_limit": 8})
    except GraphRecursionError:
        return ""  # it went in circles
    return str(end["messages"][-1].text)
