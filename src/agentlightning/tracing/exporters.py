"""Traces out: the rollouts of a run to an OpenTelemetry collector (Jaeger, Phoenix, Langfuse, …) or to a file.

Driven by the trainer while a run goes on, and by ``agl rollouts export --as traces`` afterwards. A collector that is away is
waited for, one that refuses is an error; what it has answered for is not sent again. Knows nothing of training.
"""

from __future__ import annotations

import asyncio
import gzip
import os
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Self
from urllib.parse import unquote

import aiohttp

from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.records import JSON, Rollout, Span
from agentlightning.runtime.backoff import Backoff
from agentlightning.runtime.disk import open_private
from agentlightning.store.base import LightningStore
from agentlightning.tracing.rollout_trace import trace_of

ROLLOUTS_PER_BATCH = 16
"""Rollouts that are read and sent at a time."""
TIMEOUT_S = 30.0
RETRYABLE_STATUSES = frozenset({429, 502, 503, 504})
"""Answers after which OTLP lets a client send again."""
MAX_REQUEST_BYTES = 8 * 1024 * 1024
"""Bytes of a request, unpacked: most collectors take 20 MiB."""


class ExportRejected(AgentLightningError):
    """The collector does not take the traces, and would not if they were sent again."""


class TraceExporter(AbstractAsyncContextManager["TraceExporter", None]):
    """A destination of traces."""

    rejected = 0
    """Spans that were accepted and then not kept, by what the other side says."""
    reason = ""

    @abstractmethod
    async def send(self, spans: Sequence[Span], resource: JSON) -> None:
        """Durable, or with the collector, on return. Raises ExportRejected."""


class OtlpHttpExporter(TraceExporter):
    """An OTLP/HTTP endpoint (protobuf, gzip).

    headers: sent with every request. timeout_s: how long the collector may be away. first_pause_s: between the first two
    tries; then it doubles, up to half a minute. A collector that asks for a longer pause gets it.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        timeout_s: float = 300.0,
        first_pause_s: float = 1.0,
    ) -> None:
        self._url = url
        self._headers = {**headers, "content-type": "application/x-protobuf", "content-encoding": "gzip"}
        self._timeout_s = timeout_s
        self._first_pause_s = first_pause_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, spans: Sequence[Span], resource: JSON) -> None:
        for body in await asyncio.to_thread(_packed, spans, resource):
            await self._send(body)

    async def _send(self, body: bytes) -> None:
        backoff = Backoff(self._first_pause_s, max_s=30.0, timeout_s=self._timeout_s)
        while (failure := await self._try(body)) is not None:
            why, asked_s = failure
            if not await backoff.sleep(asked_s):
                raise ExportRejected(f"{self._url}: took no traces for {self._timeout_s:.0f} s: {why}")

    async def _try(self, body: bytes) -> tuple[str, float] | None:
        """Returns why to send again, and after how many seconds at least; None where the collector took it."""
        assert self._session is not None
        try:
            # a redirected POST becomes a GET of a page that says 200 and takes nothing
            post = self._session.post(self._url, data=body, headers=self._headers, allow_redirects=False)
            async with post as response:
                said = await response.read()
        except (aiohttp.ClientError, TimeoutError) as cause:
            return str(cause) or type(cause).__name__, 0.0
        if response.status in RETRYABLE_STATUSES:
            asked = response.headers.get("retry-after", "")
            return f"HTTP {response.status}", float(asked) if asked.isascii() and asked.isdigit() else 0.0
        if response.status >= 300:
            text = response.headers.get("location") or said[:200].decode("utf-8", "replace").strip()
            raise ExportRejected(f"{self._url}: refuses traces with HTTP {response.status}: {text}")
        if response.content_type == "application/x-protobuf":
            from agentlightning.tracing.protobuf import read_response

            rejected, reason = read_response(said)
            self.rejected += rejected
            self.reason = reason or self.reason
        return None


class OtlpFileExporter(TraceExporter):
    """A new file of one OTLP/JSON request per line, as the OpenTelemetry Collector's file exporter writes and reads it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def __aenter__(self) -> Self:
        from agentlightning.tracing.protobuf import write_json  # needs an extra: known before there is a file

        self._write_json = write_json
        try:
            self._file = open_private(self._path, "xb")
        except OSError as cause:
            raise ConfigError(f"--to {self._path}: expected a new file: {cause.strerror}") from cause
        return self

    async def __aexit__(self, *_: object) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    async def send(self, spans: Sequence[Span], resource: JSON) -> None:
        self._file.write(self._write_json(spans, resource) + b"\n")


async def send_rollouts(
    store: LightningStore, rollouts: Sequence[Rollout], exporter: TraceExporter, resource: JSON
) -> int:
    """Send these rollouts, each as a trace; how many spans they have."""
    ids = [rollout.id for rollout in rollouts]
    calls, spans, rewards = await store.calls(ids), await store.spans(ids), await store.rewards(ids)
    traces: list[Span] = []
    for rollout in rollouts:
        traces += trace_of(
            rollout,
            [call for call in calls if call.rollout_id == rollout.id],
            [span for span in spans if span.rollout_id == rollout.id],
            [reward for reward in rewards if reward.rollout_id == rollout.id],
        )
    if traces:
        await exporter.send(traces, resource)
    return len(traces)


async def finished_rollouts(store: LightningStore, run_id: str, after: int = 0) -> AsyncIterator[list[Rollout]]:
    """Rollouts of the run that have finished by now, in portions, in the order in which they did."""
    while found := await store.wait(run_id, after, timeout_s=0.0):
        for start in range(0, len(found), ROLLOUTS_PER_BATCH):
            yield found[start : start + ROLLOUTS_PER_BATCH]
        after = found[-1].finished_seq or after


def headers_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Headers as OpenTelemetry's own exporters take them from the environment.

    >>> headers_of({"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Basic%20eHl6,x-scope=a"})
    {'authorization': 'Basic eHl6', 'x-scope': 'a'}
    """
    given = environment.get("OTEL_EXPORTER_OTLP_TRACES_HEADERS") or environment.get("OTEL_EXPORTER_OTLP_HEADERS") or ""
    # The library leaves out a header with a character such as ";", and writes it to the log.
    pairs = [pair.partition("=") for pair in given.split(",") if "=" in pair]
    return {unquote(name.strip()).lower(): unquote(value.strip()) for name, _, value in pairs}


def _packed(spans: Sequence[Span], resource: JSON) -> list[bytes]:
    """As few requests as collectors take; a span that is larger than that goes alone."""
    from agentlightning.tracing.protobuf import write_protobuf  # its schema costs 0.1 s

    body = write_protobuf(spans, resource)
    half = len(spans) // 2
    if len(body) <= MAX_REQUEST_BYTES or not half:
        return [gzip.compress(body, compresslevel=1)]
    return [*_packed(spans[:half], resource), *_packed(spans[half:], resource)]
