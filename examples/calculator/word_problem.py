"""Word problems without digits: the numbers of a question get names, and a calculator that knows the names.

A tiny model cannot copy digits reliably, and need not: the question is shown as "each pack costs N0 dollars", the model
asks the calculator for "N0 - N1" and answers "answer R0". Any model can be shown its questions like this.
"""

from __future__ import annotations

import operator
import re
from fractions import Fraction

NUMBER_WORDS = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "eleven": 11,
    "twelve": 12,
    "dozen": 12,
}
"""Not "one", which is mostly a pronoun."""
WORD = re.compile(r"\d+(?:,\d{3})+(?:\.\d+)?|\d*\.\d+|\d+/\d+|\d+|[a-z]+|[^\sa-z0-9]")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def name_numbers(question: str) -> tuple[str, list[Fraction]]:
    """The question in lower case, words apart and numbers replaced by names, and the numbers in the order of their names.

    >>> name_numbers("Each of 3 packs costs $1.50.")
    ('each of N0 packs costs $ N1 .', [Fraction(3, 1), Fraction(3, 2)])
    """
    words = []
    numbers = []
    for word in WORD.findall(question.lower()):
        number = to_number(word)
        if number is None:
            words.append(word)
        else:
            words.append(f"N{len(numbers)}")
            numbers.append(number)
    return " ".join(words), numbers


def to_number(text: str) -> Fraction | None:
    """ "1,200", "0.5", "3/4" or "seven" as a number; None where it is none."""
    if text in NUMBER_WORDS:
        return Fraction(NUMBER_WORDS[text])
    try:
        return Fraction(text.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


class Calculator:
    """One question's numbers by name, and the results so far: the first is R0, the next R1."""

    def __init__(self, numbers: list[Fraction]) -> None:
        self._values = {f"N{index}": number for index, number in enumerate(numbers)}
        self.results = 0

    def calculate(self, expression: str) -> str:
        """The name of the result with what kind of number it is: "ok R0", "neg R0", "frac R0"; "err" without one."""
        words = expression.split()
        if len(words) != 3 or words[1] not in OPERATORS:
            return "err"
        left, right = self.value(words[0]), self.value(words[2])
        if left is None or right is None or (words[1] == "/" and right == 0):
            return "err"
        result = OPERATORS[words[1]](left, right)
        name = f"R{self.results}"
        self._values[name] = result
        self.results += 1
        kind = "neg" if result < 0 else "ok" if result.denominator == 1 else "frac"
        return f"{kind} {name}"

    def value(self, name: str) -> Fraction | None:
        return self._values.get(name)

    def is_right(self, reply: str, answer: str) -> bool:
        """Whether a final reply, such as "answer R0", names the expected number, to two decimals."""
        words = reply.split()
        value = self.value(words[1]) if len(words) == 2 and words[0] == "answer" else None
        expected = Fraction(answer)
        return value is not None and abs(value - expected) <= Fraction(1, 100) * min(1, abs(expected))
