"""dashboard: the Grafana dashboard of a server's metrics, as Grafana reads it from a file.

A test compares every metric that it names with what /metrics really has.
"""

from __future__ import annotations

import json
from typing import Any

P99 = "histogram_quantile(0.99, sum by (le) (rate({}_bucket[5m])))"
P50 = "histogram_quantile(0.5, sum by (le) (rate({}_bucket[5m])))"
PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    # Several gateways tell of one store: what they say of it is the same, and is not added up.
    ("Rollouts that wait for a worker", "short", {"{{run}}": "max by (run) (agl_store_queued)"}),
    ("Age of the oldest of them", "s", {"{{run}}": "max by (run) (agl_store_oldest_queued_seconds)"}),
    ("Rollouts that run", "short", {"{{run}}": "max by (run) (agl_store_running)"}),
    ("Workers", "short", {"{{run}}": "max by (run) (agl_store_workers)"}),
    ("Model calls by result", "reqps", {"{{result}}": "sum by (result) (rate(agl_calls_total[5m]))"}),
    ("Time of a call", "s", {"p50": P50.format("agl_call_seconds"), "p99": P99.format("agl_call_seconds")}),
    (
        "Time to the first token",
        "s",
        {"p50": P50.format("agl_first_token_seconds"), "p99": P99.format("agl_first_token_seconds")},
    ),
    ("Calls under way", "short", {"answered": "sum(agl_calls_in_flight)", "waiting": "sum(agl_calls_paused)"}),
    (
        "Tokens per second",
        "short",
        {"sampled": "sum(rate(agl_sampled_tokens_total[5m]))", "prompts": "sum(rate(agl_prompt_tokens_total[5m]))"},
    ),
    ("Version of the policy", "short", {"{{run}} {{policy}}": "max by (run, policy) (agl_policy_version)"}),
    ("Engines by state", "short", {"{{state}}": "sum by (state) (agl_engine_state)"}),
    ("Prompts that do not continue a call", "short", {"{{cause}}": "sum by (cause) (rate(agl_forks_total[5m]))"}),
    (
        "Writes to the store",
        "s",
        {"p50": P50.format("agl_store_write_seconds"), "p99": P99.format("agl_store_write_seconds")},
    ),
    ("Store answers", "short", {"{{instance}}": "agl_store_up"}),
    (
        "Calls to external models",
        "reqps",
        {"{{model}} {{result}}": "sum by (model, result) (rate(agl_external_calls_total[5m]))"},
    ),
    (
        "Failures of the server's loops",
        "short",
        {"failed": "sum(rate(agl_background_failures_total[5m]))", "down": "sum(agl_background_down)"},
    ),
)
"""Title, unit and queries by legend of every panel, in order."""
WIDTH, HEIGHT, COLUMNS = 6, 7, 4


def dashboard(name: str) -> str:
    """The dashboard as JSON, the same for the same name."""
    panels = [
        {
            "id": number + 1,
            "title": title,
            "type": "timeseries",
            "datasource": {"type": "prometheus", "uid": "prometheus"},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "gridPos": _place(number),
            "targets": [
                {"refId": chr(ord("A") + place), "expr": query, "legendFormat": legend}
                for place, (legend, query) in enumerate(queries.items())
            ],
        }
        for number, (title, unit, queries) in enumerate(PANELS)
    ]
    whole = {
        "uid": "agentlightning",
        "title": f"Agent Lightning: {name}",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "panels": panels,
    }
    return json.dumps(whole, indent=2) + "\n"


def _place(number: int) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    return {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT}
