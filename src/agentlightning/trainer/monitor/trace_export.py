"""TraceExport: sends the rollouts of a run to a collector as they finish, beside training.

Driven by the trainer where ``tracing.export`` names one. Training never waits for it and never fails of it: what a collector
refuses is told once, with the command that sends it later. A file of the run's folder says how far it has come, so that
a resumed run goes on there; what was sent and not yet written down is sent again under the same ids.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from types import TracebackType
from typing import Self

from agentlightning.runtime.disk import open_private
from agentlightning.store.base import LightningStore
from agentlightning.tracing.exporters import OtlpHttpExporter, finished_rollouts, headers_of, resource_of, send_rollouts
from agentlightning.trainer.checkpoint import RunFolder

WAIT_S = 30.0
END_S = 20.0
"""Seconds that it gets at the end of a run for what is left."""


class TraceExport:
    """``async with`` around a run whose store is open and knows it; does nothing without a `url`."""

    def __init__(self, url: str | None, folder: RunFolder, store: LightningStore, tell: Callable[[str], None]) -> None:
        self._url = url
        self._store = store
        self._run_id = folder.run_id
        self._file = folder.path / "traces_exported"
        self._tell = tell
        self._task: asyncio.Task[None] | None = None
        self._told = False
        """Warning that the collector rejects spans."""

    async def __aenter__(self) -> Self:
        if self._url is not None:
            self._task = asyncio.create_task(self._export(self._url))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._task is None or self._url is None:
            return
        ended = self._task.done()
        self._task.cancel()
        await asyncio.wait({self._task})
        if ended or (kind is not None and issubclass(kind, asyncio.CancelledError)):
            return
        try:
            async with asyncio.timeout(END_S):
                await self._send_finished(self._url, END_S)
        except Exception as cause:
            self._give_up(cause)

    async def _export(self, url: str) -> None:
        try:
            while True:
                await self._store.wait(self._run_id, self._sent(), timeout_s=WAIT_S)
                await self._send_finished(url)
        except Exception as cause:  # whatever it is, training goes on, and somebody is told
            self._give_up(cause)

    async def _send_finished(self, url: str, timeout_s: float = 300.0) -> None:
        async with OtlpHttpExporter(url, headers_of(os.environ), timeout_s) as exporter:
            async for rollouts in finished_rollouts(self._store, self._run_id, self._sent()):
                await send_rollouts(self._store, rollouts, exporter, resource_of(self._run_id))
                with open_private(self._file, "wb") as file:
                    file.write(f"{rollouts[-1].finished_seq}\n".encode())
                if exporter.rejected and not self._told:
                    self._told = True
                    self._tell(f"traces: {self._url} takes them and rejects some spans: {exporter.reason}")

    def _sent(self) -> int:
        try:
            return int(self._file.read_text())
        except (OSError, ValueError):  # none yet, or killed while it was written: from the beginning
            return 0

    def _give_up(self, cause: Exception) -> None:
        why = str(cause) or ("there was no time for all of them" if isinstance(cause, TimeoutError) else repr(cause))
        self._tell(
            f"traces are no longer exported: {why}; later: agl rollouts export --as traces {self._run_id} --to {self._url}"
        )
