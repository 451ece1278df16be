"""The retrieval example's own parts, without a trainer: names, search, rewards, rules, data, tokenizer, agent."""

from __future__ import annotations

import gzip
import importlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripted import run_agent

EXAMPLE = "rag"
PARAGRAPHS = [
    ("song", "Blue Moon", "Blue Moon is a song by Ann Lee , released in 1934."),
    ("ann", "Ann Lee", "Ann Lee (born 3 May 1901) was an American singer from Ohio."),
    ("film", "Red Sun", "Red Sun is a film directed by Bo Ek."),
    ("bo", "Bo Ek", "Bo Ek was a Swedish director who died in Rome."),
    ("rome", "Rome", "Rome is the capital of Italy."),
]
QUESTION = "Who is the singer of the song Blue Moon and where was she born?"


@pytest.fixture
def data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Callable[[str], ModuleType]) -> Iterator[Path]:
    folder = tmp_path / "multihop"
    write(folder / "corpus.jsonl.gz", [{"id": i, "title": title, "text": text} for i, title, text in PARAGRAPHS])
    row = {"answer": "Ohio", "aliases": ["the state of Ohio"], "supporting": ["song", "ann"]}
    for name in ("2wiki", "hotpotqa", "musique"):
        write(folder / name / "train.jsonl.gz", [{"question": QUESTION, **row}, {"question": QUESTION, **row}])
        write(folder / name / "dev.jsonl.gz", [{"question": f"{QUESTION} ({name})", **row}])
    monkeypatch.setenv("AGL_DATA", str(tmp_path))
    clear_caches()
    yield tmp_path
    clear_caches()


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def clear_caches() -> None:
    data, retriever = importlib.import_module("data"), importlib.import_module("retriever")
    for function in (data.load, data.corpus, retriever.retriever):
        function.cache_clear()


def task(**other: Any) -> dict[str, Any]:
    row = {"question": QUESTION, "answer": "Ohio", "aliases": ["the state of Ohio"], "supporting": ["song", "ann"]}
    return {**row, "draw": 0, "blanked": 0.0, **other}


def test_names_dates_and_numbers_are_found_by_spelling(module: Callable[[str], ModuleType]) -> None:
    pieces = module("names").pieces("In May 1934 Ann Lee of St. Louis sold 1,200 copies. She left.", "paragraph")
    assert pieces[:2] == (("word", "in"), ("date", "May 1934"))
    assert ("name", "Ann Lee of St. Louis") in pieces
    assert ("number", "1,200") in pieces
    assert pieces[-3:] == (("word", "she"), ("word", "left"), ("word", "."))


def test_a_search_shows_the_best_paragraph_that_was_not_shown(
    module: Callable[[str], ModuleType], data_root: Path
) -> None:
    retriever = module("retriever")
    session = retriever.Session(retriever.retriever())
    shown = [session.search(query) for query in ("Ann Lee", "Ann Lee", "Ann Lee", "xyzzy", "")]
    assert [paragraph and paragraph.id for paragraph in shown] == ["ann", "song", None, None, None]
    assert session.found == {"ann", "song"}


@pytest.mark.parametrize(
    ("answer", "gold", "f1"),
    [
        ("The Ohio.", "ohio", 1.0),
        ("Ohio state", "Ohio", 2 / 3),
        ("Iowa", "Ohio", 0.0),
        ("a", "the", 1.0),
        ("ohio ohio", "ohio", 2 / 3),
    ],
)
def test_word_f1_is_that_of_squad(module: Callable[[str], ModuleType], answer: str, gold: str, f1: float) -> None:
    assert module("scoring").word_f1(answer, gold) == pytest.approx(f1)


def test_the_best_alias_counts_and_a_missing_answer_earns_nothing(module: Callable[[str], ModuleType]) -> None:
    scoring = module("scoring")
    golds = ["Ohio", "the state of Ohio"]
    assert scoring.answer_reward(scoring.answered("I think.\nAnswer: state of Ohio"), golds) == pytest.approx(1.0)
    assert scoring.answer_reward(scoring.answered("Answer: Iowa"), golds) == pytest.approx(0.1)
    assert scoring.answer_reward(scoring.answered("It is Ohio."), golds) == 0.0
    assert scoring.answered("Answer: ") is None


def test_training_rows_are_every_question_once_an_epoch_with_other_words_hidden(
    module: Callable[[str], ModuleType], data_root: Path
) -> None:
    data = module("data")
    rows = data.train(seed=1, epochs=3)
    assert [row["question"] for row in rows] == [QUESTION] * 3, "a question that occurs twice is one"
    assert len({row["draw"] for row in rows}) == 3
    assert rows == data.train(seed=1, epochs=3) != data.train(seed=2, epochs=3)
    assert data.train_all()[0]["blanked"] == 0.0


def test_rows_of_the_hubs_own_formats_are_read(module: Callable[[str], ModuleType]) -> None:
    data = module("data")
    hotpotqa = {
        "question": "Who?",
        "answer": "Ann",
        "supporting_facts": {"title": ["Ann", "Ann"], "sent_id": [0, 1]},
        "context": {"title": ["Bo", "Ann"], "sentences": [["Bo is."], ["Ann is.", " Ann was."]]},
    }
    musique = {
        "question": "Who?",
        "answer": "Ann",
        "answer_aliases": ["Annie"],
        "paragraphs": [
            {"title": "Bo", "paragraph_text": "Bo is.", "is_supporting": False},
            {"title": "Ann", "paragraph_text": "Ann is. Ann was.", "is_supporting": True},
        ],
    }
    rows = [data.read_hotpotqa(hotpotqa), data.read_musique(musique)]
    assert [row["aliases"] for row in rows] == [[], ["Annie"]]
    for row in rows:
        (gold,) = row["supporting"]
        assert {p.id: p.text for p in row["paragraphs"]}[gold] == "Ann is. Ann was."
    assert rows[0]["supporting"] == rows[1]["supporting"], "the same paragraph has the same id in every set"


def search(query: str) -> dict[str, Any]:
    function = {"name": "search", "arguments": json.dumps({"query": query})}
    return {"tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(("queries", "last"), [([0, 1], "done"), ([], "done"), ([0, 1], "E1"), ([0, 1, 0, 0, 0], None)])
async def test_the_searcher_finds_names_until_it_ends(
    module: Callable[[str], ModuleType], data_root: Path, queries: list[int], last: str | None
) -> None:
    names = module("names").Names(QUESTION, 0)
    question = names.question()
    first = names.paragraph("Blue Moon", PARAGRAPHS[0][2])
    answers = [search(names.shown[query]) for query in queries] + ([{"content": last}] if last else [])
    words, requests = await run_agent(module("agent").solve, answers, task())
    assert words == (last or "")
    assert len(requests) == len(answers)
    assert requests[0]["messages"] == [{"role": "user", "content": question}]
    assert requests[0]["tools"][0]["function"]["name"] == "search"
    if queries:
        assert requests[-1]["messages"][1]["role"] == "assistant"
    if len(queries) > 1:
        assert requests[1]["messages"][2]["content"] == first


def spans(module: Callable[[str], ModuleType], task: dict[str, Any]) -> tuple[Any, str]:
    """The names after two searches, and that of Ohio."""
    names, context = module("agent").spanned(task)
    names.question()
    context.search("question")
    context.search(names.shown[1])
    return names, next(name for name in names.shown if names.query(name) == "Ohio")


async def test_an_answer_is_the_text_of_a_span_that_was_shown(
    module: Callable[[str], ModuleType], data_root: Path
) -> None:
    names, ohio = spans(module, task())
    searches = [search("question"), search(names.shown[1])]
    words, requests = await run_agent(module("agent").solve_span, [*searches, {"content": f"answer {ohio}"}], task())
    assert words == "Ohio"
    shown = requests[1]["messages"][2]["content"].split()
    assert names.query(shown[0]) == "Blue Moon", "the whole question was searched for"
    for wrong in ("answer E", "answer Ohio", ohio, f"answer {ohio} {ohio}", "done"):
        words, _ = await run_agent(module("agent").solve_span, [*searches, {"content": wrong}], task())
        assert words == ""


async def test_the_reader_of_a_real_model_sees_text(module: Callable[[str], ModuleType], data_root: Path) -> None:
    answers = [search("Blue Moon song"), search("Ann Lee"), {"content": "She is from there.\nAnswer: Ohio"}]
    words, requests = await run_agent(module("agent").solve_text, answers, task())
    assert words == "She is from there.\nAnswer: Ohio"
    assert requests[0]["messages"][0]["role"] == "system"
    assert requests[0]["messages"][1] == {"role": "user", "content": QUESTION}
    assert requests[2]["messages"][-1]["content"] == f"{PARAGRAPHS[1][1]}: {PARAGRAPHS[1][2]}"


async def test_a_gold_trace_searches_for_the_gold_paragraphs_and_answers(
    module: Callable[[str], ModuleType], data_root: Path
) -> None:
    gold = module("gold_traces")
    trace, *_ = await gold.traces(module("agent").solve_text, gold.rag(random.Random(0)), 9)
    answers = [one for one in trace["messages"] if one["role"] == "assistant"]
    assert [len(one.get("tool_calls", [])) for one in answers] == [1, 1, 0]
    assert answers[-1]["content"] == "Answer: Ohio"
    assert trace["tools"][0]["function"]["name"] == "search"
