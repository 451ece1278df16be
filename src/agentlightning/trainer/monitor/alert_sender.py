"""Alert sender: a run's alarms in alerts.jsonl, and from there to a webhook and a program.

Driven by the metric logger, which hands over each alarm as it begins. Sending never slows or ends a run: it reads the file
behind the run, every try has a deadline, and what could not be sent is told once, without the webhook's URL, which is a
secret. How far it came is on disk too: what a crash left is sent when the run is resumed, and its last one maybe twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import httpx
import orjson

from agentlightning.config.alerts import AlertsConfig
from agentlightning.errors import ConfigError
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.runtime.backoff import Backoff
from agentlightning.runtime.children import inheritable
from agentlightning.runtime.disk import open_private
from agentlightning.trainer.monitor.health_checks import Alarm

FILE = "alerts.jsonl"
SENT = "alerts.sent"
"""Bytes of the file that were sent, or given up."""
TRY_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 120.0
"""Seconds from the first failure of an alarm to its last try."""
COMMAND_TIMEOUT_S = 30.0
END_S = 10.0
"""Seconds that it gets at the end of a run for what is left."""


class AlertSender:
    """``async with`` around a run: sends its alarms, and at the end what is left of them."""

    def __init__(
        self,
        settings: AlertsConfig,
        run_id: str,
        folder: Path,
        tell: Callable[[str], None],
        withhold: Iterable[str] = (),
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """folder: of the run, which has one trainer at a time. withhold: variables that the command does not inherit.

        ConfigError where the webhook's variable holds no URL.
        """
        self._url = _webhook(settings.webhook_env)
        self._command = settings.command
        self._sends = self._url is not None or bool(self._command)
        self._run_id = run_id
        self._file, self._sent = folder / FILE, folder / SENT
        self._tell = tell
        self._withhold = {*withhold, *([settings.webhook_env] if settings.webhook_env else [])}
        self._transport = transport
        self._failed: set[str] = set()
        """Ways of sending whose failure was told."""
        self._known: set[tuple[int, str]] = set()
        """Alarms in the file, by step and name."""
        self._torn = False
        """True where the file may end in half a line."""
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._background = BackgroundTasks()

    async def __aenter__(self) -> Self:
        with contextlib.suppress(OSError):
            self._torn = not self._file.read_bytes().endswith(b"\n")
        for line in self._lines(0):
            with contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError):
                row = orjson.loads(line)
                self._known.add((row["step"], row["name"]))
        if self._sends:
            self._background.start("alerts", self._send_for_ever)
        else:
            self._idle.set()
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), END_S)
        await self._background.stop()
        if self._sends and (left := len(self._lines(self._position()))):
            self._tell(f"{left} alerts were not sent; they are in {FILE}, and are sent when the run is resumed")

    def put(self, step: int, alarm: Alarm) -> None:
        """Take an alarm, but not again where a step that a crash undid had it. Never waits, never raises."""
        if (step, alarm.name) in self._known:
            return
        self._known.add((step, alarm.name))
        row = {"time": time.time(), "run_id": self._run_id, "step": step, "name": alarm.name, "text": alarm.text}
        try:
            with open_private(self._file, "ab") as file:
                file.write((b"\n" if self._torn else b"") + orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
            self._torn = False
        except OSError as error:
            self._torn = True
            self._failure(FILE, f"cannot be written: {error.strerror}")
        if self._sends:
            self._idle.clear()
            self._news.set()

    async def _send_for_ever(self) -> None:
        async with httpx.AsyncClient(timeout=TRY_TIMEOUT_S, transport=self._transport) as client:
            while True:
                self._news.clear()
                position = self._position()
                for line in self._lines(position):
                    await self._send(client, line)
                    position += len(line) + 1
                    self._keep(position)
                if not self._news.is_set():
                    self._idle.set()
                await self._news.wait()

    async def _send(self, client: httpx.AsyncClient, line: bytes) -> None:
        try:
            row = orjson.loads(line)
            text = f"run {row['run_id']}, step {row['step']}: {row['name']}: {row['text']}"
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return  # a full disk leaves half a line
        if self._url is not None:
            await self._post(client, self._url, text)
        if self._command:
            await self._run_command(text)

    async def _post(self, client: httpx.AsyncClient, url: str, text: str) -> None:
        backoff = Backoff(first_s=1.0, max_s=30.0, timeout_s=SEND_TIMEOUT_S)
        while True:
            try:
                async with asyncio.timeout(TRY_TIMEOUT_S), client.stream("POST", url, json={"text": text}) as response:
                    status = response.status_code  # what it says besides is not read: it may have no end
                if 200 <= status < 300:
                    return
                why, again = f"answered {status}", status in (408, 429) or status >= 500
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
                # Its words may name the URL.
                why, again = f"could not be reached ({type(error).__name__})", not isinstance(error, httpx.InvalidURL)
            if not again or not await backoff.sleep():
                self._failure("the webhook", why)
                return

    async def _run_command(self, text: str) -> None:
        environment = inheritable(os.environ, self._withhold)
        try:
            child = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, env=environment, start_new_session=True
            )
        except (OSError, ValueError) as error:
            self._failure("the command", f"cannot be started: {getattr(error, 'strerror', None) or error}")
            return
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                await child.communicate(f"{text}\n".encode())
            if child.returncode:
                self._failure("the command", f"ended with exit code {child.returncode}")
        except TimeoutError:
            self._failure("the command", f"did not end within {COMMAND_TIMEOUT_S:g} s")
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
                await child.wait()

    def _lines(self, position: int) -> list[bytes]:
        """Whole lines of the file from there on."""
        try:
            with self._file.open("rb") as file:
                file.seek(position)
                return file.read().split(b"\n")[:-1]
        except OSError:
            return []

    def _position(self) -> int:
        try:
            # A power cut may leave less of the file than was sent of it.
            return min(int(self._sent.read_bytes()), self._file.stat().st_size)
        except (OSError, ValueError):
            return 0

    def _keep(self, position: int) -> None:
        part = self._sent.with_suffix(".part")
        try:
            with open_private(part, "wb") as file:
                file.write(str(position).encode())
            os.replace(part, self._sent)
        except OSError as error:
            self._failure(SENT, f"cannot be written: {error.strerror}")

    def _failure(self, what: str, why: str) -> None:
        if what not in self._failed:
            self._failed.add(what)
            self._tell(f"alerts: {what} {why}" + ("" if what == FILE else f"; every alarm is in {FILE}"))


def _webhook(variable: str | None) -> str | None:
    if variable is None:
        return None
    url = os.environ.get(variable, "")
    try:
        known = url.startswith(("https://", "http://")) and (urlsplit(url).port or 1) > 0
    except ValueError:  # a port that none is; a bracket that does not close
        known = False
    if not known:
        raise ConfigError(f"alerts.webhook_env: expected the variable {variable} to hold an http(s) URL")
    return url
