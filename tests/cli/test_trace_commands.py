"""`agl record --traces`, `agl rewards rescore` and `agl runs export`, as a person types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from agentlightning.errors import ConfigError, DataError, NotFoundError, RewardError
from build import agl

ASK = {"role": "user", "content": "1+1?"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGL_STORE", "sqlite:///agl.db")
    rows = [
        {"messages": [ASK, {"role": "assistant", "content": text}], "reward": reward, "gold": "2"}
        for text, reward in (("It is 2", 1.0), ("It is 3", 0.0), ("2", 0.0))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "score.py").write_text("def exact(task, result):\n    return float(result.answer == task['gold'])\n")
    return tmp_path


def figures(done: Result) -> dict[str, Any]:
    assert done.exception is None, done.output
    return dict(json.loads(done.stdout.splitlines()[-1]))


def recorded() -> str:
    return str(figures(agl("record", "--traces", "rows.jsonl", "--task-fields", "gold"))["run_id"])


def test_a_file_is_recorded_scored_again_and_written_as_rows() -> None:
    run = recorded()
    told = figures(agl("rewards", "rescore", run, "--with", "score.py:exact"))
    assert (told["rollouts"], told["changed"], told["new_mean"]) == (3, 2, pytest.approx(1 / 3))
    assert "written" not in told
    Path("same.py").write_text("def score(task, result):\n    return 0.5\n")
    same = agl("rewards", "rescore", run, "--with", "same.py:score").stdout
    assert "note: all 3 new rewards are 0.5: they tell no rollout from another" in same
    kept = figures(agl("rewards", "rescore", run, "--with", "score.py:exact", "--write", "--name", "exact"))
    assert kept["written"] == 3
    agl("runs", "export", run, "--as", "messages", "--to", "good.jsonl", "--reward", "exact", "--threshold", "1")
    [row] = map(json.loads, Path("good.jsonl").read_text().splitlines())
    assert row["messages"][-1]["content"] == "2"
    done = agl("runs", "export", run, "--to", "pairs.jsonl", "--as", "preferences")
    assert "1 rows" in done.stdout
    [pair] = map(json.loads, Path("pairs.jsonl").read_text().splitlines())
    assert (pair["prompt"], pair["chosen"][0]["content"]) == ([ASK], "It is 2")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("record",), "give either a configuration, whose agent is run, or --traces FILE"),
        (("record", "--traces", "rows.jsonl", "--tasks", "3"), "--tasks: has no effect with --traces"),
        (("record", "train.toml", "--task-fields", "gold"), "--task-fields: has no effect without --traces"),
        (("rewards", "rescore", "RUN", "--with", "score.py:exact", "--name", "reward"), "--name: 'reward' is the name"),
        (("rewards", "rescore", "RUN", "--with", "score.py:none"), "there is no 'none'"),
        (("runs", "export", "RUN", "--as", "messages", "--to", "rows.jsonl"), "--to: rows.jsonl exists already"),
        (
            ("runs", "export", "RUN", "--as", "messages", "--to", "x", "--margin", "1"),
            "--margin: conflicts with --as messages",
        ),
        (("runs", "export", "RUN", "--as", "messages", "--to", "no/where.jsonl"), "--to: there is no folder no"),
        (("runs", "export", "RUN", "--to", "x", "--threshold", "1"), "--threshold: conflicts with --as records"),
    ],
)
def test_what_would_be_ignored_or_is_wrong_is_an_error(words: tuple[str, ...], sentence: str) -> None:
    error = agl(*words).exception
    assert isinstance(error, ConfigError)
    assert sentence in str(error)


def test_a_function_that_scores_nothing_is_an_error_after_its_reason_is_told() -> None:
    run = recorded()
    Path("wrong.py").write_text("def score(task, result):\n    return task['missing']\n")
    done = agl("rewards", "rescore", run, "--with", "wrong.py:score", "--write")
    assert isinstance(done.exception, RewardError)
    assert "it scored none of 3 rollouts" in str(done.exception)
    assert "the function failed on 3 rollouts" in done.output
    assert "wrong.py:2 in score)" in done.output
    assert json.loads(done.stdout.splitlines()[-1])["written"] == 0


def test_rows_by_a_reward_that_no_rollout_has_are_an_error() -> None:
    run = recorded()
    unknown = agl("runs", "export", run, "--as", "messages", "--to", "x.jsonl", "--reward", "exact").exception
    assert isinstance(unknown, NotFoundError)
    assert "no training rollout has a final reward named 'exact'" in str(unknown)
    assert not Path("x.jsonl").exists()


def test_traces_that_were_exported_come_back_with_their_tasks_and_rewards() -> None:
    assert agl("runs", "export", recorded(), "--as", "traces", "--to", "out.jsonl").exception is None
    back = figures(agl("record", "--traces", "out.jsonl"))
    assert (back["rollouts"], back["rewarded"]) == (3, 3)
    told = figures(agl("rewards", "rescore", str(back["run_id"]), "--with", "score.py:exact"))
    assert (told["old_mean"], told["new_mean"], told["failed"]) == (pytest.approx(1 / 3), pytest.approx(1 / 3), 0)


def otlp(spans: list[tuple[str, dict[str, str]]]) -> str:
    """Spans of one trace, a second after each other, as OTLP/JSON."""
    written = [
        {
            "traceId": "1" * 32,
            "spanId": f"{number:016x}",
            "name": name,
            "startTimeUnixNano": str(number * 10**9),
            "endTimeUnixNano": str((number + 1) * 10**9),
            "attributes": [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()],
        }
        for number, (name, attributes) in enumerate(spans, 1)
    ]
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": written}]}]})


def test_a_rollout_is_shown_with_its_agents_and_with_what_spans_tell() -> None:
    chat = {
        "gen_ai.operation.name": "chat",
        "gen_ai.agent.name": "writer",
        "gen_ai.input.messages": json.dumps([ASK]),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "content": "2"}]),
    }
    tool = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.call.arguments": '{"q": 1}',
        "gen_ai.tool.call.result": "none",
    }
    message = {"agl.message": "two\ntables"}
    Path("spans.jsonl").write_text(otlp([("chat", chat), ("agl.message", message), ("lookup", tool)]))
    run = str(figures(agl("record", "--traces", "spans.jsonl"))["run_id"])
    rollout = agl("rollouts", "list", run).stdout.splitlines()[1].split()[0]
    shown = agl("rollouts", "show", rollout, "--spans").stdout
    assert "── call 1 by writer" in shown
    assert "text only" in shown
    assert "logprob" not in shown
    assert "agl.message  two tables" in shown
    assert 'lookup  {"q": 1}  → none' in shown


def test_a_word_that_is_none_of_an_options_own_is_refused_with_these() -> None:
    refused = agl("runs", "export", "RUN", "--to", "x", "--as", "csv")
    assert refused.exit_code == 2
    assert all(word in refused.output for word in ("'csv'", "'messages'", "'preferences'"))


def test_a_field_of_tasks_that_no_row_has_is_an_error() -> None:
    error = agl("record", "--traces", "rows.jsonl", "--task-fields", "gold,answre").exception
    assert isinstance(error, DataError)
    assert str(error) == "--task-fields: no row of rows.jsonl has a field 'answre'"
