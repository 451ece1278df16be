"""The agent, which keeps its code: only the address of its model is the trainer's."""

from typing import Any

import agentlightning as agl


async def solve(task: dict[str, Any], llm: agl.LLM) -> float:
    """Does one task and returns its reward."""
    client = llm.async_openai()
    reply = await client.chat.completions.create(
        model=llm.model, messages=[{"role": "user", "content": task["question"]}], max_tokens=24
    )
    return score(task, reply.choices[0].message.content or "")


def score(task: dict[str, Any], answer: str) -> float:
    """The reward: 1 for an answer that names the capital, else 0."""
    return float(task["answer"].lower() in answer.lower())
