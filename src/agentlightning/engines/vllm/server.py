"""VllmServer: one vLLM server, spoken to by HTTP: one that runs already, or (OwnServer) a process that is started here.

VllmServers drives them. A process has a socket that outlives it, so that calls wait for its successor and are not refused;
it is killed with its whole group, for vLLM's workers do not always end with it. Knows nothing of when weights change.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from agentlightning.engines.local.parts import Workplace
from agentlightning.engines.sampler_address import SAMPLING_KEY
from agentlightning.errors import EngineError
from agentlightning.runtime.children import start_child

VLLM_SIDE = Path(__file__).parent / "vllm_side"
"""Folder of the package that runs inside vLLM's servers."""
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes by which weights change
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",  # its 5 s end connections just as gateways use them again
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
HEALTH_TIMEOUT_S = 2.0
GRACE_S = 10.0
"""Seconds that a server may take to end."""

log = logging.getLogger(__name__)


class ServerRefusedError(EngineError):
    """The server answered, with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerEndedError(Exception):
    """The server's process ended, with this code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class VllmServer:
    """A server that others run."""

    reload = ("reload_weights", "weights_path")
    """Method of its workers that reads a folder of weights, and the name of its argument."""

    def __init__(
        self, name: str, url: str, http: aiohttp.ClientSession, headers: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self.publishing = asyncio.Lock()
        """Held while its weights change: it then answers late, and that is no sign of a hang."""
        self._http = http
        self.up = False
        """True from its first answer until it is killed or started again."""
        self._headers = dict(headers or {})
        self._complaint = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.url})"

    async def ask(self, method: str, path: str, timeout_s: float, body: Any = None) -> Any:
        """The JSON of its answer, None where that is none. Raises ServerRefusedError, aiohttp.ClientError, TimeoutError."""
        timeout = aiohttp.ClientTimeout(timeout_s)
        async with self._http.request(
            method, self.url + path, json=body, headers=self._headers, timeout=timeout
        ) as answer:
            if answer.status != 200:
                text = (await answer.text())[:500]
                raise ServerRefusedError(f"{self} answered {path} with {answer.status}: {text}", answer.status)
            return await answer.json() if answer.content_type == "application/json" else None

    async def serving(self, timeout_s: float) -> None:
        """Wait until it answers. Raises TimeoutError, and ServerEndedError where its process ends first."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, ServerRefusedError):
                await self.ask("GET", "/health", HEALTH_TIMEOUT_S)
                self.up = True
                return
            if (code := self.ended) is not None:
                raise ServerEndedError(code)
            if time.monotonic() > deadline:
                raise TimeoutError
            await asyncio.sleep(HEALTH_TIMEOUT_S / 4)

    @property
    def ended(self) -> int | None:
        """Exit code of its process, where that is ours and ended."""
        return None

    @property
    def pid(self) -> int | None:
        return None

    @property
    def words(self) -> str:
        """Last words of its log."""
        return f"see the log of {self.url}"

    def start(self) -> None:
        """Start its process, in place of one that ended or hangs."""

    def kill(self, reason: str) -> None:
        """It does not do what it should."""
        if reason != self._complaint:
            log.warning("%s %s; it is not ours to start again", self, reason)
        self._complaint = reason

    def close(self) -> None:
        """Stop what was started."""


class OwnServer(VllmServer):
    """A process on a socket of ours, whose routes for weights need a key that it alone was given."""

    reload = ("reload_published", "folder")

    def __init__(
        self,
        number: int,
        http: aiohttp.ClientSession,
        place: Workplace,
        python: str,
        arguments: Sequence[str],
        gpus: str | None = None,
    ) -> None:
        self._listener = place.address.listen(number)
        super().__init__(f"sampler {number}", place.address.url(self._listener), http)
        self._place = place
        self._python = python
        self._arguments = arguments
        self._gpus = gpus
        self._key = secrets.token_urlsafe(32)
        self._headers = {"Authorization": f"Bearer {self._key}"}
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def ended(self) -> int | None:
        """It is not reaped here: as long as it is not, its group's id is nobody else's."""
        if self._child is None:
            return None
        if self._child.returncode is not None:
            return self._child.returncode
        found = os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    @property
    def words(self) -> str:
        return self._place.tail(self._file)

    @property
    def _file(self) -> str:
        return self.name.replace(" ", "-")

    def start(self) -> None:
        self._end_group()
        self.up = False
        paths = [str(VLLM_SIDE), *filter(None, [os.environ.get("PYTHONPATH")])]
        devices = {} if self._gpus is None else {"CUDA_VISIBLE_DEVICES": self._gpus}
        descriptor = self._listener.fileno()
        address = ["--host", self._place.address.host, "--port", str(self._listener.getsockname()[1])]
        self._child = start_child(
            ["agentlightning_vllm", "--fd", str(descriptor), *address, *self._arguments],
            python=self._python,
            secrets={"weights_key": self._key, SAMPLING_KEY: self._place.address.key},
            withhold=self._place.setup.withhold,
            pass_fds=[descriptor],
            env={**ENVIRONMENT, **devices, "PYTHONPATH": os.pathsep.join(paths)},
            log=self._place.log_file(self._file),
        )

    def kill(self, reason: str) -> None:
        """So that whoever watches finds it ended. By SIGKILL: SIGTERM stays pending in a process that was stopped."""
        assert self._child is not None
        self._place.setup.watchdog.kills[self.name] += 1
        log.warning("%s (process %d) %s; killing it", self.name, self._child.pid, reason)
        self._end_group()
        self.up = False

    def close(self) -> None:
        if self._child is not None and self.ended is None:
            os.kill(self._child.pid, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_S
            while self.ended is None and time.monotonic() < deadline:
                time.sleep(0.05)
        self._end_group()
        self._child = None
        self._listener.close()

    def _end_group(self) -> None:
        """SIGKILL for all of its process group that is left."""
        if self._child is None or self._child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        assert self._child.stdin is not None
        self._child.stdin.close()
