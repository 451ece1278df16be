"""Files and their rows to episodes, format by format."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from trace_samples import CHAT, otlp

from agentlightning.errors import DataError
from agentlightning.traces.episode import Episode
from agentlightning.traces.episodes import TraceFileReader

ASK = {"role": "user", "content": "1+1?"}
TWO = {"role": "assistant", "content": "Two."}


def read(folder: Path, *rows: Any, task_fields: tuple[str, ...] = ()) -> list[Episode]:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return list(TraceFileReader(path, task_fields))


def test_a_conversation_is_a_call_for_each_answer(tmp_path: Path) -> None:
    row = {"messages": [ASK, TWO, ASK, {**TWO, "weight": 0}, ASK, TWO], "reward": 0.5, "tools": []}
    [episode] = read(tmp_path, row)
    assert [len(call.messages or ()) for call in episode.calls] == [1, 5]  # the answer of weight 0 is context alone
    assert (episode.reward, episode.task) == (0.5, {"messages": [ASK]})
    assert "weight" not in str(episode.calls)


def test_rewards_have_names_or_a_label(tmp_path: Path) -> None:
    pair = {"prompt": "1+1?", "completion": "Two."}
    named, label, none = read(
        tmp_path, {"messages": [ASK, TWO], "rewards": {"f1": 0.5}, "score": 2}, {**pair, "label": False}, pair
    )
    assert (named.reward, named.rewards, label.reward, none.reward) == (2.0, {"f1": 0.5}, 0.0, None)


def test_a_preference_is_two_episodes_of_one_task(tmp_path: Path) -> None:
    row = {"prompt": [ASK], "chosen": [TWO], "rejected": [{"role": "assistant", "content": "Three."}]}
    better, worse, implicit, _ = read(tmp_path, row, {"chosen": [ASK, TWO], "rejected": [ASK, TWO]})
    assert (better.reward, worse.reward, better.task == worse.task) == (1.0, 0.0, True)
    assert implicit.task == {"messages": [ASK]}


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"messages": 3}, "messages: expected a list of messages"),
        ({"messages": [ASK, {"content": "x"}]}, "messages: expected a list of messages"),
        ({"messages": [TWO]}, "messages: expected a message of the assistant after the first message"),
        ({"messages": [ASK, TWO], "reward": "much"}, "reward: "),
        ({"messages": [ASK, TWO], "rewards": 1}, "rewards: expected numbers by name"),
        ({"prompt": "a", "completion": [ASK]}, "completion: expected a message of the assistant"),
        ({"question": "1+1?"}, "expected OTLP/JSON or a row of .* an object with question"),
        ([3], "expected OTLP/JSON or a row of .*; got int"),
    ],
)
def test_a_broken_row_is_an_error_with_its_line_and_field(row: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 2(, entry 1)?: {sentence}"):
        read(tmp_path, {"messages": [ASK, TWO]}, row)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (json.dumps(ASK).encode(), "line 1: expected OTLP/JSON"),
        (json.dumps({"messages": [ASK, TWO]}).encode() + b"\nnot JSON", "line 2: is not valid JSON"),
        (b'{\n"messages":\n[}', "line 3: is not valid JSON"),
        (b"\xff\xfe", "line 1: is not valid JSON"),
    ],
)
def test_a_file_that_is_not_understood_says_where(content: bytes, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file"):
        list(TraceFileReader(tmp_path / "none.jsonl"))
    (tmp_path / "x.gz").write_bytes(b"plain")
    with pytest.raises(DataError, match="cannot be read"):
        list(TraceFileReader(tmp_path / "x.gz"))
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"rows.jsonl(, |: ){sentence}"):
        list(TraceFileReader(path))


# --- spans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["lines", "array", "gzip"])
def test_spans_of_two_traces_in_any_order_are_two_episodes(written: str, tmp_path: Path) -> None:
    spans = [otlp(3, 1, text="c"), otlp(2, 2, text="b"), otlp(1, 1, text="a")]
    lines = "\n".join(map(json.dumps, spans)) + "\n\n"
    text = (json.dumps(spans, indent=1) if written == "array" else lines).encode()
    path = tmp_path / ("traces.jsonl.gz" if written == "gzip" else "traces.json")
    path.write_bytes(gzip.compress(text) if written == "gzip" else text)
    prompts = [[(call.messages or [{}])[0]["content"] for call in one.calls] for one in TraceFileReader(path)]
    assert prompts == [["a", "c"], ["b"]]


def test_an_exported_trace_has_its_task_its_mode_and_its_rewards(tmp_path: Path) -> None:
    root = {"agl.run_id": "r", "agl.mode": "eval", "input.value": '{"question": "q"}', "agl.reward": 0.5}
    root |= {"agl.rewards.reward": 0.25, "agl.rewards.style": 2, "agl.rewards.broken": "much"}
    broken = otlp(2, 1, own=CHAT | {"agl.rewards.found": 0.1})
    broken["resourceSpans"][0]["scopeSpans"][0]["spans"].append("no span")
    path = tmp_path / "traces.jsonl"
    path.write_text("\n".join(map(json.dumps, (otlp(1, 1, own=root), broken))))
    [episode] = file = TraceFileReader(path)
    assert file.broken == {"undecodable": 1}
    assert (episode.task, episode.mode, episode.reward) == ({"question": "q"}, "eval", 0.5)
    assert (episode.rewards, episode.steps) == ({"style": 2.0}, [{"found": 0.1}])
