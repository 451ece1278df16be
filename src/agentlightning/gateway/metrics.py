"""What /metrics shows (Prometheus text format): one registry an app, so that two apps in a process do not add up."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)


class GatewayMetrics:
    """The gateway's own numbers."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._calls = Counter("agl_calls", "Model calls by result", ["result"], registry=self._registry)
        self._forks = Counter(
            "agl_forks", "Prompts that do not continue a call, by cause", ["cause"], registry=self._registry
        )
        self.seconds = Histogram(
            "agl_call_seconds", "Time from a request to its answer", buckets=BUCKETS_S, registry=self._registry
        )
        self.in_flight = Gauge("agl_calls_in_flight", "Model calls being answered", registry=self._registry)
        self.prompt_tokens = Counter("agl_prompt_tokens", "Tokens of prompts", registry=self._registry)
        self.sampled_tokens = Counter("agl_sampled_tokens", "Tokens sampled", registry=self._registry)
        self.recorded = self._calls.labels("recorded")
        self.refused = self._calls.labels("refused")
        self.replayed = self._calls.labels("replayed")

    def forked(self, cause: str) -> None:
        """Count one fork."""
        self._forks.labels(cause).inc()

    def text(self) -> bytes:
        """The exposition."""
        return bytes(generate_latest(self._registry))
