"""Alert sender: sends a run's alarms to a webhook and to a program.

The metric logger hands over each alarm as it begins. Sending never slows or ends a run: alarms wait in a queue, every try
has a deadline, and the first failure of each sender is printed without the webhook's URL, which is a secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Iterable
from typing import Self
from urllib.parse import urlsplit

import httpx

from agentlightning.config.alerts import AlertsConfig
from agentlightning.errors import ConfigError
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.runtime.backoff import Backoff
from agentlightning.runtime.children import inheritable
from agentlightning.trainer.monitor.health_checks import Alarm

TRY_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 120.0
"""Seconds from the first failure of an alarm to its last try."""
COMMAND_TIMEOUT_S = 30.0
END_TIMEOUT_S = 10.0
"""Seconds to send the rest when a run ends."""


class AlertSender:
    """``async with`` around a run."""

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
        """Senders whose failure was printed."""
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
                    await self._post(client, self._url, text)
                if self._command:
                    await self._run_command(text)
                self._queue.task_done()

    async def _post(self, client: httpx.AsyncClient, url: str, text: str) -> None:
        backoff = Backoff(first_s=1.0, max_s=30.0, timeout_s=SEND_TIMEOUT_S)
        while True:
            try:
                async with asyncio.timeout(TRY_TIMEOUT_S), client.stream("POST", url, json={"text": text}) as response:
                    status = response.status_code  # the body is not read: it may have no end
                if 200 <= status < 300:
                    return
                why, again = f"answered {status}", status in (408, 429) or status >= 500
            except (httpx.HTTPError, TimeoutError) as error:
                why, again = f"could not be reached ({type(error).__name__})", True  # its message may name the URL
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

    def _failure(self, sender: str, why: str) -> None:
        if sender not in self._failed:
            self._failed.add(sender)
            self._note(f"alerts: {sender} {why}")


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
