"""Traces of an example's own agent on training questions, with right answers in the model's place: for a warm start.

    python examples/gold_traces.py --example calculator --seed 0 --to traces.jsonl
    agl record --traces traces.jsonl                                     # prints the id of a run
    agl train --algorithm sft --from-run RUN --model MODEL_FOLDER

For a pretrained model that does not know the protocol (tools, a team's turns). The agent runs as shipped, over a transport
that answers its requests; a row is its last request with the last answer, so prompts and tools are the framework's own.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

Message = dict[str, Any]
Case = tuple[dict[str, Any], list[Message]]
"""A task, and what the model says on it; a message of weight 0 is a mistake to be seen and not imitated."""


def calculator(rng: random.Random) -> Iterator[Case]:
    """The whole equation for the tool, then its result."""
    data, evaluate = importlib.import_module("data"), importlib.import_module("word_problem").evaluate
    for problem in rng.sample(problems := data.split_all()[0], len(problems)):
        if data.is_close(data.to_number(evaluate(problem.equation)), problem.answer):
            expression = problem.equation.replace(",", "")
            yield (
                problem.row(),
                [tool_call("calculate", expression=expression), said(f"Answer: {evaluate(expression)}")],
            )


def text_to_sql(rng: random.Random) -> Iterator[Case]:
    """The gold query; before every second one a query for another question, which the checker or the database refuses."""
    database, agent = importlib.import_module("database"), importlib.import_module("agent")
    rows = importlib.import_module("data").readable_train()
    for number, row in enumerate(rng.sample(rows, len(rows))):
        messages = [said(f"```sql\n{row['gold']}\n```"), said("RIGHT")]
        other = rng.choice([one for one in rows if one["database"] == row["database"]])
        with database.Database(row["database"]) as opened:
            found = opened.run(other["gold"])
        if number % 2 and not agent.is_right(row, found):
            messages = [said(f"```sql\n{other['gold']}\n```", weight=0), said("WRONG"), *messages]
        yield row, messages


def rag(rng: random.Random) -> Iterator[Case]:
    """A search for the title of each gold paragraph, then the answer; questions for which these searches show them all."""
    data, retriever = importlib.import_module("data"), importlib.import_module("retriever")
    titles = {paragraph.id: paragraph.title for paragraph in data.corpus()}
    rows = data.train_all()
    for row in rng.sample(rows, len(rows)):
        session, queries = retriever.Session(retriever.retriever()), [titles[one] for one in row["supporting"]]
        for query in queries:
            session.search(query)
        if session.found == set(row["supporting"]):
            yield row, [*(tool_call("search", query=query) for query in queries), said(f"Answer: {row['answer']}")]


def said(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def tool_call(name: str, **arguments: str) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}


class Script:
    """Answers each request with the next message, and keeps the last request."""

    def __init__(self, messages: list[Message]) -> None:
        self.messages, self.request, self.asked = messages, dict[str, Any](), 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.request = json.loads(request.content)
        message = {key: value for key, value in self.messages[self.asked].items() if key != "weight"}
        self.asked += 1
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{**call, "id": f"call_{self.asked}"} for call in calls]
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "gold", "object": "chat.completion", "created": 1, "model": "gold", "usage": usage}
        return httpx.Response(200, json=answer | {"choices": [choice]})

    def trace(self) -> dict[str, Any]:
        """The conversation, each answer with its weight."""
        answers = iter(self.messages)
        asked = [
            one | {"weight": next(answers).get("weight", 1)} if one["role"] == "assistant" else one
            for one in self.request["messages"]
        ]
        row = {"messages": [*asked, self.messages[-1]], "reward": 1.0}
        return row | {"tools": self.request["tools"]} if "tools" in self.request else row


async def traces(solve: Callable[..., Any], cases: Iterator[Case], count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for task, messages in cases:
        script = Script(messages)
        transport = httpx.MockTransport(script)
        async with httpx.AsyncClient(transport=transport) as client:
            with httpx.Client(transport=transport) as sync_client:
                llm = SimpleNamespace(base_url="http://gold/v1", api_key="gold", model="gold", http_client=client)
                llm.sync_http_client = sync_client
                await solve(task, llm)
        found += [script.trace()] if script.asked == len(messages) else []
        if len(found) == count:
            break
    return found


EXAMPLES = {"calculator": (calculator, 640), "text_to_sql": (text_to_sql, 320), "rag": (rag, 128)}
"""How an example's traces are made, and how many: a seventh, a tenth and a fifth of its training questions."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--example", choices=tuple(EXAMPLES), required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, help="how many traces")
    parser.add_argument("--to", type=Path, required=True, help="JSONL file")
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent / given.example))
    cases, count = EXAMPLES[given.example]
    solve = importlib.import_module("agent").solve_text
    try:
        rows = asyncio.run(traces(solve, cases(random.Random(given.seed)), given.count or count))
    except FileNotFoundError as cause:
        raise SystemExit(str(cause)) from cause
    given.to.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sys.stdout.write(json.dumps({"traces": len(rows), "to": str(given.to)}) + "\n")


if __name__ == "__main__":
    main()
