"""Real word problems: ASDiv-A (Miao et al. 2020) and MAWPS (Koncel-Kedziorski et al. 2016), held out by template.

The slice `all` has SVAMP (Patel et al. 2021) and short questions of GSM8K (Cobbe et al. 2021) besides; whole, they are for
transfer and for models that can read. All are read from $AGL_DATA/math/*.jsonl.gz, else from the Hugging Face hub
(`pip install datasets`).

Held out are whole *templates*: questions whose words (numbers left out) overlap by half or more, directly or through
others, are one template, and no question of a held-out template has such a neighbour in training. A split at random
would let a model that copies its nearest neighbour's solution look twice as good as it is.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from word_problem import evaluate, is_close, name_numbers, to_number

SETS = {
    "asdiv_a": "MU-NLPC/Calc-asdiv_a",
    "mawps": "MU-NLPC/Calc-mawps",
    "svamp": "MU-NLPC/Calc-svamp",
    "gsm8k_train": "MU-NLPC/Calc-gsm8k:train",
    "gsm8k_test": "MU-NLPC/Calc-gsm8k:test",
}
"""Files under $AGL_DATA/math, and the set on the hub, of which one split or all of them are the same rows."""
BLANK = "_"
HELD_OUT = 51
"""Of 256: a fifth of the templates."""
CALCULATION = re.compile(r'<gadget id="calculator">(.*?)</gadget>\s*<output>(.*?)</output>')
"""An expression and its value in Calc-X markup, in which the hub's sets write their solutions."""

Step = tuple[str, str, str]
"""Operand, operator, operand: ("N0", "-", "R0")."""


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str
    equation: str
    source: str = ""
    """The data set, where it is told apart."""

    def row(self) -> dict[str, str]:
        """Returns the agent's task. The equation is not in it: training sees answers only."""
        row = {"question": self.question, "answer": self.answer}
        return row | {"set": self.source} if self.source else row


def train(seed: int = 0, epochs: int = 4, blanks: float = 0.1) -> list[dict[str, str]]:
    """Training rows of some epochs, each with other words blanked out, so that the model cannot learn questions by heart."""
    return training_rows(split(load())[0], seed, epochs, blanks)


def training_rows(problems: list[Problem], seed: int, epochs: int = 4, blanks: float = 0.1) -> list[dict[str, str]]:
    rng = random.Random(seed)
    return [
        {"question": blank_words(problem.question, blanks, rng), "answer": problem.answer}
        for _ in range(epochs)
        for problem in rng.sample(problems, len(problems))
    ]


def heldout() -> list[dict[str, str]]:
    """Rows of the held-out templates, as they are."""
    _, problems = split(load())
    return [problem.row() for problem in problems]


def all_train(seed: int = 0) -> list[dict[str, str]]:
    """Training rows of the slice `all`, two epochs."""
    return training_rows(split_all()[0], seed, epochs=2)


def all_heldout() -> list[dict[str, str]]:
    """Held-out rows of the slice `all`, each with its `set`; the first ones are a sample of all sets."""
    problems = split_all()[1]
    return [problem.row() for problem in random.Random(0).sample(problems, len(problems))]


def readable_train() -> list[dict[str, str]]:
    """Training rows of the slice `all` as they are, for a model that reads."""
    return [problem.row() for problem in split_all()[0]]


@lru_cache(maxsize=1)
def split_all() -> tuple[list[Problem], list[Problem]]:
    """(training, held out) of every set: ASDiv-A, MAWPS and SVAMP together by template, GSM8K by its own split.

    Of GSM8K the questions whose solution is at most three steps over the question's own numbers (`program`).
    """
    training, held_out = split(_problems(row for name in ("asdiv_a", "mawps", "svamp") for row in _named_rows(name)))
    short = ([p for p in _problems(_named_rows(name)) if program(p)] for name in ("gsm8k_train", "gsm8k_test"))
    return training + next(short), held_out + next(short)


def svamp() -> list[dict[str, str]]:
    """SVAMP: ASDiv-A's kinds of question, changed so that habits mislead. As it is, for transfer: nothing is held out."""
    answers = ((row["question"], to_number(str(row["result"]).strip())) for row in _rows("svamp"))
    return [{"question": question, "answer": str(answer)} for question, answer in answers if answer is not None]


def load() -> list[Problem]:
    """All problems of ASDiv-A and MAWPS in a fixed order, each question once."""
    return _problems((*_rows("asdiv_a"), *_rows("mawps")))


def read_own(file: Path) -> list[Problem]:
    """The problems of a JSONL file of yours: {"question", "answer" (a number), "equation" (may be left out)}."""
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        row = json.loads(line)
        if not isinstance(row, dict) or not {"question", "answer"} <= row.keys():
            raise SystemExit(f"{file}, row {number}: expected question and answer")
        if to_number(str(row["answer"]).strip()) is None:
            raise SystemExit(f"{file}, row {number}: answer: expected a number, got {row['answer']!r}")
        equation = row.get("equation")
        rows.append(row | {"result": row["answer"], "equation": equation, "equation_ok": equation is not None})
    return _problems(rows)


def _problems(rows: Iterable[dict[str, Any]]) -> list[Problem]:
    seen = set()
    problems = []
    for row in rows:
        key = " ".join(re.findall(r"[a-z0-9.]+", row["question"].lower()))
        answer = to_number(str(row["result"]).strip())
        if key in seen or answer is None:
            continue
        seen.add(key)
        problems.append(Problem(row["question"], str(answer), _equation(row, str(answer)), row.get("set", "")))
    return problems


def split(problems: list[Problem]) -> tuple[list[Problem], list[Problem]]:
    """(training, held out): whole templates go to one side, chosen by a hash of the template's first question."""
    first: dict[int, str] = {}
    sides: tuple[list[Problem], list[Problem]] = ([], [])
    for problem, template in zip(problems, templates([p.question for p in problems]), strict=True):
        name = first.setdefault(template, problem.question)
        sides[hashlib.md5(name.encode()).digest()[0] < HELD_OUT].append(problem)
    return sides


def templates(questions: list[str]) -> list[int]:
    """The number of each question's template: word sets with a Jaccard index of at least 0.5 are joined."""
    places: dict[str, int] = {}
    sets = []  # a set of words as the bits of one integer, so that 3.7 million pairs take a second
    for question in questions:
        words = set(re.findall(r"\b[a-z]+\b", name_numbers(question)[0]))
        sets.append(sum(1 << places.setdefault(word, len(places)) for word in words))
    sizes = [bits.bit_count() for bits in sets]
    parent = list(range(len(sets)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for i, bits in enumerate(sets):
        for j in range(i):
            # |a ∩ b| / |a ∪ b| >= 1/2, with |a ∪ b| = |a| + |b| - |a ∩ b|
            if 3 * (bits & sets[j]).bit_count() >= sizes[i] + sizes[j]:
                parent[root(i)] = root(j)
    return [root(index) for index in range(len(sets))]


def program(problem: Problem) -> list[Step] | None:
    """The equation as at most three steps over named numbers; None where it needs a number that the question lacks.

    "7 + 2 * 3" on numbers 7, 2, 3 -> [("N1", "*", "N2"), ("N0", "+", "R0")]
    """
    numbers = name_numbers(problem.question)[1]
    used: Counter[int] = Counter()
    steps: list[Step] = []
    operators = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}

    def name(node: ast.expr) -> str:
        if isinstance(node, ast.BinOp) and type(node.op) in operators:
            steps.append((name(node.left), operators[type(node.op)], name(node.right)))
            return f"R{len(steps) - 1}"
        if isinstance(node, ast.Constant):
            number = to_number(str(node.value))
            at = min((i for i, n in enumerate(numbers) if n == number), key=lambda i: used[i], default=None)
            if at is not None:
                used[at] += 1
                return f"N{at}"
        raise ValueError(f"no name for {ast.unparse(node)}")

    try:
        name(ast.parse(problem.equation.replace(",", "").strip(), mode="eval").body)
    except (ValueError, SyntaxError):
        return None
    return steps if 1 <= len(steps) <= 3 else None


def blank_words(question: str, share: float, rng: random.Random) -> str:
    """The question with a share of its words, never its numbers, replaced by a blank."""

    def blank(match: re.Match[str]) -> str:
        word = match.group()
        return BLANK if to_number(word.lower()) is None and rng.random() < share else word

    return re.sub(r"[A-Za-z]+", blank, question)


def _equation(row: dict[str, Any], answer: str) -> str:
    """The equation, or the chain of calculations as one expression."""
    return str(row["equation"]) if row.get("equation_ok") else _in_one(row.get("chain") or "", answer)


def _in_one(chain: str, answer: str) -> str:
    """The last calculation with earlier ones in place of their values; "" where that is not the answer.

    "48/2" -> 24, "48+24" -> 72 becomes "48+(48/2)".
    """
    written: dict[Fraction | None, str] = {}
    expression = ""
    for calculation, value in CALCULATION.findall(chain):

        def earlier(number: re.Match[str]) -> str:
            return written.get(to_number(number[0]), number[0])

        expression = re.sub(r"\d[\d,]*(?:\.\d+)?|\.\d+", earlier, calculation)
        written[to_number(value)] = f"({expression})"
    return expression if is_close(to_number(evaluate(expression)), answer) else ""


def _named_rows(name: str) -> Iterable[dict[str, Any]]:
    """Rows with the name of their set; GSM8K's two files are one set."""
    return [row | {"set": name.removesuffix("_train").removesuffix("_test")} for row in _rows(name)]


def _rows(name: str) -> Iterable[dict[str, Any]]:
    root = os.environ.get("AGL_DATA")
    path = Path(root, "math", f"{name}.jsonl.gz") if root else None
    if path is None or not path.exists():
        return _hub_rows(SETS[name], path)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _hub_rows(hub: str, missing: Path | None) -> Iterable[dict[str, Any]]:
    name, _, split_name = hub.partition(":")
    try:
        from datasets import load_dataset
    except ImportError as cause:
        where = f"{missing} does not exist" if missing else "AGL_DATA is not set"
        raise FileNotFoundError(f"{where}, and reading {name} from the hub needs: pip install datasets") from cause
    splits = load_dataset(name)
    return [row for one in ([split_name] if split_name else sorted(splits)) for row in splits[one]]
