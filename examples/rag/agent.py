"""A research agent of the OpenAI Agents SDK: it searches several times, then answers. It knows nothing of training.

Only its base URL is given; scoring.py computes its rewards. Each model call costs about 3.2 ms of CPU in the
SDK and the openai client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, RunConfig, RunContextWrapper, Runner, function_tool
from agents.exceptions import MaxTurnsExceeded
from names import SPAN_WORDS, Names
from openai import AsyncOpenAI
from retriever import Session, retriever

MAX_CALLS = 5
"""Four searches and the end."""
QUESTION = "question"
"""A search for the whole question, where answers are spans."""
INSTRUCTIONS = """\
Answer the question with what you find. Each search shows one more paragraph of Wikipedia; search for one name or phrase at \
a time, several times where the question needs several facts. End with a line "Answer: " and a few words."""


@dataclass
class SearchContext:
    """The state that the search tool of one run works on."""

    session: Session
    names: Names | None
    """None: the model reads the text as it is."""
    question: str | None = None
    """The text of the query `QUESTION`; None: there is no such query."""

    def search(self, query: str) -> str:
        words = query if self.names is None else self.names.query(query)
        if query == QUESTION and self.question is not None:
            words = self.question
        allowed = len(self.session.shown) < MAX_CALLS - 1  # the SDK runs the tool after the last call, too
        paragraph = self.session.search(words) if words and allowed else None
        if paragraph is None:
            return "none"
        if self.names is None:
            return f"{paragraph.title}: {paragraph.text}"
        return self.names.paragraph(paragraph.title, paragraph.text)


def named(task: dict[str, Any]) -> tuple[Names, SearchContext]:
    """The names of a task, and the context in which they are shown as E0, E1, …"""
    index = retriever(task.get("corpus"))
    names = Names(task["question"], task["draw"], task["blanked"], titles=index.titles)
    return names, SearchContext(Session(index), names)


def spanned(task: dict[str, Any]) -> tuple[Names, SearchContext]:
    """The same with names for dates and numbers, too, longer paragraphs, and searches for the whole question."""
    index = retriever(task.get("corpus"))
    names = Names(task["question"], task["draw"], task["blanked"], SPAN_WORDS, index.titles, spans=True)
    return names, SearchContext(Session(index), names, task["question"])


@function_tool
async def search(wrapper: RunContextWrapper[SearchContext], query: str) -> str:
    """Shows the best paragraph that was not shown yet.

    Args:
        query: What to look for: a name or a phrase.
    """
    return wrapper.context.search(query)


READER = Agent[SearchContext]("researcher", instructions=INSTRUCTIONS, tools=[search])
"""For a model that reads text."""
SEARCHER = Agent[SearchContext]("researcher", tools=[search], model_settings=ModelSettings(max_tokens=4))
"""For a tiny one that chooses what to search: a search takes it 3 tokens, the end 2, the name of an answer 3."""


async def solve(task: dict[str, Any], llm: Any) -> str:
    """The retrieval slice, over named names (see names.py): it looks for the paragraphs and says "done"."""
    names, context = named(task)
    return await run(SEARCHER, names.question(), context, llm)


async def solve_span(task: dict[str, Any], llm: Any) -> str:
    """The whole task, over named spans: it looks for paragraphs and says "answer E3"; the text that E3 stands for."""
    names, context = spanned(task)
    return span_of(await run(SEARCHER, names.question(), context, llm), names) or ""


def span_of(reply: str, names: Names) -> str | None:
    """The text of an extractive answer, "answer E3"; None where the reply is none, or names what was not shown."""
    word, _, name = reply.strip().partition(" ")
    return names.query(name) if word == "answer" and name in names.shown else None


async def solve_text(task: dict[str, Any], llm: Any) -> str:
    """The whole task, for a real model: it reads the paragraphs and answers."""
    return await run(READER, task["question"], SearchContext(Session(retriever(task.get("corpus"))), None), llm)


async def run(agent: Agent[SearchContext], question: str, context: SearchContext, llm: Any) -> str:
    """The agent's last words; "" where it was still searching at its last call."""
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, http_client=llm.http_client)
    model = OpenAIChatCompletionsModel(llm.model, openai_client=client)
    try:
        result = await Runner.run(
            agent,
            question,
            context=context,
            max_turns=MAX_CALLS,
            run_config=RunConfig(model=model, tracing_disabled=True),  # its traces would go to OpenAI
        )
    except MaxTurnsExceeded:
        return ""
    return str(result.final_output)
