"""The agent of benchmarks/structured.py: the demo's retrieval task with a JSON schema on every call.

Each answer of the model is one step, `{"do": "find", "person": "Ana", "relation": "boss"}` or `{"do": "answer", "value":
"Oslo"}`. The flawed demonstrator is the demo's own, in this form.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from agentlightning.demo import lookup
from agentlightning.demo.tasks import CITIES, PEOPLE, Message
from agentlightning.records import JSON

WORDS = sorted({*PEOPLE, *CITIES, *(word for values in lookup.VALUES.values() for word in values), "none"})
FIND = {
    "type": "object",
    "properties": {
        "do": {"const": "find"},
        "person": {"enum": [*PEOPLE]},
        "relation": {"enum": [*lookup.VALUES]},
    },
    "required": ["do", "person", "relation"],
    "additionalProperties": False,
}
ANSWER = {
    "type": "object",
    "properties": {"do": {"const": "answer"}, "value": {"enum": WORDS}},
    "required": ["do", "value"],
    "additionalProperties": False,
}
SCHEMA: JSON = {"anyOf": [FIND, ANSWER]}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "step", "schema": SCHEMA, "strict": True}}
MAX_TOKENS = 48


async def solve(task: JSON, llm: Any) -> float:
    """Plain OpenAI-SDK code."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, http_client=llm.http_client)
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(lookup.MAX_CALLS):
        reply = await client.chat.completions.create(
            model=llm.model, messages=messages, max_tokens=MAX_TOKENS, response_format=FORMAT
        )
        text = reply.choices[0].message.content or ""
        step = valid_step(text)
        if step is None:
            return 0.0
        if step["do"] == "answer":
            return float(step["value"] == task["answer"])
        fact = lookup.find(task["corpus"], f"{step['person']} {step['relation']}")
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": fact}]
    return 0.0


def valid_step(text: str) -> JSON | None:
    """The step that a text is by the schema; None where it is none."""
    try:
        step = json.loads(text)
    except json.JSONDecodeError:
        return None
    find = isinstance(step, dict) and step.keys() == {"do", "person", "relation"}
    if find and step["do"] == "find" and step["person"] in PEOPLE and step["relation"] in lookup.VALUES:
        return dict(step)
    answer = isinstance(step, dict) and step.keys() == {"do", "value"}
    return dict(step) if answer and step["do"] == "answer" and step["value"] in WORDS else None


def demonstration(task: JSON, rng: Random) -> list[Message]:
    """The demo's demonstrator, whose assistant messages are steps."""
    messages = lookup.demonstrate(task, rng)
    return [
        {"role": "assistant", "content": _step(one["content"])} if one["role"] == "assistant" else one
        for one in messages
    ]


def _step(text: str) -> str:
    if text.startswith("Answer: "):
        return json.dumps({"do": "answer", "value": text.removeprefix("Answer: ")})
    person, relation = text.removeprefix("<find>").removesuffix("</find>").split(" ")
    return json.dumps({"do": "find", "person": person, "relation": relation})
