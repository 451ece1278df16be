"""Word problems without digits: the numbers of a question get names, and a calculator that knows the names.

A tiny model cannot copy digits reliably, and need not: the question is shown as "each pack costs N0 dollars", the model
asks the calculator for "N0 - N1" and answers "answer R0". Any model can be shown its questions like this. At the end stand
a calculator and a judge for models that need no names.
"""

from __future__ import annotations

import ast
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
ANSWER = re.compile(r"answer:\W*?(-?\$?\d[\d,]*(?:\.\d+)?)", re.IGNORECASE)
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


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
        """Tells whether a final reply, such as "answer R0", names the expected number, to two decimals."""
        words = reply.split()
        return is_close(self.value(words[1]) if len(words) == 2 and words[0] == "answer" else None, answer)


def is_close(value: Fraction | None, answer: str) -> bool:
    expected = Fraction(answer)
    return value is not None and abs(value - expected) <= Fraction(1, 100) * min(1, abs(expected))


def answers(reply: str, answer: str) -> bool:
    """Tells whether the last "Answer: 1,200" of a reply is the expected number.

    >>> answers("3 * 4 is 12.\\n**Answer:** $12.00 in all", "12")
    True
    """
    found = ANSWER.findall(reply)
    return bool(found) and is_close(to_number(found[-1].replace("$", "")), answer)


def evaluate(expression: str) -> str:
    """The value of an expression of numbers, + - * / and brackets, to six decimals; a sentence where it has none.

    >>> evaluate("(1,200 + 34) / 4")
    '308.5'
    """
    try:
        value = _value(ast.parse(expression.replace(",", "").replace("$", "").strip(), mode="eval").body)
        return str(int(value)) if value.denominator == 1 else f"{float(value):.6f}".rstrip("0").rstrip(".")
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return "error: expected numbers, + - * / and brackets, such as (3 + 4.5) * 2"
    except ZeroDivisionError:
        return "error: division by zero"
    except OverflowError:
        return "error: the result is too large"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as sign, right=right):
            return Fraction(SIGNS[type(sign)](_value(left), _value(right)))
    raise ValueError(f"no arithmetic: {ast.unparse(node)}")
