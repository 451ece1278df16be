"""180 real traces of seven frameworks (AGL_DATA/traces), as a careless exporter would send them: nothing of them is lost."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from agentlightning.tracing.otlp import from_object
from agentlightning.tracing.sanitize import SpanOwner, SpanSanitizer

FILE = Path(os.environ.get("AGL_DATA", "")) / "traces" / "any_agent_otel.jsonl.gz"

pytestmark = pytest.mark.skipif(not FILE.is_file(), reason="needs the traces under AGL_DATA")

NOW = 1_800_000_000 * 10**9
OWNER = SpanOwner(run_id="run", rollout_id="rollout", attempt=1, began_ns=NOW - 10**9)


def time_ns(value: Any) -> Any:
    if isinstance(value, str):
        return str(int(datetime.fromisoformat(value).timestamp() * 1e6) * 1000)
    return value


def any_value(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {"arrayValue": {"values": [any_value(item) for item in value]}}
    kinds = {bool: "boolValue", int: "intValue", float: "doubleValue", str: "stringValue"}
    return {kinds[type(value)]: value} if type(value) in kinds else {}


def as_otlp(span: dict[str, Any]) -> dict[str, Any]:
    """With ids as the file has them: integers, or hex digits after 0x."""
    parent = span.get("parent_id") or (span.get("parent") or {}).get("span_id")
    return {
        "traceId": span["context"]["trace_id"],
        "spanId": span["context"]["span_id"],
        "parentSpanId": parent,
        "name": span["name"],
        "kind": span["kind"].removeprefix("SpanKind."),
        "startTimeUnixNano": time_ns(span["start_time"]),
        "endTimeUnixNano": time_ns(span["end_time"]),
        "attributes": [{"key": name, "value": any_value(value)} for name, value in span["attributes"].items()],
        "status": {"code": span["status"]["status_code"].upper()},
    }


def test_every_span_is_recorded_with_its_place_in_the_tree_and_its_words() -> None:
    broken: Counter[str] = Counter()
    count = 0
    with gzip.open(FILE) as lines:
        for line in lines:
            row = json.loads(line)
            spans = row["trace"] if isinstance(row["trace"], list) else row["trace"]["spans"]
            received = from_object({"scopeSpans": [{"spans": [as_otlp(span) for span in spans]}]})
            taken = SpanSanitizer(OWNER).take(received.resources, NOW)
            assert len(taken.spans) == len(spans), row["id"]
            assert received.lost == taken.lost == 0
            links = Counter((span["name"], as_otlp(span)["parentSpanId"] is None) for span in spans)
            assert Counter((span.name, span.parent_id is None) for span in taken.spans) == links, row["id"]
            for span, given in zip(taken.spans, spans, strict=True):
                assert span.attributes == given["attributes"], row["id"]
            broken += taken.broken
            count += len(spans)
    assert count == 1275
    assert set(broken) == {"wrong_type", "wrong_time", "clock_skew"}  # integer ids; no end; of last year
    assert broken["wrong_time"] == 89
