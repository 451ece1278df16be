"""The demo task of the pretrained model: word problems of one or two operations, solved with a calculator.

The model writes a calculation, and the agent computes the first one in its text. The templates are in
``word_problems.txt``; every fifth one is held out, so that held-out problems are worded as no training problem is.
"""

from __future__ import annotations

import re
from importlib.resources import files
from random import Random
from typing import Any

from agentlightning.demo.tasks import Split, TrainingSettings
from agentlightning.records import JSON

TRAINING = TrainingSettings(
    steps=14,
    tasks_per_step=8,
    evaluations=0,
    held_out_tasks=100,
    tables={
        "agent": {"workers": 1, "concurrency": 128},
        "algorithm": {"minibatches": 2},
        "trainer": {"final_learning_rate": 1.0, "checkpoint_every": 20},
        "engine": {"device": "cpu", "max_num_seqs": 128},
    },
)
MAX_TOKENS = 16
HELD_OUT = 5
SYSTEM = "Write the calculation that answers the question."
EXAMPLES = (
    ("Tom has 3 boxes with 12 pens each. How many pens does he have?", "3 * 12"),
    ("Ann had 20 apples and ate 4. How many are left?", "20 - 4"),
    ("Eva had 9 cards, bought 8 more and lost 2. How many does she have now?", "9 + 8 - 2"),
)
TWO_STEPS = 0.1
"""Share of problems that take two operations."""
CALCULATION = re.compile(r"\d+(?: ?[-+*/] ?\d+)+")
TERM = re.compile(r"([-+*/]?) ?(\d+)")
PEOPLE = (
    "Ana",
    "Ben",
    "Carla",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Hugo",
    "Ines",
    "Jonas",
    "Kate",
    "Leo",
    "Maria",
    "Nora",
)
THINGS = ("marbles", "pencils", "stickers", "apples", "buttons", "coins", "postcards", "stones", "ribbons", "badges")


async def solve(task: JSON, llm: Any, client: Any = None) -> float:
    """The agent: plain OpenAI-SDK code with a calculator. client: an AsyncOpenAI of the caller's."""
    from openai import AsyncOpenAI  # here, since task rows alone do not need the SDK

    client = client or AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, http_client=llm.http_client)
    messages = opening(task["question"])
    reply = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=MAX_TOKENS)
    return float(calculate(reply.choices[0].message.content or "") == task["answer"])


def opening(question: str) -> list[Any]:
    """The prompt: solved problems, then the question."""
    messages = [{"role": "system", "content": SYSTEM}]
    for example, calculation in EXAMPLES:
        messages += [{"role": "user", "content": example}, {"role": "assistant", "content": calculation}]
    return [*messages, {"role": "user", "content": question}]


def calculate(text: str) -> float | None:
    """The result of the first calculation in the text, products before sums; None if it has none or divides by zero."""
    found = CALCULATION.search(text.replace(",", ""))
    if found is None:
        return None
    summands: list[float] = []
    for sign, digits in TERM.findall(found[0]):
        number = float(digits)
        if sign == "*":
            summands[-1] *= number
        elif sign == "/" and number == 0:
            return None
        elif sign == "/":
            summands[-1] /= number
        else:
            summands.append(-number if sign == "-" else number)
    return sum(summands)


def templates(split: Split) -> list[tuple[str, str]]:
    """Question and calculation of each template of the split."""
    lines = files("agentlightning.demo").joinpath("word_problems.txt").read_text("utf-8").splitlines()
    pairs = [line.partition(" | ") for line in lines if not line.startswith("#")]
    return [(pair[0], pair[2]) for number, pair in enumerate(pairs) if (number % HELD_OUT == 0) == (split == "test")]


def sample(rng: Random, split: Split) -> JSON:
    """One problem: `question`, `answer` and the `calculation` of its template."""
    steps = 2 if rng.random() < TWO_STEPS else 1
    question, calculation = rng.choice([one for one in templates(split) if len(one[1].split()) == 2 * steps + 1])
    name, other = rng.sample(PEOPLE, 2)
    signs = calculation.split()[1::2]
    while True:
        numbers = draw_numbers(rng, calculation)
        results = [calculate(_filled(calculation[: 5 + 4 * step], numbers)) or 0.0 for step in range(len(signs))]
        if all(result > 0 and result == int(result) for result in results):
            break
    text = question.format(Name=name, Other=other, things=rng.choice(THINGS), **numbers)
    return {"question": text, "answer": int(results[-1]), "calculation": calculation}


def draw_numbers(rng: Random, calculation: str) -> dict[str, int]:
    """Values of a, b and c; a quotient of a and b is whole."""
    c = rng.randint(2, 30)
    if "*" in calculation:
        return {"a": rng.randint(2, 12), "b": rng.randint(2, 20), "c": c}
    if "/" in calculation:
        b = rng.randint(2, 12)
        return {"a": b * rng.randint(2, 15), "b": b, "c": c}
    return {"a": rng.randint(3, 90), "b": rng.randint(2, 60), "c": c}


def _filled(calculation: str, numbers: dict[str, int]) -> str:
    """The calculation with a, b and c replaced by their values."""
    return "".join(str(numbers.get(character, character)) for character in calculation)
