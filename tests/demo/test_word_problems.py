"""Word problems: templates, their numbers and splits, and the agent with its calculator."""

from __future__ import annotations

import re
from random import Random

import pytest

from agentlightning.demo import word_problems
from agentlightning.demo.tasks import rows

ROW = {"question": "Ana has 3 boxes with 4 pens each and eats 2. How many are left?", "answer": 10}


def test_a_fifth_of_at_least_150_templates_is_held_out() -> None:
    train, test = ({question for question, _ in word_problems.templates(split)} for split in ("train", "test"))
    assert len(train) + len(test) >= 150
    assert len(test) == -(-(len(train) + len(test)) // 5)
    assert train.isdisjoint(test)


@pytest.mark.parametrize("split", ["train", "test"])
def test_each_split_has_all_four_operations_in_one_and_two_steps(split) -> None:
    signs = {tuple(calculation.split()[1::2]) for _, calculation in word_problems.templates(split)}
    assert {("+",), ("-",), ("*",), ("/",)} < signs
    assert {2} == {len(one) for one in signs if len(one) > 1}


def test_a_problem_states_each_number_once_and_its_results_are_positive_whole_numbers() -> None:
    for row in rows(word_problems, "train", 600, 0):
        numbers = re.findall(r"\d+", row["question"])
        assert len(numbers) == len(set(row["calculation"]) & set("abc")), row
        assert row["answer"] > 0, row
        assert "{" not in row["question"]


def test_rows_depend_on_split_and_seed_alone() -> None:
    assert rows(word_problems, "train", 20, 1) == rows(word_problems, "train", 20, 1)
    assert rows(word_problems, "train", 20, 1) != rows(word_problems, "train", 20, 2)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("3 * 4 - 2", 1.0),
        ("There are 12 - 2 = 11 left", 1.0),
        ("12 + 2, no: 12 - 2", 0.0),
        ("10", 0.0),
        ("5 / 0", 0.0),
        ("", 0.0),
    ],
)
async def test_the_first_calculation_of_the_model_is_computed_and_compared(text: str, reward: float, llm) -> None:
    llm.play(text)
    assert await word_problems.solve(ROW, llm) == reward
    (request,) = llm.requests
    assert request["messages"][-1] == {"role": "user", "content": ROW["question"]}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("12 + 30", 42),
        ("It is 1,200 - 1 = 5", 1199),
        ("7/2", 3.5),
        ("2 + 3 * 4 - 6 / 2", 11),
        ("20 - 4 - 3", 13),
        ("5 / 0", None),
        ("five", None),
    ],
)
def test_the_calculator_computes_the_first_calculation(text: str, result: float | None) -> None:
    assert word_problems.calculate(text) == result


def test_drawn_numbers_divide_without_a_rest() -> None:
    for seed in range(200):
        numbers = word_problems.draw_numbers(Random(seed), "a / b + c")
        assert numbers["a"] % numbers["b"] == 0
