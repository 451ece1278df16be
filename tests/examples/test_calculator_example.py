"""The calculator example's own parts, without a trainer: data, names, calculator, tokenizer, agent."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripted import run_agent

from agentlightning.gateway.policy.response_decoder import ResponseDecoder
from agentlightning.protocols.base import CompletionRequest, assistant_message
from agentlightning.rendering.conversation import Conversation
from agentlightning.rendering.graph import RequestView
from agentlightning.rendering.renderer import Renderer

EXAMPLE = "calculator"


def row(question: str, result: str, equation: str) -> dict[str, Any]:
    return {"question": question, "result": result, "equation": equation, "equation_ok": True}


@pytest.fixture
def data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "math").mkdir()
    rows = {
        "asdiv_a": [
            row("7 red apples and 2 green apples are in the basket. How many apples are there?", "9", "7 + 2"),
            row("5 red apples and 3 green apples are in the basket. How many apples are there?", "8", "5 + 3"),
            row("5 red apples and 3 green apples are in the basket. How many apples are there?", "8", "5 + 3"),
        ],
        "mawps": [row("Joan ran 12 miles. Her dog walked half as far over 3 days.", "2", "12 / 3 / 2")],
    }
    for name, lines in rows.items():
        with gzip.open(tmp_path / "math" / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    monkeypatch.setenv("AGL_DATA", str(tmp_path))
    return tmp_path


def test_the_calculator_names_its_results_and_says_what_kind_they_are(module: Callable[[str], ModuleType]) -> None:
    calculator = module("word_problem").Calculator([Fraction(6), Fraction(4)])
    replies = [calculator.calculate(text) for text in ("N0 + N1", "N1 - N0", "N0 / N1", "R0 * R2", "N0 + N7", "N0")]
    assert replies == ["ok R0", "neg R1", "frac R2", "ok R3", "err", "err"]
    assert calculator.is_right("answer R3", "15")
    assert not any(calculator.is_right(reply, "15") for reply in ("answer R0", "R3", "answer 15", "answer R9", ""))


def test_questions_that_differ_in_numbers_only_have_one_template_and_one_side(
    module: Callable[[str], ModuleType], data_root: Path
) -> None:
    data = module("data")
    problems = data.load()
    first, second, other = data.templates([problem.question for problem in problems])
    assert first == second != other
    sides = [{problem.question for problem in side} for side in data.split(problems)]
    assert any({problems[0].question, problems[1].question} <= side for side in sides)
    assert not sides[0] & sides[1]


def test_data_that_is_nowhere_is_one_clear_sentence(
    module: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"asdiv_a\.jsonl\.gz does not exist, and reading MU-NLPC/Calc-asdiv_a"):
        module("data").load()


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4.5) * 2", "15"),
        ("$1,200 / 7", "171.428571"),
        ("-2 - -3", "1"),
        ("1 / 10000000", "0"),
        ("1 / (2 - 2)", "error: division by zero"),
        ("2 ** 9", "error: expected numbers, + - * / and brackets, such as (3 + 4.5) * 2"),
        ("__import__('os')", "error: expected numbers, + - * / and brackets, such as (3 + 4.5) * 2"),
        ("9" * 400 + "/ 7", "error: the result is too large"),
    ],
)
def test_the_calculator_of_real_models_reads_expressions_and_nothing_else(
    module: Callable[[str], ModuleType], expression: str, value: str
) -> None:
    assert module("word_problem").evaluate(expression) == value


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("6 / 3 is 2.\nAnswer: 2", True),
        ("**Answer:** $2.00", True),
        ("Answer: 3\nNo, wait.\nAnswer: 2 packs", True),
        ("Answer: 2\nNo, wait.\nAnswer: 3", False),
        ("Answer: -2", False),
        ("Answer: 2,000", False),
        ("2", False),
        ("Answer: none of 2", False),
    ],
)
def test_the_last_answer_line_counts(module: Callable[[str], ModuleType], reply: str, right: bool) -> None:
    assert module("word_problem").answers(reply, "2") is right


@pytest.fixture
def tokenizer(module: Callable[[str], ModuleType], tmp_path: Path) -> Any:
    from transformers import AutoTokenizer

    module("warm_start").make_tokenizer(["each of N0 packs costs $ N1 ."] * 2).save_pretrained(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


def tool_call(expression: str) -> dict[str, Any]:
    function = {"name": "calculate", "arguments": json.dumps({"expression": expression})}
    return {"tool_calls": [{"id": "c1", "type": "function", "function": function}]}


TASK = {"question": "7 red apples and 2 green apples. How many apples?", "answer": "9"}


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.parametrize(
    ("answers", "reward", "replies"),
    [
        ([tool_call("N0 + N1"), {"content": "answer R0"}], 1.0, ["ok R0"]),
        ([tool_call("N1 - N0"), tool_call("N0 - N1"), {"content": "answer R0"}], 0.0, ["neg R0", "ok R1"]),
        ([{"content": "nine"}], 0.0, []),
        ([tool_call("N0 + N1")] * 4, 0.0, ["ok R0", "ok R1", "ok R2"]),
    ],
)
async def test_the_agent_keeps_its_tool_and_its_history_from_call_to_call(
    module: Callable[[str], ModuleType], answers: list[dict[str, Any]], reward: float, replies: list[str]
) -> None:
    found, requests = await run_agent(module("agent").solve, answers, TASK)
    assert found == reward
    assert len(requests) == len(answers)
    question = {"role": "user", "content": "N0 red apples and N1 green apples . how many apples ?"}
    assert requests[0]["messages"] == [question]
    for earlier, later in pairwise(requests):
        assert later["messages"][: len(earlier["messages"])] == earlier["messages"]
        assert later["tools"] == earlier["tools"]
    sent_back = [message["content"] for message in requests[-1]["messages"] if message["role"] == "tool"]
    assert sent_back == replies
    assert requests[0]["parallel_tool_calls"] is False


@pytest.mark.filterwarnings("default::DeprecationWarning")
async def test_a_real_model_is_shown_the_question_as_it_is_and_judged_by_its_answer_line(
    module: Callable[[str], ModuleType],
) -> None:
    answers = [tool_call("7 + 2"), tool_call("9 +"), {"content": "7 + 2 is 9.\nAnswer: 9"}]
    reward, requests = await run_agent(module("agent").solve_text, answers, TASK)
    assert reward == 1.0
    system, question, *_ = requests[0]["messages"]
    assert system["role"] == "system"
    assert "Answer: 42" in system["content"]
    assert question["content"] == "7 red apples and 2 green apples. How many apples?"
    sent_back = [message["content"] for message in requests[-1]["messages"] if message["role"] == "tool"]
    assert sent_back[0] == "9"
    assert sent_back[1].startswith("error: expected numbers")


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.parametrize(
    "sampled",
    [
        "<tool> N0 - N1 </tool> <|end|>",
        "<tool> <tool> N0 </tool> N1 </tool> <|end|>",  # parsed, it would not be rendered to the same tokens
        "N0 <tool> N1 </tool> how <|end|>",
        "<tool> N0 -",  # cut at the most tokens of a call
    ],
)
async def test_the_next_prompt_begins_with_the_very_tokens_that_were_sampled(
    module: Callable[[str], ModuleType], tokenizer: Any, tmp_path: Path, sampled: str
) -> None:
    renderer = Renderer(tmp_path)
    sampled_ids = renderer.encode(sampled)
    decoder = ResponseDecoder(renderer, CompletionRequest(model="", messages=[], parse_tools=True), "", "c")
    decoder.sampled.ids = sampled_ids
    decoder.finish()
    answer = assistant_message(decoder.choice())
    _, (first, second) = await run_agent(module("agent").solve, [answer, {"content": "answer R0"}], TASK)
    conversation = Conversation(renderer)
    plan = conversation.plan(RequestView.of(first["messages"], first["tools"]))
    conversation.record(plan, "a", sampled_ids, answer)
    following = conversation.plan(RequestView.of(second["messages"], second["tools"]))
    assert following.fork_cause is None
    assert following.prompt_ids[: len(plan.prompt_ids) + len(sampled_ids)] == plan.prompt_ids + sampled_ids
