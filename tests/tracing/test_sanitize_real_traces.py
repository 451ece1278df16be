"""180 real traces of seven frameworks (AGL_DATA/traces), as an exporter sends them: only spans without an end are lost."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from agentlightning.tracing.otlp import STATUSES, from_object
from agentlightning.tracing.sanitize import SpanOwner, SpanSanitizer

FILE = Path(os.environ.get("AGL_DATA", "")) / "traces" / "any_agent_otel.jsonl.gz"

pytestmark = pytest.mark.skipif(not FILE.is_file(), reason="needs the traces under AGL_DATA")

OWNER = SpanOwner(run_id="run", rollout_id="rollout", attempt=1)


def any_value(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {"arrayValue": {"values": [any_value(item) for item in value]}}
    kinds = {bool: "boolValue", int: "intValue", float: "doubleValue", str: "stringValue"}
    return {kinds[type(value)]: value} if type(value) in kinds else {}


def as_otlp(span: dict[str, Any]) -> dict[str, Any]:
    """Ids as OTLP has them, where the file has integers, or hex digits after 0x; times in nanoseconds."""
    context, parent = span["context"], span.get("parent_id") or (span.get("parent") or {}).get("span_id")
    made: dict[str, Any] = {"name": span["name"]}
    ids = (("traceId", context["trace_id"], 32), ("spanId", context["span_id"], 16), ("parentSpanId", parent, 16))
    for name, value, digits in ids:
        made[name] = value if value is None else f"{value if isinstance(value, int) else int(value, 16):0{digits}x}"
    for name, time in (("startTimeUnixNano", span["start_time"]), ("endTimeUnixNano", span["end_time"])):
        text = isinstance(time, str)
        made[name] = str(int(datetime.fromisoformat(time).timestamp() * 1e6) * 1000) if text else time
    made["attributes"] = [{"key": name, "value": any_value(value)} for name, value in span["attributes"].items()]
    return made | {"status": {"code": STATUSES.index(span["status"]["status_code"].lower())}}


def test_every_span_that_ended_is_recorded_with_its_place_in_the_tree_and_its_words() -> None:
    count = lost = 0
    with gzip.open(FILE) as lines:
        for line in lines:
            row = json.loads(line)
            spans = row["trace"] if isinstance(row["trace"], list) else row["trace"]["spans"]
            received = from_object({"scopeSpans": [{"spans": [as_otlp(span) for span in spans]}]})
            taken = SpanSanitizer(OWNER).take(received.resources)
            ended = [span for span in spans if span["end_time"]]
            assert not taken.broken
            links = Counter((span["name"], as_otlp(span)["parentSpanId"] is None) for span in ended)
            assert Counter((span.name, span.parent_id is None) for span in taken.spans) == links, row["id"]
            for span, given in zip(taken.spans, ended, strict=True):
                assert span.attributes == given["attributes"], row["id"]
            count += len(taken.spans)
            lost += received.lost
    assert (count, lost) == (1186, 89)
