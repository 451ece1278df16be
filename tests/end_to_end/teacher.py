"""A stronger model behind the OpenAI protocol: it answers the lookup demo's questions as they should be answered."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any

from chat_double import chat_double

from agentlightning.demo.lookup import QUESTIONS
from agentlightning.demo.tasks import PEOPLE


def answer(messages: list[dict[str, Any]]) -> str:
    """What the agent should say next: look up the next fact, or tell the last one."""
    person, relations = plan(messages[0]["content"])
    facts = [message["content"] for message in messages[1:] if message["role"] == "user"]
    if len(facts) == len(relations):
        return f"Answer: {facts[-1]}"
    return f"<find>{facts[-1] if facts else person} {relations[len(facts)]}</find>"


def plan(question: str) -> tuple[str, list[str]]:
    """Whom a question starts from, and the relations to follow."""
    for relation, wordings in QUESTIONS.items():
        for wording in wordings:
            pattern = re.escape(wording).replace(re.escape("{who}"), f"(the boss of )?({'|'.join(PEOPLE)})")
            found = re.fullmatch(pattern, question)
            if found is not None:
                return found[2], ["boss", relation] if found[1] else [relation]
    raise ValueError(question)


def teacher() -> AbstractContextManager[str]:
    return chat_double(lambda request: answer(request["messages"]))
