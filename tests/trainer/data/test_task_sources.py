import csv
import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import DataError
from agentlightning.trainer.data.tasks import load_tasks
from agentlightning.trainer.scheduler import TaskOrder

ROWS = [{"question": "1+1", "answer": "2"}, {"question": "2+2", "answer": "4"}]


def test_jsonl_plain_and_gzipped_and_csv_hold_the_same_rows(tmp_path: Path) -> None:
    text = "\n".join(json.dumps(row) for row in ROWS)
    (tmp_path / "t.jsonl").write_text(text)
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    with (tmp_path / "t.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(ROWS)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress((tmp_path / "t.csv").read_bytes()))
    (tmp_path / "T.JSONL").write_text(text)
    (tmp_path / "T.CSV.GZ").write_bytes((tmp_path / "t.csv.gz").read_bytes())
    (tmp_path / "t.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    (tmp_path / "lines.json").write_text(text)
    files = [*tmp_path.iterdir()]
    assert len(files) == 9
    assert all(load_tasks(str(file)) == ROWS for file in files)


def test_one_object_over_several_lines_is_one_task_and_a_byte_order_mark_is_not_part_of_the_first_field(
    tmp_path: Path,
) -> None:
    (tmp_path / "whole.json").write_text(json.dumps(ROWS[0], indent=2))
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbfquestion,answer\n1+1,2\n")
    (tmp_path / "t.jsonl").write_bytes(b'\xef\xbb\xbf{"question": "1+1", "answer": "2"}\n')
    (tmp_path / "t.json").write_bytes(b'\xef\xbb\xbf[{"question": "1+1", "answer": "2"}]')
    assert all(load_tasks(str(path)) == ROWS[:1] for path in tmp_path.iterdir())


def test_a_csv_file_may_hold_long_documents_and_begin_with_blank_lines(tmp_path: Path) -> None:
    text = "word " * 50_000
    (tmp_path / "t.csv").write_text(f'\n\nq,document\nwhy,"{text}"\n')
    assert load_tasks(str(tmp_path / "t.csv")) == [{"q": "why", "document": text}]


def test_a_callable_by_path_gives_rows_and_may_take_the_seed_and_is_named_where_it_raises(tmp_path: Path) -> None:
    code = "def train(seed):\n    return [{'n': seed}]\ndef val():\n    yield {'n': 0}\n"
    (tmp_path / "data.py").write_text(code + "def hub():\n    raise KeyError('hub')\n")
    assert load_tasks(f"{tmp_path / 'data.py'}:train", seed=7) == [{"n": 7}]
    assert load_tasks(f"{tmp_path / 'data.py'}:val") == [{"n": 0}]
    with pytest.raises(DataError, match="data function hub failed: KeyError: 'hub'"):
        load_tasks(f"{tmp_path / 'data.py'}:hub")


def test_a_missing_field_names_its_row() -> None:
    with pytest.raises(DataError, match="tasks, row 2: field 'answer' is missing"):
        load_tasks([{"question": "a", "answer": "b"}, {"question": "c"}])


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("t.jsonl", "{broken", "line 1: not JSON"),
        ("t.jsonl", "[1]\n", "row 1: expected a JSON object, got list"),
        ("t.jsonl", "", "holds no task"),
        ("t.csv", "q\n\udcff\n", r"reading .*t\.csv failed: "),
        ("t.jsonl.gz", "no gzip", r"reading .*t\.jsonl\.gz failed: "),
        ("t.csv", "a,b\n1,2\n3\n", r"t\.csv, line 3: expected 2 fields, got 1"),
        ("t.csv", "a,b\n1,2,3\n", r"t\.csv, line 2: expected 2 fields, got 3"),
        ("t.csv", "a,a\n1,2\n", r"t\.csv, line 1: expected distinct names of fields, got 'a' twice"),
        ("t.csv", 'a\n"1\n2\n', r"reading .*t\.csv failed: Error: unexpected end of data"),
        ("t.json", '[{"a": 1},\n{"a": }]', r"t\.json, line 2: not JSON"),
        ("t.json", "[1]", "row 1: expected a JSON object, got int"),
        ("t.json", "[]", "holds no task"),
        ("t.jsonl", '{"a": NaN}', "row 1: field 'a': expected a finite number, got nan"),
        (
            "t.json",
            '[{"a": 1}, {"a": {"b": [0, -Infinity]}}]',
            r"row 2: field 'a'\.b\[1\]: expected a finite .* -inf",
        ),
        (
            "t.jsonl",
            '{"a": 18446744073709551616}',
            "row 1: field 'a': expected an integer of at most 64 bits, or a text",
        ),
        ("t.jsonl", '{"a": -9223372036854775809}', "row 1: field 'a': expected an integer of at most 64 bits"),
        ("t.tsv", "a\tb", r"unknown kind of file; expected \.jsonl, \.json, \.csv or \.parquet"),
    ],
)
def test_what_a_store_would_not_give_back_names_its_place(
    tmp_path: Path, name: str, content: str, sentence: str
) -> None:
    (tmp_path / name).write_text(content, errors="surrogateescape")
    with pytest.raises(DataError, match=sentence):
        load_tasks(str(tmp_path / name))


def test_the_largest_integers_are_kept_and_a_missing_file_says_what_can_be_given() -> None:
    rows = [{"a": (1 << 64) - 1}, {"a": -(1 << 63)}]
    assert load_tasks(rows) == rows
    with pytest.raises(DataError, match=r"nowhere\.jsonl: no such file; give a \.jsonl"):
        load_tasks("nowhere.jsonl")


@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 5))
def test_every_epoch_visits_each_task_once(count: int, per_step: int, seed: int) -> None:
    order = TaskOrder(count, per_step, seed)
    places = [position for step in range(1, count + 1) for position in order.step(step)]
    epochs = [places[start : start + count] for start in range(0, len(places) - count + 1, count)]
    assert all(Counter(epoch) == Counter(range(count)) for epoch in epochs)


@given(st.integers(1, 20), st.integers(1, 30), st.integers(1, 9))
def test_a_step_is_the_same_whoever_asks_for_it(count: int, per_step: int, step: int) -> None:
    asked_in_order = TaskOrder(count, per_step, 3)
    for earlier in range(1, step):
        asked_in_order.step(earlier)
    assert asked_in_order.step(step) == TaskOrder(count, per_step, 3).step(step)
