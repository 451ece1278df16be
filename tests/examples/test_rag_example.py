"""The retrieval example's own parts, without a trainer: names, search, rewards, rules, data, tokenizer, agent."""

from __future__ import annotations

import gzip
import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import run_agent

from agentlightning.records import Call, Sampling
from agentlightning.runner.result import RolloutResult

EXAMPLE = Path(__file__).parents[2] / "examples" / "rag"
MODULES = ("agent", "data", "names", "retriever", "rules", "scoring", "warm_start")
PARAGRAPHS = [
    ("song", "Blue Moon", "Blue Moon is a song by Ann Lee , released in 1934."),
    ("ann", "Ann Lee", "Ann Lee (born 3 May 1901) was an American singer from Ohio."),
    ("film", "Red Sun", "Red Sun is a film directed by Bo Ek."),
    ("bo", "Bo Ek", "Bo Ek was a Swedish director who died in Rome."),
    ("rome", "Rome", "Rome is the capital of Italy."),
]
QUESTION = "Who is the singer of the song Blue Moon and where was she born?"


@pytest.fixture(scope="module", autouse=True)
def _example_on_the_path() -> Iterator[None]:
    """The example's files are scripts, not a package: they are importable for these tests only."""
    forget()
    sys.path.insert(0, str(EXAMPLE))
    yield
    sys.path.remove(str(EXAMPLE))
    forget()


def forget() -> None:
    """Examples have files of the same names."""
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def module() -> Callable[[str], ModuleType]:
    return importlib.import_module


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


def test_the_draw_decides_the_numbers_of_names_and_which_words_are_hidden(
    module: Callable[[str], ModuleType],
) -> None:
    names = module("names")
    shown = {names.Names(QUESTION, draw, 0.5).question() for draw in range(40)}
    assert len(shown) > 35
    assert names.Names(QUESTION, 4, 0.5).question() == names.Names(QUESTION, 4, 0.5).question()
    numbers = {word for text in shown for word in text.split() if word.startswith("E")}
    assert len(numbers) > 10
    assert all("E" in text for text in shown), "a name is never hidden"


@settings(deadline=None)
@given(st.text(max_size=200), st.sampled_from(["question", "paragraph"]))
def test_any_text_becomes_words_names_dates_and_numbers(text: str, kind: str) -> None:
    pieces = importlib.import_module("names").pieces(text, kind)
    assert all(piece in ("word", "name", "date", "number") and content for piece, content in pieces)


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


def searched(queries: list[str], last: str | None) -> RolloutResult:
    """The record of a rollout that searched so and ended with `last`; None: it was still searching."""
    answers = [search(query) for query in queries] + ([{"content": last}] if last is not None else [])
    calls: list[Call] = []
    for number, answer in enumerate(answers):
        for tool_call in answer.get("tool_calls", []):
            tool_call["id"] = f"t{number}"
        calls.append(recorded(number, {"role": "assistant", "content": None, **answer}, calls))
    return RolloutResult(calls=calls)


def recorded(number: int, answer: dict[str, Any], before: list[Call]) -> Call:
    replies = [
        {"role": "tool", "tool_call_id": tool_call["id"], "content": "a paragraph"}
        for tool_call in (before[-1].completion.get("tool_calls", []) if before else [])
    ]
    return Call(
        id=f"call-{number}",
        run_id="run",
        rollout_id="r",
        attempt=1,
        parent_id=before[-1].id if before else None,
        suffix_ids=[],
        sampled_ids=[],
        logprobs=[],
        versions=[],
        prompt_tokens=0,
        policy="",
        model="m",
        protocol="chat",
        sampling=Sampling(),
        history_hash="",
        request_hash="",
        messages=replies or [{"role": "user", "content": QUESTION}],
        completion=answer,
        started_ns=2 * number,
        finished_ns=2 * number + 1,
    )


@pytest.mark.parametrize(
    ("queries", "last", "steps"),
    [
        ([0, 1], "done", [0.45, 0.45, 0.1]),
        ([0, 0, 1], "done", [0.45, 0.0, 0.45, 0.1]),  # the same again brings nothing new
        ([0], "done", [0.45, 0.1]),
        ([], "done", [0.1]),
        ([0, 1], "E1", [0.45, 0.45, 0.0]),
        ([0, 1, 0, 0, 0], None, [0.45, 0.45, 0.0, 0.0, 0.0]),
    ],
)
def test_each_search_is_rewarded_for_the_gold_paragraph_that_it_shows_first(
    module: Callable[[str], ModuleType], data_root: Path, queries: list[int], last: str | None, steps: list[float]
) -> None:
    names = module("names").Names(QUESTION, 0)
    names.question()
    names.paragraph(*PARAGRAPHS[0][1:])
    said = module("scoring").retrieval(task(), searched([names.shown[query] for query in queries], last))
    assert said["steps"] == pytest.approx(steps)
    assert said["reward"] == pytest.approx(sum(steps))


def test_rules_earn_what_they_find(module: Callable[[str], ModuleType], data_root: Path) -> None:
    rules = module("rules")
    earned = {name: rules.follow(rule, task()) for name, rule in rules.RULES.items() if name != "random"}
    for only_names in ("each name of the question", "the first name, then the second again and again"):
        assert earned.pop(only_names) == pytest.approx(0.55)
    assert len(earned) == 3
    assert all(reward == pytest.approx(1.0) for reward in earned.values())
    assert rules.follow(lambda _: None, task()) == pytest.approx(0.1)


def test_the_demonstrator_searches_what_brings_gold_paragraphs_and_stops(
    module: Callable[[str], ModuleType], data_root: Path
) -> None:
    rules, names = module("rules"), module("names").Names(QUESTION, 0)
    names.question()
    shown = list(rules.demonstrate(task()))
    assert shown[0] == names.shown[0]
    assert len(shown) == 2
    assert list(rules.demonstrate(task(supporting=["elsewhere"]))) == []


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


def test_data_that_is_nowhere_is_one_clear_sentence(
    module: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("datasets") is not None:
        pytest.skip("datasets is installed: the hub would be asked")
    monkeypatch.setenv("AGL_DATA", str(tmp_path))
    clear_caches()
    with pytest.raises(FileNotFoundError, match=r"/multihop does not exist, and reading framolfese/2Wiki"):
        module("data").load("2wiki", "train")


@pytest.fixture
def tokenizer(module: Callable[[str], ModuleType], tmp_path: Path) -> Any:
    from transformers import AutoTokenizer

    warm_start = module("warm_start")
    warm_start.make_tokenizer(["who is the singer of"] * 15).save_pretrained(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("sampled", "message"),
    [
        ("done <|end|>", {"role": "assistant", "content": "done"}),
        (
            "<search> E3 <|end|>",
            {
                "role": "assistant",
                "tool_calls": [{"type": "function", "function": {"name": "search", "arguments": {"query": "E3"}}}],
            },
        ),
    ],
)
def test_sampled_tokens_are_parsed_and_rendered_back_to_the_same_tokens(
    tokenizer: Any, sampled: str, message: dict[str, Any]
) -> None:
    question = [{"role": "user", "content": "who is E3 ?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    ids = tokenizer.encode(sampled, add_special_tokens=False)
    assert tokenizer.parse_response(ids, prefix=prompt) == message
    assert tokenizer.apply_chat_template([*question, message], return_dict=False) == prompt + ids


def test_demonstrations_search_for_shown_names_and_end(
    module: Callable[[str], ModuleType], tokenizer: Any, data_root: Path
) -> None:
    warm_start, encode = module("warm_start"), module("agentlightning.demo.imitation").encode
    lengths = set()
    for seed in range(40):
        conversation = warm_start.demonstration(task(draw=seed), random.Random(seed), warm_start.SLICES["2wiki"])
        tokens, mask = encode(tokenizer, conversation)
        own = tokenizer.decode([token for token, mine in zip(tokens, mask, strict=True) if mine])
        *searches, end = own.split("<|end|>")[:-1]
        assert end.strip() == "done"
        shown = module("names").Names(QUESTION, seed)
        shown.question()
        context = module("agent").SearchContext(module("retriever").Session(module("retriever").retriever()), shown)
        for search_text in searches:
            word, query = search_text.split()
            assert word == "<search>"
            assert query in shown.shown
            context.search(query)
        lengths.add(len(searches))
    assert len(lengths) > 2


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


def test_demonstrations_of_answers_point_at_what_was_shown(
    module: Callable[[str], ModuleType], data_root: Path
) -> None:
    warm_start = module("warm_start")
    ends, queries = set(), set()
    for seed in range(60):
        row = task(draw=seed)
        conversation = warm_start.demonstration(row, random.Random(seed), warm_start.SLICES["musique"])
        names, context = module("agent").spanned(row)
        names.question()
        for message in conversation:
            for call in message.get("tool_calls", []):
                query = call["function"]["arguments"]["query"]
                queries.add("question" if query == "question" else "name")
                context.search(query)
        ends.add(module("agent").span_of(conversation[-1]["content"], names))
    assert {"Ohio", "Ann Lee"} <= ends
    assert queries == {"question", "name"}


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
    sys.path.insert(0, str(EXAMPLE.parent))
    gold = importlib.import_module("gold_traces")
    sys.path.remove(str(EXAMPLE.parent))
    trace, *_ = await gold.traces(module("agent").solve_text, gold.rag(random.Random(0)), 9)
    answers = [one for one in trace["messages"] if one["role"] == "assistant"]
    assert [len(one.get("tool_calls", [])) for one in answers] == [1, 1, 0]
    assert answers[-1]["content"] == "Answer: Ohio"
    assert trace["tools"][0]["function"]["name"] == "search"
