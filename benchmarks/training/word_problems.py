"""The agent of benchmarks/real_model.py, and its reward: the model writes one calculation, of which the result is judged.

TRL's process imports it, too, from an environment without this project. One call, since that is what GRPOTrainer trains.
"""

from __future__ import annotations

import operator
import re
from typing import Any

MAX_TOKENS = 16
SYSTEM = "Write the calculation that answers the question."
EXAMPLES = (
    ("Tom has 3 boxes with 12 pens each. How many pens does he have?", "3 * 12"),
    ("Ann had 20 apples and ate 4. How many are left?", "20 - 4"),
)
CALCULATION = re.compile(r"(\d+) ?([-+*/]) ?(\d+)")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def messages_of(question: str) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": SYSTEM}]
    for example, calculation in EXAMPLES:
        messages += [{"role": "user", "content": example}, {"role": "assistant", "content": calculation}]
    return [*messages, {"role": "user", "content": question}]


def score(text: str, answer: int) -> float:
    """1 where the first calculation of the text has this result."""
    found = CALCULATION.search(text.replace(",", ""))
    if found is None or (found[2] == "/" and not int(found[3])):
        return 0.0
    return float(OPERATORS[found[2]](int(found[1]), int(found[3])) == answer)


async def solve(task: dict[str, Any], llm: Any) -> float:
    messages = messages_of(task["question"])
    reply = await llm.async_openai().chat.completions.create(model=llm.model, messages=messages, max_tokens=MAX_TOKENS)
    return score(reply.choices[0].message.content or "", task["answer"])
