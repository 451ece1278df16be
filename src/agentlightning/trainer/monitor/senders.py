"""Senders: a run's alarms to a webhook and a program, and its rollouts to a trace collector.

Training never waits for them and never fails of them: each failure is told once.
"""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit

import httpx

from agentlightning.config.run import AlertsConfig
from agentlightning.errors import ConfigError
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.runtime.backoff import Backoff
from agentlightning.runtime.children import inheritable
from agentlightning.runtime.disk import open_private
from agentlightning.store.base import LightningStore
from agentlightning.tracing.exporters import OtlpHttpExporter, finished_rollouts, headers_of, resource_of, send_rollouts
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.monitor.health_checks import Alarm

TRY_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 120.0
"""Seconds from the first failure of an alarm to its last try."""
COMMAND_TIMEOUT_S = 30.0
END_TIMEOUT_S = 10.0
"""Seconds to send the alarms that are left when a run ends."""
EXPORT_WAIT_S = 30.0
EXPORT_END_S = 20.0
"""Seconds to send the rollouts that are left when a run ends."""


class AlertSender:
    """Sends alarms as they begin: ``async with`` around a run. The webhook's URL is a secret, which no note repeats."""

    def __init__(
        self, settings: AlertsConfig, run_id: str, note: Callable[[str], None], withhold: Iterable[str] = ()
    ) -> None:
        """withhold: variables that the command does not inherit. ConfigError if the webhook's variable holds no URL."""
        self._url = _webhook(settings.webhook_env)
        self._command = settings.command
        self._run_id = run_id
        self._note = note
        self._withhold = {*withhold, *([settings.webhook_env] if settings.webhook_env else [])}
        self._failed: set[str] = set()
        """Senders whose failure was told."""
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._background = BackgroundTasks()

    async def __aenter__(self) -> Self:
        self._background.start("alerts", self._send_for_ever)
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await asyncio.wait_for(self._queue.join(), END_TIMEOUT_S)
        except TimeoutError:
            self._note(f"{self._queue.qsize() + 1} alerts were not sent")
        await self._background.stop()

    def put(self, step: int, alarm: Alarm) -> None:
        """Never waits."""
        self._queue.put_nowait(f"run {self._run_id}, step {step}: {alarm.name}: {alarm.text}")

    async def _send_for_ever(self) -> None:
        async with httpx.AsyncClient(timeout=TRY_TIMEOUT_S) as client:
            while True:
                text = await self._queue.get()
                if self._url is not None:
                    self._failure("the webhook", await _post(client, self._url, text))
                if self._command:
                    self._failure("the command", await self._run_command(text))
                self._queue.task_done()

    async def _run_command(self, text: str) -> str | None:
        environment = inheritable(os.environ, self._withhold)
        try:
            child = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, env=environment, start_new_session=True
            )
        except (OSError, ValueError) as error:
            return f"cannot be started: {getattr(error, 'strerror', None) or error}"
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                await child.communicate(f"{text}\n".encode())
            return f"ended with exit code {child.returncode}" if child.returncode else None
        except TimeoutError:
            return f"did not end within {COMMAND_TIMEOUT_S:g} s"
        finally:
            if child.returncode is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
                await child.wait()

    def _failure(self, sender: str, why: str | None) -> None:
        if why is not None and sender not in self._failed:
            self._failed.add(sender)
            self._note(f"alerts: {sender} {why}")


async def _post(client: httpx.AsyncClient, url: str, text: str) -> str | None:
    """Returns why the webhook did not take the text; None where it did."""
    backoff = Backoff(first_s=1.0, max_s=30.0, timeout_s=SEND_TIMEOUT_S)
    while True:
        try:
            async with asyncio.timeout(TRY_TIMEOUT_S), client.stream("POST", url, json={"text": text}) as response:
                status = response.status_code  # the body is not read: it may have no end
            if 200 <= status < 300:
                return None
            why, again = f"answered {status}", status in (408, 429) or status >= 500
        except (httpx.HTTPError, TimeoutError) as error:
            why, again = f"could not be reached ({type(error).__name__})", True  # its message may name the URL
        if not again or not await backoff.sleep():
            return why


def _webhook(variable: str | None) -> str | None:
    if variable is None:
        return None
    url = os.environ.get(variable, "")
    try:
        known = url.startswith(("https://", "http://")) and (urlsplit(url).port or 1) > 0
    except ValueError:  # an impossible port; a bracket that does not close
        known = False
    if not known:
        raise ConfigError(f"alerts.webhook_env: expected the variable {variable} to hold an http(s) URL")
    return url


class TraceExport:
    """Sends rollouts as they finish: ``async with`` around a run whose store is open; does nothing without a `url`.

    A file of the run's folder says how far it has come; what was sent and not yet written down is sent again under the same
    ids.
    """

    def __init__(self, url: str | None, folder: RunFolder, store: LightningStore, tell: Callable[[str], None]) -> None:
        self._url = url or ""
        self._store = store
        self._run_id = folder.run_id
        self._file = folder.path / "traces_exported"
        self._tell = tell
        self._task: asyncio.Task[None] | None = None
        self._told = False
        """True once it was told that the collector rejects spans."""

    async def __aenter__(self) -> Self:
        if self._url:
            self._task = asyncio.create_task(self._export())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._task is None:
            return
        ended = self._task.done()
        self._task.cancel()
        await asyncio.wait({self._task})
        if ended or (kind is not None and issubclass(kind, asyncio.CancelledError)):
            return
        try:
            async with asyncio.timeout(EXPORT_END_S):
                await self._send_finished(EXPORT_END_S)
        except Exception as cause:
            self._give_up(cause)

    async def _export(self) -> None:
        try:
            while True:
                await self._store.wait(self._run_id, self._sent(), timeout_s=EXPORT_WAIT_S)
                await self._send_finished()
        except Exception as cause:  # whatever it is, training goes on, and somebody is told
            self._give_up(cause)

    async def _send_finished(self, timeout_s: float = 300.0) -> None:
        async with OtlpHttpExporter(self._url, headers_of(os.environ), timeout_s) as exporter:
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
            f"traces are no longer exported: {why}; later: agl runs export --as traces {self._run_id} --to {self._url}"
        )
