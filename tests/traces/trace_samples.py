"""Spans of model calls as OTLP/JSON."""

from __future__ import annotations

import json
from typing import Any

from agentlightning.records import JSON

CHAT: JSON = {
    "gen_ai.operation.name": "chat",
    "gen_ai.input.messages": json.dumps([{"role": "user", "content": "Where does Ana live?"}]),
    "gen_ai.output.messages": json.dumps([{"role": "assistant", "content": "Oslo"}]),
}


def otlp(number: int, trace: int, own: JSON = CHAT, text: str | None = None, **fields: Any) -> JSON:
    """A request of one span with these attributes, of which `text` replaces the prompt."""
    if text is not None:
        own = own | {"gen_ai.input.messages": json.dumps([{"role": "user", "content": text}])}
    span = {
        "traceId": f"{trace:032x}",
        "spanId": f"{number:016x}",
        "name": "chat m",
        "startTimeUnixNano": str(number * 10**9),
        "endTimeUnixNano": str(number * 10**9 + 5),
        "attributes": [
            {"key": key, "value": {"stringValue" if isinstance(value, str) else "doubleValue": value}}
            for key, value in own.items()
        ],
        **fields,
    }
    return {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [{"scope": {}, "spans": [span]}]}]}
