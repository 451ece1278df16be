"""Files of traces, in the ways that programs write them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import DataError
from agentlightning.tracing.trace_files import TraceFileReader

ROW = {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "Two."}]}


def sdk(number: int, trace: int, text: str) -> dict[str, Any]:
    ask = json.dumps([{"role": "user", "content": text}])
    return {
        "name": "chat m",
        "context": {"trace_id": f"0x{trace:032x}", "span_id": f"0x{number:016x}"},
        "parent_id": None,
        "start_time": f"2025-04-29T15:21:{number:02}Z",
        "end_time": f"2025-04-29T15:21:{number:02}.5Z",
        "status": {"status_code": "OK"},
        "attributes": {"gen_ai.operation.name": "chat", "gen_ai.input.messages": ask, "gen_ai.output": "Two."},
        "events": [],
    }


def otlp(number: int, trace: int, text: str) -> dict[str, Any]:
    own = {"gen_ai.operation.name": "chat", "gen_ai.output": "Two."}
    own["gen_ai.input.messages"] = json.dumps([{"role": "user", "content": text}])
    span = {
        "traceId": f"{trace:032x}",
        "spanId": f"{number:016x}",
        "name": "chat m",
        "startTimeUnixNano": str(number * 10**9),
        "endTimeUnixNano": str(number * 10**9 + 5),
        "attributes": [{"key": key, "value": {"stringValue": value}} for key, value in own.items()],
    }
    return {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [{"scope": {}, "spans": [span]}]}]}


def prompts(path: Path) -> list[list[str]]:
    return [[str(call.messages[0]["content"]) for call in one.calls if call.messages] for one in TraceFileReader(path)]


@pytest.mark.parametrize("make", [sdk, otlp])
@pytest.mark.parametrize("written", ["lines", "array", "console", "gzip"])
def test_spans_of_two_traces_in_any_order_are_two_episodes(make: Any, written: str, tmp_path: Path) -> None:
    spans = [make(3, 1, "c"), make(2, 2, "b"), make(1, 1, "a")]
    texts = {
        "lines": "\n".join(map(json.dumps, spans)) + "\n\n",
        "array": json.dumps(spans, indent=1),
        "console": "\n".join(json.dumps(one, indent=4) for one in spans),
    }
    path = tmp_path / "traces.json"
    if written == "gzip":
        path = tmp_path / "traces.jsonl.gz"
        path.write_bytes(gzip.compress(texts["lines"].encode()))
    else:
        path.write_text(texts[written])
    assert prompts(path) == [["a", "c"], ["b"]]


def test_rows_are_episodes_by_themselves(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(ROW) for _ in range(3)))
    assert prompts(path) == [["1+1?"]] * 3


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"messages": 3}', "line 1: messages: expected a list of messages"),
        (
            b'{"question": "1+1?"}',
            "line 1: expected OTLP/JSON, spans of an SDK, or a row of spans, .* an object with question",
        ),
        (json.dumps(ROW).encode() + b"\nnot JSON", "line 2: is not valid JSON"),
        (b'{\n"messages":\n[}', "line 1: is not valid JSON"),
        (b"\xff\xfe", "cannot be read"),
        (b"[3]", "line 1, entry 1: expected OTLP/JSON"),
    ],
)
def test_a_file_that_is_not_understood_says_where(content: bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"rows.jsonl(, |: ){sentence}"):
        list(TraceFileReader(path))


def test_a_file_that_is_missing_or_no_gzip_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file"):
        list(TraceFileReader(tmp_path / "none.jsonl"))
    (tmp_path / "x.gz").write_bytes(b"plain")
    with pytest.raises(DataError, match="cannot be read"):
        list(TraceFileReader(tmp_path / "x.gz"))


def test_broken_spans_of_otlp_are_counted(tmp_path: Path) -> None:
    broken = otlp(1, 1, "a")
    broken["resourceSpans"][0]["scopeSpans"][0]["spans"].append("no span")
    path = tmp_path / "traces.json"
    path.write_text(json.dumps(broken))
    file = TraceFileReader(path)
    assert len(list(file)) == 1
    assert file.broken == {"undecodable": 1}
