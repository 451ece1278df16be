"""A text-to-SQL team in LangGraph: a writer, a checker and a rewriter. It knows nothing of training, only of a base URL.

The writer writes a query and the database runs it. The checker sees what came back and says whether it will do; where it
will not, or the database reports an error, the rewriter writes another query, until three have been written. All of them
read and write one conversation.

`solve_joins` is the same over tables joined by keys, with a checker that sees what kind of rows came back; scoring.py scores
it.

A model call costs about 2.1 ms of CPU in LangChain's client (0.9 of it in the openai SDK); a question 0.7 for the client and
1 for the graph, which is compiled once.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypedDict

from database import Database, Result, same_answer
from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime

MAX_QUERIES = 3
MAX_KINDS = 6
"""Columns of a result that the checker is shown."""
NAME = re.compile(r"\b[TCVJ]\d+\b")


async def solve(task: dict[str, Any], llm: Any) -> float:
    """Execution match (1 or 0) of the last query, for a small model that knows the protocol by heart.

    A task has `question`, `schema`, `database` (a file), `gold` (the right query) and `ordered`; with `names` the model sees
    and writes names such as C0, which stand for what the database calls [head].[age].
    """
    return await execution_match(task, llm, BRIEF)


async def solve_joins(task: dict[str, Any], llm: Any) -> str:
    """What the last query found; on the way, the checker is shown the kinds of the first row's values."""
    found = await answer(task, llm, PREVIEW)
    return found.error or as_lines(found)


async def solve_text(task: dict[str, Any], llm: Any) -> float:
    """The same team with its instructions written out, for a model that can read them."""
    return await execution_match(task, llm, FULL)


async def execution_match(task: dict[str, Any], llm: Any, prompts: Prompts) -> float:
    found = await answer(task, llm, prompts)
    return float(is_right(task, found))


def is_right(task: dict[str, Any], found: Result) -> bool:
    """Tells whether a result is the gold query's."""
    with Database(task["database"]) as database:
        gold = database.run(task["gold"])
    return not found.error and same_answer(found.rows, gold.rows, task["ordered"])


async def answer(task: dict[str, Any], llm: Any, prompts: Prompts) -> Result:
    """The result of the team's last query."""
    model = ChatOpenAI(
        model=llm.model,
        base_url=llm.base_url,
        api_key=llm.api_key,
        http_async_client=llm.http_client,  # one connection pool for all questions
        http_client=llm.sync_http_client,  # unused, but without it every client would make its own, at 20 ms
    )
    with Database(task["database"]) as database:
        context = TeamContext(model, database, task, prompts)
        messages = [SystemMessage(prompts.system)] if prompts.system else []
        end = await TEAM.ainvoke({"messages": messages, "queries": 0}, context=context)
    found: Result = end["result"]
    return found


class State(TypedDict, total=False):
    """The state that the agents hand to each other."""

    messages: Annotated[list[AnyMessage], operator.add]
    queries: int
    result: Result
    verdict: str


@dataclass(frozen=True)
class Prompts:
    """The agents' prompts; {question}, {schema}, {result} and {error} are filled in."""

    system: str
    write: str
    check: str
    rewrite: str
    """After the checker's verdict."""
    repair: str
    """After an error of the database."""
    show: Callable[[Result], str]
    query_tokens: int
    verdict_tokens: int


@dataclass(frozen=True)
class TeamContext:
    """The client, database and task of one question."""

    model: ChatOpenAI
    database: Database
    task: dict[str, Any]
    prompts: Prompts

    async def ask(self, state: State, text: str, max_tokens: int) -> tuple[list[AnyMessage], str]:
        """The two messages that one turn adds, and the reply's text."""
        question = HumanMessage(text)
        reply = await self.model.ainvoke([*state["messages"], question], max_tokens=max_tokens)
        return [question, reply], str(reply.text)

    async def query(self, state: State, text: str) -> State:
        """Ask for a query, and run it."""
        messages, reply = await self.ask(state, text, self.prompts.query_tokens)
        result = run_query(self.database, reply, self.task.get("names", {}))
        return {"messages": messages, "result": result, "queries": state["queries"] + 1}


async def writer(state: State, runtime: Runtime[TeamContext]) -> State:
    context = runtime.context
    text = context.prompts.write.format(question=context.task["question"], schema=context.task["schema"])
    return await context.query(state, text)


async def checker(state: State, runtime: Runtime[TeamContext]) -> State:
    context = runtime.context
    text = context.prompts.check.format(result=context.prompts.show(state["result"]))
    messages, verdict = await context.ask(state, text, context.prompts.verdict_tokens)
    return {"messages": messages, "verdict": verdict}


async def rewriter(state: State, runtime: Runtime[TeamContext]) -> State:
    context = runtime.context
    error = state["result"].error
    text = context.prompts.repair.format(error=error) if error else context.prompts.rewrite
    return await context.query(state, text)


def after_query(state: State) -> Literal["checker", "rewriter", "__end__"]:
    """An error needs no checker; and the last query stands, whatever it gave."""
    if state["queries"] == MAX_QUERIES:
        return END
    return "rewriter" if state["result"].error else "checker"


def after_check(state: State) -> Literal["rewriter", "__end__"]:
    return "rewriter" if is_refusal(state["verdict"]) else END


def is_refusal(verdict: str) -> bool:
    """Tells whether a verdict such as "WRONG: the year is missing" sends the query back."""
    return re.match(r"\W*wrong\b", verdict, re.IGNORECASE) is not None


def run_query(database: Database, reply: str, names: dict[str, str]) -> Result:
    """The result of a reply's query; an error has short names."""
    result = database.run(with_real_names(query_in(reply), names))
    return Result(error=with_short_names(result.error, names)) if result.error else result


def query_in(reply: str) -> str:
    """The query of a reply: the last block of code where there is one, else all of it.

    >>> query_in("Here it is:\\n```sql\\nselect 1;\\n```")
    'select 1'
    """
    blocks = re.findall(r"```(?:\w+\n)?(.*?)```", reply, re.DOTALL)
    return (blocks[-1] if blocks else reply).strip().rstrip("; \n")


def with_real_names(query: str, names: dict[str, str]) -> str:
    """A query in short names as the database understands it; a name that does not exist is left for it to complain about.

    >>> with_real_names("select C0 from T0 where C1 like V0", {"C0": "[a].[b]", "T0": "[a]", "C1": "[a].[c]", "V0": "'x'"})
    "select [a].[b] from [a] where [a].[c] like '%' || 'x' || '%'"
    """
    if not names:
        return query
    query = re.sub(r"\blike (V\d+)\b", r"like '%' || \1 || '%'", query)
    return NAME.sub(lambda match: names.get(match[0], match[0]), query)


def with_short_names(error: str, names: dict[str, str]) -> str:
    """The database's words with the names that the model knows.

    >>> with_short_names("no such column: a.b", {"T0": "[a]", "C0": "[a].[b]"})
    'no such column: C0'
    """
    for name, real in sorted(names.items(), key=lambda item: -len(item[1])):
        if name[0] in "TC":
            error = re.sub(rf"(?<!\w){re.escape(real.replace('[', '').replace(']', ''))}(?!\w)", name, error)
    return error


def in_one_word(result: Result) -> str:
    return "empty" if result.is_empty else "one" if len(result.rows) == 1 else "many"


def in_kinds(result: Result) -> str:
    """How many rows, the kinds of the first one's values, and whether a row occurs twice: "many num txt twice"."""
    kinds = [
        "null" if value is None else "txt" if isinstance(value, str) else "num" for value in next(iter(result.rows), ())
    ]
    twice = ["twice"] if len({*result.rows}) < len(result.rows) else []
    return " ".join([in_one_word(result), *kinds[:MAX_KINDS], *twice])


def as_lines(result: Result) -> str:
    """The first five rows, and how many there are."""
    lines = [" | ".join(str(value)[:80] for value in row) for row in result.rows[:5]]
    return "\n".join([f"{len(result.rows)} row(s)", *lines])


BRIEF = Prompts(
    system="",
    write="{question} schema {schema}",
    check="{result}",
    rewrite="again",
    repair="{error}",
    show=in_one_word,
    query_tokens=32,
    verdict_tokens=4,
)
PREVIEW = replace(BRIEF, show=in_kinds)
FULL = Prompts(
    system="You answer questions about an SQLite database. A writer, a checker and a rewriter work on one query in turn.",
    write="Database:\n{schema}\n\nQuestion: {question}\n\nWriter: write one SQLite query that answers the question. Give the"
    " query only, in a block of code.",
    check="The database returned:\n{result}\n\nChecker: does the query answer the question? Begin with RIGHT or WRONG, and"
    " say in one sentence why.",
    rewrite="Rewriter: write the corrected query. Give the query only, in a block of code.",
    repair="The database reports: {error}\n\nRewriter: write the corrected query. Give the query only, in a block of code.",
    show=as_lines,
    query_tokens=256,
    verdict_tokens=96,
)


def compile_team() -> Any:
    graph = StateGraph(State, context_schema=TeamContext)
    graph.add_node("writer", writer)
    graph.add_node("checker", checker)
    graph.add_node("rewriter", rewriter)
    graph.add_edge(START, "writer")
    graph.add_conditional_edges("writer", after_query)
    graph.add_conditional_edges("rewriter", after_query)
    graph.add_conditional_edges("checker", after_check)
    return graph.compile()


TEAM = compile_team()
