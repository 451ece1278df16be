"""The retrieval demo task, the quickest to learn: facts about people, one or two hops away.

The agent writes `<find>Ana boss</find>` and gets the fact or `none` back, up to twice, then `Answer: …`. Every task has a
corpus of its own, so facts cannot be learned by heart. The demonstrator confuses city with job and pet with boss, and
often stops after the first hop.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from agentlightning.demo.tasks import (
    CITIES,
    PEOPLE,
    TINY_SETTINGS,
    Message,
    Split,
    TrainingSettings,
    answer_with_tool,
    held_out,
)
from agentlightning.records import JSON

SPECIAL_WORDS = ("<find>", "</find>")
WARM_START_STEPS = 120
TRAINING = TrainingSettings(steps=18, tables=TINY_SETTINGS)
MAX_CALLS = 3
MAX_TOKENS = 10

VALUES = {
    "city": CITIES,
    "job": ("baker", "pilot", "nurse", "judge", "clerk", "coach"),
    "pet": ("cat", "dog", "owl", "fish", "frog", "goat"),
    "boss": PEOPLE,
}
QUESTIONS = {
    "city": ("Where does {who} live?", "In which city is {who}?"),
    "job": ("What is the job of {who}?", "What does {who} do for a living?"),
    "pet": ("What pet does {who} have?", "Which animal lives with {who}?"),
    "boss": ("Who is the boss of {who}?", "Who does {who} report to?"),
}
CORPORA = {"train": range(1_000_000), "test": range(1_000_000, 2_000_000)}

RIGHT_RELATION = 0.35
CONFUSES = 0.8  # of the wrong relations; the others are drawn at random
KNOWS_BOSS_FIRST = 0.6
STOPS_EARLY = 0.4
CONFUSED = {"city": "job", "job": "city", "pet": "boss", "boss": "pet"}


async def solve(task: JSON, llm: Any, client: Any = None) -> float:
    """The agent: plain OpenAI-SDK code, a tool and a limit on calls. client: an AsyncOpenAI of the caller's."""
    search = partial(find, task["corpus"])
    return await answer_with_tool(task, llm, search, SPECIAL_WORDS, MAX_CALLS, MAX_TOKENS, client)


def find(corpus: int, wanted: str) -> str:
    """The environment: the fact that "person relation" names in this corpus, or `none`."""
    person, _, relation = wanted.partition(" ")
    if person not in PEOPLE or relation not in VALUES:
        return "none"
    return Random(f"{corpus} {wanted}").choice([value for value in VALUES[relation] if value != person])


def sample(rng: Random, split: Split) -> JSON:
    """One question: `question`, `corpus`, `answer`, and the `plan`: whom it starts from and the relations to follow."""
    while True:
        person, relation, two_hops = rng.choice(PEOPLE), rng.choice(tuple(QUESTIONS)), rng.random() < 0.5
        wording, corpus = rng.choice(QUESTIONS[relation]), rng.choice(CORPORA[split])
        if held_out(f"{wording} {person} {two_hops}") != (split == "test"):
            continue
        relations = ["boss", relation] if two_hops else [relation]
        answer = person
        for hop in relations:
            answer = find(corpus, f"{answer} {hop}")
        question = wording.format(who=f"the boss of {person}" if two_hops else person)
        return {
            "question": question,
            "corpus": corpus,
            "answer": answer,
            "plan": {"person": person, "relations": relations},
        }


def demonstrate(task: JSON, rng: Random) -> list[Message]:
    """A demonstrator that copies names well, mixes up what is asked and often stops half-way."""
    messages: list[Message] = [{"role": "user", "content": task["question"]}]
    known, relations = task["plan"]["person"], task["plan"]["relations"]
    for hop, relation in enumerate(relations):
        if hop == 1 and rng.random() < STOPS_EARLY:
            break
        if hop == 0 and len(relations) == 2:
            asked = relation if rng.random() < KNOWS_BOSS_FIRST else relations[1]
        else:
            asked = mistaken(relation, rng)
        fact = find(task["corpus"], f"{known} {asked}")
        messages.append({"role": "assistant", "content": f"<find>{known} {asked}</find>"})
        messages.append({"role": "user", "content": fact})
        known = fact
    messages.append({"role": "assistant", "content": f"Answer: {known}"})
    return messages


def mistaken(relation: str, rng: Random) -> str:
    """The relation as the demonstrator remembers it."""
    if rng.random() < RIGHT_RELATION:
        return relation
    return CONFUSED[relation] if rng.random() < CONFUSES else rng.choice(tuple(VALUES))
