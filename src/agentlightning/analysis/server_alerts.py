"""Server alerts: one list of rules over what a server exports at /metrics, as a rules file and as a dashboard.

Pure; ``agl alerts prometheus`` and ``agl alerts grafana`` print them. The alarms of runs are others: they come from the
metrics of training steps, which no server exports.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import orjson

from agentlightning.records import JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAlert:
    """One rule."""

    name: str
    """As Prometheus names alerts: in camel case."""
    value: str
    """The PromQL expression whose value is bounded, and drawn."""
    bound: str
    """A comparison, such as `> 0.1`."""
    minutes: int
    """For how long it has to hold."""
    text: str
    """The problem, and the place to look at."""
    unit: str = "short"
    """Grafana's unit of the value."""

    @property
    def expression(self) -> str:
        return f"{self.value} {self.bound}"


SERVER_ALERTS = (
    ServerAlert(
        name="AglStoreDown",
        value="agl_store_up",
        bound="== 0",
        minutes=1,
        text="the store does not answer within 2 s: look at its database; workers and agents wait meanwhile",
    ),
    ServerAlert(
        name="AglQueueWithoutWorkers",
        value="agl_store_queued and on (instance, run) (agl_store_workers == 0)",
        bound="> 0",
        minutes=5,
        text="rollouts wait and no worker was seen: start workers, or look at the labels that the run asks for",
    ),
    ServerAlert(
        name="AglQueueOld",
        value="agl_store_oldest_queued_seconds",
        bound="> 1800",
        minutes=5,
        text="a rollout has waited for half an hour: more workers, or more rollouts in each (agent.concurrency)",
        unit="s",
    ),
    ServerAlert(
        name="AglLeasesExpiring",
        value="agl_store_leases_expiring / (agl_store_running > 0)",
        bound="> 0.5",
        minutes=2,
        text="most leases run out within 10 s: workers were lost, or cannot reach the server",
        unit="percentunit",
    ),
    ServerAlert(
        name="AglCallsRefused",
        value='sum by (instance) (rate(agl_calls_total{result="refused"}[5m]))'
        " / sum by (instance) (rate(agl_calls_total[5m]))",
        bound="> 0.01",
        minutes=5,
        text="more than 1% of the model calls are refused: agl rollouts list RUN --state refused names the fields",
        unit="percentunit",
    ),
    ServerAlert(
        name="AglCallsFailing",
        value='sum by (instance) (rate(agl_calls_total{result="failed"}[5m]))'
        " / sum by (instance) (rate(agl_calls_total[5m]))",
        bound="> 0.05",
        minutes=5,
        text="more than 5% of the model calls fail: look at the engine's state and log",
        unit="percentunit",
    ),
    ServerAlert(
        name="AglPromptsDrift",
        value="sum by (instance) (rate(agl_forks_total[15m]))"
        ' / sum by (instance) (rate(agl_calls_total{result="recorded"}[15m]))',
        bound="> 0.3",
        minutes=15,
        text="more than 30% of the prompts do not continue the tokens of the call before: agl rollouts drift RUN",
        unit="percentunit",
    ),
    ServerAlert(
        name="AglCallsPaused",
        value="agl_calls_paused",
        bound="> 0",
        minutes=5,
        text="calls wait for an engine that is away: look at the samplers",
    ),
    ServerAlert(
        name="AglEngineHangs",
        value="increase(agl_engine_hangs_total[1h])",
        bound="> 0",
        minutes=0,
        text="an engine stood still and was given up",
    ),
    ServerAlert(
        name="AglSlowWrites",
        value="histogram_quantile(0.95, sum by (instance, le) (rate(agl_store_write_seconds_bucket[5m])))",
        bound="> 1",
        minutes=5,
        text="one write in 20 takes more than a second: the database, its disk or its network is too slow",
        unit="s",
    ),
    ServerAlert(
        name="AglBackgroundDown",
        value="agl_background_down",
        bound="> 0",
        minutes=5,
        text="a loop of the server failed and is not started again: its log says why",
    ),
)


def prometheus_rules() -> str:
    """A rules file of Prometheus (YAML)."""
    return "\n".join(_rules()) + "\n"


def _rules() -> Iterator[str]:
    yield "groups:"
    yield "  - name: agentlightning"
    yield "    rules:"
    for alert in SERVER_ALERTS:
        yield f"      - alert: {alert.name}"
        yield f"        expr: {_quoted(alert.expression)}"
        yield f"        for: {alert.minutes}m"
        yield "        annotations:"
        yield f"          summary: {_quoted(alert.text)}"


def grafana_dashboard() -> JSON:
    """A dashboard to import: a panel for each rule, with its bound as a line."""
    return {
        "title": "Agent Lightning",
        "uid": "agentlightning",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "type": "datasource", "query": "prometheus", "label": "Data source"}]
        },
        "panels": [_panel(place, alert) for place, alert in enumerate(SERVER_ALERTS)],
    }


def _panel(place: int, alert: ServerAlert) -> JSON:
    comparison, bound = alert.bound.split()
    steps = [{"color": "green", "value": None}, {"color": "red", "value": float(bound)}]
    if comparison == "==":  # red below, green above: of a number that is 0 or 1
        steps = [{"color": "red", "value": None}, {"color": "green", "value": float(bound) + 1}]
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": alert.name,
        "description": alert.text,
        "datasource": source,
        "gridPos": {"h": 8, "w": 12, "x": 12 * (place % 2), "y": 8 * (place // 2)},
        "targets": [{"refId": "A", "expr": alert.value, "datasource": source}],
        "fieldConfig": {
            "defaults": {
                "unit": alert.unit,
                "thresholds": {"mode": "absolute", "steps": steps},
                "custom": {"thresholdsStyle": {"mode": "line"}},
            },
            "overrides": [],
        },
    }


def _quoted(text: str) -> str:
    """A scalar of YAML: JSON's strings are."""
    return orjson.dumps(text).decode()
