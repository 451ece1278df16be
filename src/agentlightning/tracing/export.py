"""Traces out: the rollouts of a run to an OpenTelemetry collector (Jaeger, Phoenix, Langfuse, …) or to a file.

Driven by the trainer while a run goes on, and by ``agl rollouts export-traces`` afterwards. A collector that is away is
waited for, one that refuses is an error; what it has answered for is not sent again. Knows nothing of training.
"""

from __future__ import annotations

import asyncio
import gzip
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self
from urllib.parse import unquote

import aiohttp

from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.store.base import LightningStore
from agentlightning.tracing.otlp import write_json
from agentlightning.tracing.outgoing import trace_of
from agentlightning.types import JSON, Rollout, Span

PORTION = 16
"""Rollouts that are read and sent at a time."""
TIMEOUT_S = 30.0
AGAIN = frozenset({429, 502, 503, 504})
"""Answers after which OTLP lets a client send again."""


class ExportRefused(AgentLightningError):
    """The collector does not take the traces, and would not if they were sent again."""


class Sink(Protocol):
    """Where traces go; an async context manager."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None: ...

    async def send(self, spans: Sequence[Span], resource: JSON) -> None:
        """Durable, or with the collector, on return. Raises ExportRefused."""
        ...


class Collector:
    """An OTLP/HTTP endpoint (protobuf, gzip). `headers` go with every request; `patience_s` is how long it may be away, and
    `pauses_s` the seconds between two tries, of which the last one is repeated."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        patience_s: float = 300.0,
        pauses_s: Sequence[float] = (1.0, 2.0, 5.0, 10.0, 30.0),
    ) -> None:
        self._url = url
        self._headers = {**headers, "content-type": "application/x-protobuf", "content-encoding": "gzip"}
        self._patience_s = patience_s
        self._pauses_s = pauses_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, spans: Sequence[Span], resource: JSON) -> None:
        body = await asyncio.to_thread(_packed, spans, resource)
        deadline = asyncio.get_running_loop().time() + self._patience_s
        pauses = iter(self._pauses_s)
        pause_s = 0.0
        while (why := await self._try(body)) is not None:
            pause_s = next(pauses, pause_s)
            if asyncio.get_running_loop().time() + pause_s > deadline:
                raise ExportRefused(f"{self._url}: took no traces for {self._patience_s:.0f} s: {why}")
            await asyncio.sleep(pause_s)

    async def _try(self, body: bytes) -> str | None:
        """Why to send again; None where the collector took it."""
        assert self._session is not None
        try:
            async with self._session.post(self._url, data=body, headers=self._headers) as response:
                said = await response.read()
        except (aiohttp.ClientError, TimeoutError) as cause:
            return str(cause) or type(cause).__name__
        if response.status in AGAIN:
            return f"HTTP {response.status}"
        if response.status >= 300:
            text = said[:200].decode("utf-8", "replace").strip()
            raise ExportRefused(f"{self._url}: refuses traces with HTTP {response.status}: {text}")
        return None


class TraceFile:
    """A new file of one OTLP/JSON request a line, as the OpenTelemetry Collector's file exporter writes and reads it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def __aenter__(self) -> Self:
        try:
            self._file = self._path.open("xb")
        except OSError as cause:
            raise ConfigError(f"--to {self._path}: expected a new file: {cause.strerror}") from cause
        return self

    async def __aexit__(self, *_: object) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    async def send(self, spans: Sequence[Span], resource: JSON) -> None:
        self._file.write(write_json(spans, resource) + b"\n")


async def send_rollouts(store: LightningStore, rollouts: Sequence[Rollout], sink: Sink, resource: JSON) -> int:
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
        await sink.send(traces, resource)
    return len(traces)


async def finished_rollouts(store: LightningStore, run_id: str, after: int = 0) -> AsyncIterator[list[Rollout]]:
    """Rollouts of the run that have finished by now, in portions, in the order in which they did."""
    while found := await store.wait(run_id, after, timeout_s=0.0):
        for start in range(0, len(found), PORTION):
            yield found[start : start + PORTION]
        after = found[-1].finished_seq or after


def headers_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Headers as OpenTelemetry's own exporters take them from the environment.

    >>> headers_of({"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Basic%20eHl6,x-scope=a"})
    {'authorization': 'Basic eHl6', 'x-scope': 'a'}
    """
    given = environment.get("OTEL_EXPORTER_OTLP_TRACES_HEADERS") or environment.get("OTEL_EXPORTER_OTLP_HEADERS") or ""
    pairs = [pair.partition("=") for pair in given.split(",") if "=" in pair]
    return {unquote(name.strip()).lower(): unquote(value.strip()) for name, _, value in pairs}


def _packed(spans: Sequence[Span], resource: JSON) -> bytes:
    from agentlightning.tracing.protobuf import write_protobuf  # its schema costs 0.1 s

    return gzip.compress(write_protobuf(spans, resource), compresslevel=1)
