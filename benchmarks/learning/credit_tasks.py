"""Tasks of the credit claims: agents, their environments, and flawed demonstrators for warm starts.

An agent is a coroutine over an object that looks like the OpenAI SDK's client; it knows nothing of models or training.

| task | calls | content |
| --- | --- | --- |
| sql | up to 8 | many calls and errors; the question's aggregate and filter decide |
| retrieval | up to 6 | one to three hops; each hop must be right, and its outcome is seen |
| relay | 4 | the first agent routes a request; what the second one writes, in three calls, changes nothing |
| corridor | 8 to 12 | one call among small talk decides; which one, and its ideal credit, is known |

Every demonstrator knows the protocol, but mostly follows a habit, whatever the question is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from agentlightning.demo import lookup, sql
from agentlightning.demo.tasks import CITIES, PEOPLE, Message, Split, answer_with_tool, held_out
from agentlightning.records import JSON

HABIT, RIGHT = 0.45, 0.25
"""Shares of a demonstrator's choices."""
DECIDES = "decides"
"""Name of the mark, among a call's named rewards, that the final reward is due to it; nothing learns from it."""


class Model(Protocol):
    """The model behind an agent, and what the benchmark notes about its latest call."""

    client: Any
    """As `openai.AsyncOpenAI`."""

    def earn(self, reward: float) -> None:
        """Gives the latest call a step reward; only some rules are shown them."""

    def decide(self, reward: float) -> None:
        """Notes that the latest call alone decided the final reward. An evaluation goes no further."""


@dataclass(frozen=True, kw_only=True)
class SuiteTask:
    """One task of the suite."""

    sample: Callable[[Random, Split], JSON]
    demonstrate: Callable[[JSON, Random], list[list[Message]]]
    """Conversations of the demonstrator, one for each agent."""
    solve: Callable[[JSON, Model], Awaitable[float]]
    warm_start_steps: int
    learning_rate: float
    budget: float
    """Compute of one cell, in millions of token forwards."""
    model: Mapping[str, int] = field(default_factory=lambda: {"hidden": 48, "layers": 2})
    """Of `tiny_model.build`."""
    special_words: tuple[str, ...] = ()
    """One token each."""
    decisive: bool = False
    """True where the call that the reward is due to is known, and the text of others is ignored."""


class _Named:
    """What `answer_with_tool` reads of an LLM when it is given a client."""

    model = "policy"


def recalled(right: str, known: Sequence[str], habit: str, rng: Random) -> str:
    """What a demonstrator does where `right` is: its habit in most cases, else the right thing or any of those known."""
    drawn = rng.random()
    return habit if drawn < HABIT else right if drawn < HABIT + RIGHT else rng.choice(known)


# --- sql: many calls, frequent errors ---------------------------------------------------------------------------------

SQL_CALLS = 8
SELECTS = tuple(dict.fromkeys(select for _, select, _ in sql.QUESTIONS))


async def solve_sql(task: JSON, model: Model) -> float:
    """The demo's agent, with more calls."""
    with closing(sql.database(task["database"])) as company:

        def tool(query: str) -> str:
            cell = sql.execute(company, query)
            if cell == task["answer"]:
                model.earn(0.5)
            return cell

        return await answer_with_tool(task, _Named, tool, sql.SPECIAL_WORDS, SQL_CALLS, sql.MAX_TOKENS, model.client)


def demonstrate_sql(task: JSON, rng: Random) -> list[list[Message]]:
    """Guesses names, tries again and again where there is no result, and looks things up that it does not need."""
    messages: list[Message] = [{"role": "user", "content": task["question"]}]
    with closing(sql.database(task["database"])) as company:

        def call(query: str) -> str:
            messages.append({"role": "assistant", "content": f"<sql>{query}</sql>"})
            messages.append({"role": "user", "content": sql.execute(company, query)})
            return messages[-1]["content"]

        table, pay, result = rng.choice(sql.TABLES), rng.choice(sql.PAY_COLUMNS), "empty"
        for place in range(SQL_CALLS - 1):
            if (place and result not in ("empty", "error")) or rng.random() < 0.05:
                break
            if rng.random() < (0.7 if place == 0 or result == "error" else 0.2):
                call(".schema")
                table, pay = sql.names(company)
                if len(messages) >= 2 * SQL_CALLS - 1:
                    break
            if rng.random() < 0.25:
                call(f"select count(*) from {table}")
                if len(messages) >= 2 * SQL_CALLS - 1:
                    break
            plan = sql.mistaken(task["plan"], rng)
            select = recalled(task["plan"]["select"], SELECTS, SELECTS[0], rng)
            plan |= {"select": select, "order": task["plan"]["order"] if select == "name" else ""}
            if rng.random() < 0.7:
                plan["filters"] = task["plan"]["filters"]
            result = call(sql.write_query(plan, table, pay))
            if len(messages) >= 2 * SQL_CALLS - 1:
                break
    return [[*messages, {"role": "assistant", "content": f"Answer: {result}"}]]


# --- retrieval: one to three hops -------------------------------------------------------------------------------------

RETRIEVAL_CALLS = 6
KNOWS_BOSS_FIRST, STOPS_EARLY = 0.7, 0.2
RIGHT_RELATION, CONFUSES_RELATION = 0.4, 0.45


def sample_retrieval(rng: Random, split: Split) -> JSON:
    while True:
        person, relation, hops = rng.choice(PEOPLE), rng.choice(tuple(lookup.QUESTIONS)), rng.choice((1, 2, 2, 3))
        wording, corpus = rng.choice(lookup.QUESTIONS[relation]), rng.choice(lookup.CORPORA[split])
        if held_out(f"{wording} {person} {hops}") != (split == "test"):
            continue
        relations, facts = ["boss"] * (hops - 1) + [relation], [person]
        for hop in relations:
            facts.append(lookup.find(corpus, f"{facts[-1]} {hop}"))
        question = wording.format(who="the boss of " * (hops - 1) + person)
        queries = [f"{fact} {hop}" for fact, hop in zip(facts, relations, strict=False)]
        return {"question": question, "corpus": corpus, "answer": facts[-1], "queries": queries}


async def solve_retrieval(task: JSON, model: Model) -> float:
    def tool(wanted: str) -> str:
        model.earn(0.2 * (wanted in task["queries"]))
        return lookup.find(task["corpus"], wanted)

    tags, limits = lookup.SPECIAL_WORDS, (RETRIEVAL_CALLS, lookup.MAX_TOKENS)
    return await answer_with_tool(task, _Named, tool, tags, *limits, model.client)


def demonstrate_retrieval(task: JSON, rng: Random) -> list[list[Message]]:
    messages: list[Message] = [{"role": "user", "content": task["question"]}]
    relations = [query.split()[1] for query in task["queries"]]
    known = task["queries"][0].split()[0]
    for hop, relation in enumerate(relations):
        if hop and rng.random() < STOPS_EARLY:
            break
        if hop < len(relations) - 1:
            asked = relation if rng.random() < KNOWS_BOSS_FIRST else relations[-1]
        else:
            drawn = rng.random()
            confused = drawn < RIGHT_RELATION + CONFUSES_RELATION
            wrong = lookup.CONFUSED[relation] if confused else rng.choice(tuple(lookup.VALUES))
            asked = relation if drawn < RIGHT_RELATION else wrong
        fact = lookup.find(task["corpus"], f"{known} {asked}")
        messages.append({"role": "assistant", "content": f"<find>{known} {asked}</find>"})
        messages.append({"role": "user", "content": fact})
        known = fact
    return [[*messages, {"role": "assistant", "content": f"Answer: {known}"}]]


# --- small talk, of which the next two tasks have much ----------------------------------------------------------------

ADJECTIVES = ("old", "new", "red", "blue", "tall", "calm", "cold", "warm", "grey", "loud", "kind", "odd")
NOUNS = ("tree", "lamp", "road", "bird", "book", "sofa", "ship", "hill", "cup", "coat", "song", "wall")
VERBS = ("see", "like", "recall", "draw", "miss", "count", "find", "hear")


def small_talk(rng: Random) -> str:
    """One of 1,152 sentences."""
    return f"{rng.choice(VERBS)} {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


# --- relay: only the first of two agents decides ----------------------------------------------------------------------

DESKS = ("sales", "legal", "repair", "billing", "press", "travel", "garden", "kitchen")
CONCERNS = {
    "sales": ("wants a price", "asks for an offer"),
    "legal": ("sent a contract", "asks about a clause"),
    "repair": ("has a broken pump", "hears a noise"),
    "billing": ("paid twice", "lost an invoice"),
    "press": ("writes an article", "wants a quote"),
    "travel": ("needs a hotel", "missed a train"),
    "garden": ("planted a hedge", "found a snail"),
    "kitchen": ("burnt a cake", "ordered soup"),
}
LETTER = ("open", "go on", "close")
USUAL_DESK = "office"


def sample_relay(rng: Random, split: Split) -> JSON:
    while True:
        desk, person, city = rng.choice(DESKS), rng.choice(PEOPLE), rng.choice(CITIES)
        concern = rng.choice(CONCERNS[desk])
        if held_out(f"{concern} {person} {city}") == (split == "test"):
            return {"question": f"{person} from {city} {concern}", "answer": desk}


async def solve_relay(task: JSON, model: Model) -> float:
    create = model.client.chat.completions.create
    question = [{"role": "user", "content": task["question"]}]
    reply = await create(model="router", messages=question, max_tokens=RELAY_TOKENS)
    route = reply.choices[0].message.content or ""
    reward = float(route == f"Route: {task['answer']}")
    model.decide(reward)
    model.earn(0.5 * reward)
    messages = [{"role": "user", "content": f"{route} {LETTER[0]}"}]
    for following in (*LETTER[1:], None):
        reply = await create(model="writer", messages=messages, max_tokens=RELAY_TOKENS)
        messages = [*messages, {"role": "assistant", "content": reply.choices[0].message.content or ""}]
        messages = [*messages, {"role": "user", "content": following or ""}]
    return reward


RELAY_TOKENS = 6


def demonstrate_relay(task: JSON, rng: Random) -> list[list[Message]]:
    desk = recalled(task["answer"], DESKS, USUAL_DESK, rng)
    router = [{"role": "user", "content": task["question"]}, {"role": "assistant", "content": f"Route: {desk}"}]
    writer = [{"role": "user", "content": f"Route: {desk} {LETTER[0]}"}]
    for following in (*LETTER[1:], None):
        writer.append({"role": "assistant", "content": small_talk(rng)})
        if following:
            writer.append({"role": "user", "content": following})
    return [router, writer]


# --- corridor: one call of 8 to 12 decides, and the true credit of each is known --------------------------------------

DOORS = ("oak", "iron", "glass", "pine", "steel", "brick")
SIGNS = {"oak": "acorn", "iron": "anvil", "glass": "mirror", "pine": "needle", "steel": "knife", "brick": "chimney"}
USUAL_DOOR = "paper"
CORRIDOR_TOKENS = 6


def sample_corridor(rng: Random, split: Split) -> JSON:
    while True:
        door, person, calls = rng.choice(DOORS), rng.choice(PEOPLE), rng.randint(8, 12)
        sign, asked = SIGNS[door], rng.randint(1, 5)
        if held_out(f"{sign} {person} {calls}") == (split == "test"):
            return {"question": person, "sign": sign, "answer": door, "calls": calls, "asked": asked}


def corridor_room(task: JSON, number: int, chosen: str) -> str:
    """What the agent is told in a room: after the choice, every room shows it."""
    if number == task["asked"]:
        return f"sign {task['sign']}"
    return f"{number} {chosen}" if number else task["question"]


async def solve_corridor(task: JSON, model: Model) -> float:
    create = model.client.chat.completions.create
    messages: list[Message] = []
    chosen = "none"
    for number in range(task["calls"]):
        messages = [*messages, {"role": "user", "content": corridor_room(task, number, chosen)}]
        reply = await create(model="policy", messages=messages, max_tokens=CORRIDOR_TOKENS)
        text = reply.choices[0].message.content or ""
        messages = [*messages, {"role": "assistant", "content": text}]
        if number == task["asked"]:
            chosen = text.removeprefix("door ")
            chosen = chosen if chosen in (*DOORS, USUAL_DOOR) else "none"
            model.decide(float(chosen == task["answer"]))
    return float(chosen == task["answer"])


def demonstrate_corridor(task: JSON, rng: Random) -> list[list[Message]]:
    messages: list[Message] = []
    chosen = "none"
    for number in range(task["calls"]):
        messages.append({"role": "user", "content": corridor_room(task, number, chosen)})
        if number == task["asked"]:
            chosen = recalled(task["answer"], DOORS, USUAL_DOOR, rng)
            messages.append({"role": "assistant", "content": f"door {chosen}"})
        else:
            messages.append({"role": "assistant", "content": small_talk(rng)})
    return [messages]


TASKS = {
    "retrieval": SuiteTask(
        sample=sample_retrieval,
        demonstrate=demonstrate_retrieval,
        solve=solve_retrieval,
        learning_rate=1e-3,
        warm_start_steps=150,
        budget=0.55,
        special_words=lookup.SPECIAL_WORDS,
    ),
    "relay": SuiteTask(
        sample=sample_relay,
        demonstrate=demonstrate_relay,
        solve=solve_relay,
        learning_rate=2e-3,
        warm_start_steps=120,
        budget=0.5,
        decisive=True,
    ),
    "corridor": SuiteTask(
        sample=sample_corridor,
        demonstrate=demonstrate_corridor,
        solve=solve_corridor,
        learning_rate=2e-3,
        warm_start_steps=120,
        budget=0.65,
        decisive=True,
    ),
    "sql": SuiteTask(
        sample=sql.sample,
        demonstrate=demonstrate_sql,
        solve=solve_sql,
        learning_rate=5e-4,
        warm_start_steps=250,
        budget=0.35,
        model={"hidden": 64, "layers": 3},
        special_words=sql.SPECIAL_WORDS,
    ),
}
