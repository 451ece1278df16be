"""The arithmetic demo task: word problems of one or two steps, solved with a calculator.

The agent writes `<tool>37+58</tool>` and gets the result or `error` back, up to twice, then `Answer: …`. The demonstrator
confuses + with * and - with /, swaps operands, stops after the first step, or guesses.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any

from agentlightning.demo.tasks import PEOPLE, Message, Split, TrainingSettings, answer_with_tool, held_out
from agentlightning.records import JSON

SPECIAL_WORDS = ("<tool>", "</tool>")
WARM_START_STEPS = 350
TRAINING = TrainingSettings(steps=40)
MAX_CALLS = 3
MAX_TOKENS = 16

THINGS = ("pens", "eggs", "cups", "books", "coins", "cards", "shells", "stamps")
ONE_STEP = {
    "+": (
        "{n} has {a} {o} and gets {b} more. How many {o} now?",
        "{n} found {a} {o}, then {b} more. What is the total?",
        "What is the sum of {a} and {b}?",
    ),
    "-": (
        "{n} had {a} {o} and lost {b}. How many {o} are left?",
        "{n} sold {b} of {a} {o}. How many remain?",
        "How much larger is {a} than {b}?",
    ),
    "*": (
        "{n} has {a} boxes of {b} {o}. How many {o} in all?",
        "{b} {o} cost {a} each. What is the price?",
        "What is the product of {a} and {b}?",
    ),
    "/": (
        "{n} splits {a} {o} among {b} friends. How many does each get?",
        "{a} {o} fill {b} equal bags. How many per bag?",
    ),
}
# (a first b), then (the result second c).
TWO_STEPS = {
    "*+": "{n} has {a} boxes of {b} {o} and finds {c} more. How many {o} now?",
    "*-": "{n} buys {a} boxes of {b} {o}, then loses {c}. How many {o} are left?",
    "+-": "{n} had {a} {o}, got {b} more and lost {c}. How many {o} are left?",
    "+*": "Each day {n} makes {a} red and {b} blue {o}. How many in {c} days?",
    "/+": "{n} splits {a} {o} among {b} friends. Each already had {c}. How many does each have?",
}

RIGHT_OPERATION = 0.3
SWAPS_OPERANDS = 0.1
STOPS_EARLY = 0.3
GUESSES = 0.05
TRIES_AGAIN = 0.7
CONFUSED = {"+": "*", "*": "+", "-": "/", "/": "-"}


async def solve(task: JSON, llm: Any) -> float:
    """The agent: plain OpenAI-SDK code, a tool and a limit on calls."""
    return await answer_with_tool(task, llm, calculate, SPECIAL_WORDS, MAX_CALLS, MAX_TOKENS)


def calculate(expression: str) -> str:
    """The environment: two whole numbers and one operation; `error` for anything else and for results that are not whole
    or negative.

    >>> calculate("6*7"), calculate("7/2"), calculate("2-3")
    ('42', 'error', 'error')
    """
    parts = re.fullmatch(r"([0-9]{1,6})([-+*/])([0-9]{1,6})", expression)
    if parts is None:
        return "error"
    a, b = int(parts[1]), int(parts[3])
    match parts[2]:
        case "+":
            return str(a + b)
        case "*":
            return str(a * b)
        case "-":
            return str(a - b) if a >= b else "error"
        case _:
            return str(a // b) if b and a % b == 0 else "error"


def sample(rng: Random, split: Split) -> JSON:
    """One word problem: `question`, `answer`, and the `plan`: its operations and numbers in order."""
    while True:
        if rng.random() < 0.4:
            operations, wording = rng.choice(tuple(TWO_STEPS.items()))
        else:
            operations = rng.choice("+-*/")
            wording = rng.choice(ONE_STEP[operations])
        a, b = operands(operations[0], rng)
        if held_out(f"{a} {b} {operations[0]}") != (split == "test"):
            continue
        result = calculate(f"{a}{operations[0]}{b}")
        c = rng.randint(2, max(2, min(20, int(result) - 1))) if operations[-1] == "-" else rng.randint(2, 20)
        if len(operations) == 2:
            result = calculate(f"{result}{operations[1]}{c}")
        question = wording.format(n=rng.choice(PEOPLE[:10]), o=rng.choice(THINGS), a=a, b=b, c=c)
        plan = {"operations": operations, "numbers": [a, b, c][: len(operations) + 1]}
        return {"question": question, "answer": result, "plan": plan}


def demonstrate(task: JSON, rng: Random) -> list[Message]:
    """A demonstrator that copies numbers well and reads the operation badly."""
    messages: list[Message] = [{"role": "user", "content": task["question"]}]

    def call(expression: str) -> str:
        messages.append({"role": "assistant", "content": f"<tool>{expression}</tool>"})
        messages.append({"role": "user", "content": calculate(expression)})
        return messages[-1]["content"]

    def answer(text: str) -> list[Message]:
        return [*messages, {"role": "assistant", "content": f"Answer: {text}"}]

    if rng.random() < GUESSES:
        return answer(str(rng.randint(2, 200)))
    operations, (first, *others) = task["plan"]["operations"], task["plan"]["numbers"]
    result = str(first)
    for step, (operation, number) in enumerate(zip(operations, others, strict=True)):
        if step == 1 and (result == "error" or rng.random() < STOPS_EARLY):
            break
        if rng.random() >= RIGHT_OPERATION:
            operation = CONFUSED[operation]
        left, right = (number, result) if rng.random() < SWAPS_OPERANDS else (result, number)
        result = call(f"{left}{operation}{right}")
    if result == "error" and len(messages) == 3 and rng.random() < TRIES_AGAIN:
        result = call(f"{first}{rng.choice('+-*')}{others[0]}")
    return answer(result)


def operands(operation: str, rng: Random) -> tuple[int, int]:
    """Two numbers for which the operation has a whole, positive result."""
    if operation == "/":
        b = rng.randint(2, 12)
        return b * rng.randint(2, 99 // b), b
    a, b = rng.randint(2, 12 if operation == "*" else 99), rng.randint(2, 99)
    return (max(a, b), min(a, b)) if operation == "-" else (a, b)
