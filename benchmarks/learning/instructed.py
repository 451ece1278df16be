"""The task of the claim `prompts`: questions about people, an agent that has its system prompt by name, its reward with
feedback, and the demonstrator whose habits depend on what the system prompt says.

The agent writes `<find>Ana boss</find>`, gets the fact, up to twice, and ends with the bare word. Facts are those of the
lookup demo. Three sentences of a system prompt each switch on a habit that success needs, two undo one, and all others do
nothing. Job and pet are confused whatever the prompt says: that only weights can mend.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any

from agentlightning.demo import lookup
from agentlightning.demo.tasks import PEOPLE, Message
from agentlightning.records import JSON

MAX_CALLS = 3
MAX_TOKENS = 12

OPENING = "You answer questions about people."
FROM_MEMORY = "Work fast and from memory."
LOOK_UP = "Use find to look up each fact."
GO_ON = "Go on from the boss to the second fact."
BARE = "Give only the bare word as the answer."
SENTENCE = "Answer in a whole friendly sentence."
SEED_PROMPT = f"{OPENING} {FROM_MEMORY}"
"""What the agent has at first: a habit that hurts, and none of those that help."""

MANNERS = ("polite", "brief", "calm", "honest", "cheerful", "formal", "modest", "patient")
SUBJECTS = ("question", "fact", "answer", "word", "boss", "name", "city", "job", "pet", "person")
DISTRACTORS = (
    *(f"Be {manner} to whoever asks." for manner in MANNERS),
    *(f"Take care with the {subject}." for subject in SUBJECTS),
)
GRAMMAR: JSON = {"add": [SENTENCE, LOOK_UP, GO_ON, BARE, *DISTRACTORS], "drop": [FROM_MEMORY]}
"""All edits of the scripted optimiser: four of them help."""

KNOWN = {"boss": 0.97, "city": 0.97, "job": 0.2, "pet": 0.2}
"""Probability that the demonstrator asks for the relation of the question."""
CONFUSED = {"city": "boss", "boss": "city", "job": "pet", "pet": "job"}


async def solve(task: JSON, llm: Any) -> JSON:
    """The agent, in plain OpenAI-SDK code; returns its score and what was wrong."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, http_client=llm.http_client)
    messages: list[Any] = [
        {"role": "system", "content": llm.prompt("system")},
        {"role": "user", "content": task["question"]},
    ]
    asked: list[str] = []
    for _ in range(MAX_CALLS):
        reply = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=MAX_TOKENS)
        text = reply.choices[0].message.content or ""
        call = re.fullmatch("<find>(.*)</find>", text)
        if call is None:
            return judge(task, asked, text)
        asked.append(call[1])
        fact = lookup.find(task["corpus"], call[1])
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": fact}]
    return {"score": 0.0, "feedback": "It never came to an end."}


def judge(task: JSON, asked: list[str], text: str) -> JSON:
    """1 for the right word alone, a half for one in a sentence; the words are those of somebody who reads the rollout."""
    if text == task["answer"]:
        return {"score": 1.0, "feedback": "Right."}
    if task["answer"] in re.findall(r"\w+", text):
        return {"score": 0.5, "feedback": "Right, but I need only the bare word, and this is a whole sentence."}
    hops = len(task["plan"]["relations"])
    if not asked:
        return {"score": 0.0, "feedback": "Wrong: a guess from memory. Nobody used find to look anything up."}
    if len(asked) < hops:
        return {
            "score": 0.0,
            "feedback": "Wrong: it stopped half-way, at the boss, and did not go on to the second fact.",
        }
    return {"score": 0.0, "feedback": f"Wrong: it asked for {asked[-1]}, which is not what the question is about."}


def demonstrate(task: JSON, prompt: str, rng: Random) -> list[Message]:
    """The conversation of the demonstrator under a system prompt."""
    messages = [{"role": "system", "content": prompt}, {"role": "user", "content": task["question"]}]
    known, relations = task["plan"]["person"], task["plan"]["relations"]
    look_up = (0.85 if LOOK_UP in prompt else 0.04) if FROM_MEMORY in prompt else (0.98 if LOOK_UP in prompt else 0.6)
    if rng.random() < look_up:
        for hop, relation in enumerate(relations):
            if hop == 1 and rng.random() > (0.97 if GO_ON in prompt else 0.1):
                break
            asked = relation if rng.random() < KNOWN[relation] else CONFUSED[relation]
            fact = lookup.find(task["corpus"], f"{known} {asked}")
            messages += [
                {"role": "assistant", "content": f"<find>{known} {asked}</find>"},
                {"role": "user", "content": fact},
            ]
            known = fact if fact in PEOPLE or hop == len(relations) - 1 else known
    else:
        fact = rng.choice([value for values in lookup.VALUES.values() for value in values])
    bare = (0.5 if BARE in prompt else 0.05) if SENTENCE in prompt else (0.97 if BARE in prompt else 0.08)
    messages.append({"role": "assistant", "content": fact if rng.random() < bare else f"I think that it is {fact}."})
    return messages


def any_prompt(rng: Random) -> str:
    """A system prompt of some of the sentences, in any order after the first."""
    likely: dict[str, float] = {LOOK_UP: 0.5, GO_ON: 0.5, BARE: 0.5, FROM_MEMORY: 0.4, SENTENCE: 0.2}
    chosen = [sentence for sentence, chance in likely.items() if rng.random() < chance]
    chosen += rng.sample(DISTRACTORS, rng.randrange(5))
    rng.shuffle(chosen)
    return " ".join([OPENING, *chosen])
