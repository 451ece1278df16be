"""The examples with data of the reader's own: what a file must hold, what is made of it, and data in lower case."""

from __future__ import annotations

import importlib
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

NUMBERS = range(200)


def word(number: int) -> str:
    """A word of letters for a number, so that questions differ in words."""
    return "".join(chr(97 + int(digit)) for digit in f"{number * 7919 % 100000:05}")


def rows_of(name: str, folder: Path) -> list[dict[str, Any]]:
    if name == "calculator":
        wordings = ("{0} has {1} pens and gets {2} more", "{0} finds {1} {0} coins , then {2} {0}")
        return [
            {
                "question": wordings[i % 2].format(f"{word(i)} {word(i + 300)} {word(i + 600)}", i + 2, 3),
                "answer": i + 5,
                "equation": f"{i + 2} + 3",
            }
            for i in NUMBERS
        ]
    if name == "rag":
        return [
            {
                "question": f"where was the singer of {word(i)} moon born?",
                "answer": "ohio",
                "paragraphs": [
                    {"title": f"{word(i)} moon", "text": f"{word(i)} moon is a song by {word(i)} lee."},
                    {"title": f"{word(i)} lee", "text": f"{word(i)} lee was born in ohio on 3 may 1901."},
                ],
                "supporting": [f"{word(i)} moon", f"{word(i)} lee"],
            }
            for i in NUMBERS
        ]
    with closing(sqlite3.connect(folder / "people.sqlite")) as connection:
        connection.execute("create table head (name text, age int)")
        connection.executemany("insert into head values (?, ?)", [(word(i), i) for i in NUMBERS])
        connection.commit()
    return [
        {
            "question": f"how old is {word(i)}?",
            "query": f"select age from head where name = '{word(i)}'",
            "database": "people.sqlite",
        }
        for i in NUMBERS
        if i
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "options"),
    [
        pytest.param("calculator", ["--labelled", "0.8"], marks=pytest.mark.long),
        pytest.param("rag", [], marks=pytest.mark.long),
        ("text_to_sql", ["--slice", "spider", "--labelled", "0.8"]),
    ],
    indirect=["example"],
)
def test_a_file_of_ones_own_becomes_a_model_and_rows_to_train_on(
    example: ModuleType, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = Path(str(example.__file__)).parent.name
    file = write(tmp_path / "mine.jsonl", rows_of(name, tmp_path))
    example.main(["--data", str(file), "--to", str(tmp_path / "model"), "--epochs", "1", *options])

    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    train, heldout = read(Path(report["train"])), read(Path(report["heldout"]))
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert 20 <= len(heldout) <= 80
    questions = {json.dumps(row, sort_keys=True) for row in heldout}
    assert questions.isdisjoint(json.dumps(row, sort_keys=True) for row in train)
    if name == "rag":
        importlib.import_module("retriever").retriever.cache_clear()
        names, context = importlib.import_module("agent").named(heldout[0])
        assert len(names.question().split()) == 8
        (song,) = names.shown
        assert context.search(song) == f"{song} : {song} is a song by {names.shown[1]} ."
        assert context.session.found < set(heldout[0]["supporting"])
    if name == "text_to_sql":
        assert {row["question"] for row in heldout} == {"how old is V0 @ C0 ?"}


@pytest.mark.parametrize(
    ("example", "row", "says"),
    [
        ("calculator", {"question": "How many?"}, "row 1: expected question and answer"),
        ("calculator", {"question": "How many?", "answer": "many"}, "row 1: answer: expected a number, got 'many'"),
        ("calculator", {"question": "1 and 2?", "answer": 3}, "expected at least 64 and 1"),
        ("rag", {"question": "Who?", "answer": "Ann"}, "row 1: 'paragraphs': expected question, answer"),
        (
            "rag",
            {"question": "Who?", "answer": "Ann", "paragraphs": [], "supporting": ["Ann"]},
            "row 1: supporting: expected titles of paragraphs of this row",
        ),
        ("text_to_sql", {"question": "Who?"}, "row 1: expected question, query and database"),
        ("text_to_sql", {"question": "Who?", "query": "", "database": "no.sqlite"}, "no.sqlite does not exist"),
    ],
    indirect=["example"],
)
def test_a_file_that_holds_something_else_is_refused_by_row(
    example: ModuleType, row: dict[str, Any], says: str, tmp_path: Path
) -> None:
    options = ["--slice", "spider"] if "text_to_sql" in str(example.__file__) else []
    with pytest.raises(SystemExit, match=says):
        example.main(["--data", str(write(tmp_path / "mine.jsonl", [row])), "--to", str(tmp_path / "model"), *options])


@pytest.mark.parametrize(
    ("example", "options", "says"),
    [
        ("text_to_sql", "--data mine.jsonl --to m", "--data: the generated demonstrations use no labels; give it with"),
        (
            "calculator",
            "--data mine.jsonl --to m --slice all",
            "--data: your own questions in place of those of --slice",
        ),
        ("rag", "--to m --control --epochs 3", "not allowed with argument"),
        pytest.param(
            *("text_to_sql", "--to m --large", "--large: engine.device: torch cannot use 'cuda' on this machine"),
            marks=pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU"),
        ),
    ],
    indirect=["example"],
)
def test_options_that_do_not_go_together_are_refused(
    example: ModuleType, options: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        example.main(options.split())
    assert says in capsys.readouterr().err
    assert not Path("m").exists()


@pytest.mark.parametrize("example", ["rag"], indirect=True)
def test_names_in_lower_case_are_the_titles_of_the_corpus(example: ModuleType) -> None:
    names = importlib.import_module("names")
    titles = names.title_keys(["Blue Moon", "Blue Moon of Ohio", "Ann Lee", "The", "Who"])
    text = "who sang blue moon of ohio, ann lee's song, on 3 may 1934 for 1,200 of the blue moon club?"
    assert [piece for piece in names.pieces(text, "question", titles) if piece[0] != "word"] == [
        ("name", "blue moon of ohio"),
        ("name", "ann lee"),
        ("date", "3 may 1934"),
        ("number", "1,200"),
        ("name", "blue moon"),
    ]
    assert names.pieces("Who sang blue moon?", "question", titles) == names.pieces("Who sang blue moon?", "question")
