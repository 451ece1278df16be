"""SamplerProcess: the sampler part that is one process of ours (sampler.py), on a socket that outlives it.

LocalEngine drives it. It tells the sampler of new weights by their folder, and starts one that died again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import subprocess
import time
from functools import partial

import aiohttp

from agentlightning.engines.base import Endpoints
from agentlightning.engines.local.options import WEIGHTS_KEY, SamplerOptions, WeightsForm
from agentlightning.engines.local.parts import MAX_KILLED_STARTS, WATCH_S, PublishedWeights, SamplerPart, Workplace
from agentlightning.engines.sampling_key import SAMPLING_KEY
from agentlightning.errors import EngineError
from agentlightning.runtime.children import stop_child

MAX_QUICK_RESTARTS = 5
"""A sampler that dies this often within a minute is not restarted again: the fault is not a passing one."""

log = logging.getLogger(__name__)


class SamplerProcess(SamplerPart):
    form: WeightsForm = "weights"

    def __init__(self, place: Workplace, options: SamplerOptions = SamplerOptions()) -> None:
        self._place = place
        self._options = options
        self._listener: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._http: aiohttp.ClientSession | None = None
        self._published: PublishedWeights | None = None
        self._kept = True
        """False once nobody starts it again."""
        self._weights_key = secrets.token_urlsafe(32)
        """Opens the sampler's route for weights: others can reach its port."""

    @property
    def endpoints(self) -> Endpoints:
        address = self._place.address
        return Endpoints(urls=address.advertise or [self._url], key_env=address.key_env)

    @property
    def _url(self) -> str:
        assert self._listener is not None
        return self._place.address.url(self._listener)

    def start(self) -> None:
        if self._listener is None:
            self._listener = self._place.address.listen()
            self._http = aiohttp.ClientSession()
        more = ["--weights-folder", str(self._place.weights_folder)]
        if self._published is not None:
            more += ["--weights", str(self._published.folder), "--weight-version", str(self._published.version)]
        keys = {WEIGHTS_KEY: self._weights_key, SAMPLING_KEY: self._place.address.key}
        self._child = self._place.start_child("sampler", self._listener.fileno(), self._options, *more, secrets=keys)

    async def ready(self) -> None:
        """The socket is ours and listens already, so the first answer comes when the sampler serves."""
        assert self._http is not None
        deadline = time.monotonic() + self._place.start_timeout_s
        killed = 0
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._http.get(f"{self._url}/health", timeout=aiohttp.ClientTimeout(0.5)) as answer:
                    if answer.status == 200:
                        return
            assert self._child is not None
            code = self._child.poll()
            if code is not None:
                killed += 1
                if code >= 0 or killed > MAX_KILLED_STARTS:
                    raise self._place.ended_early("sampler", code)
                stop_child(self._child)
                self.start()
                deadline = time.monotonic() + self._place.start_timeout_s
            if time.monotonic() > deadline:
                raise self._place.late("sampler")

    async def publish(self, weights: PublishedWeights) -> None:
        """A sampler that dies meanwhile has a successor, which starts with the weights and agrees.

        One that hangs is killed by the watchdog; what it may take in all is that and the start of its successor.
        """
        assert self._http is not None
        # From here on a restarted sampler starts with these weights, so a death in the middle loses nothing.
        self._published = weights
        version = weights.version
        kwargs = {"weights_path": str(weights.folder), "weight_version": str(version)}
        body = {"method": "reload_weights", "kwargs": kwargs}
        limits = self._place.watchdog.limits
        timeout_s = max(limits.stall_timeout_s, limits.start_timeout_s) + limits.hang_timeout_s + limits.start_timeout_s
        deadline = time.monotonic() + timeout_s
        headers = {"Authorization": f"Bearer {self._weights_key}"}
        request = partial(self._http.post, f"{self._url}/collective_rpc", headers=headers, json=body)
        while True:
            try:
                left = aiohttp.ClientTimeout(max(WATCH_S, deadline - time.monotonic()))  # 0 would be no limit
                async with request(timeout=left) as answer:
                    if answer.status == 200:
                        return
                    message = (await answer.json())["error"]["message"]
                    raise EngineError(f"the sampler did not take weights version {version}: {message}")
            except (aiohttp.ClientError, TimeoutError) as cause:
                if time.monotonic() > deadline or not self._kept:
                    raise EngineError(
                        f"the sampler did not take weights version {version}; {self._place.tail('sampler')}"
                    ) from cause
                await asyncio.sleep(WATCH_S)

    async def watch(self) -> None:
        """Start a sampler that died again, on the same port, with the weights that were published last."""
        deaths: list[float] = []
        try:
            while True:
                await asyncio.sleep(WATCH_S)
                assert self._child is not None
                if self._child.poll() is None:
                    continue
                deaths = [at for at in deaths if at > time.monotonic() - 60] + [time.monotonic()]
                if len(deaths) > MAX_QUICK_RESTARTS:
                    raise EngineError(
                        f"the sampler ended {len(deaths)} times within a minute; {self._place.tail('sampler')}"
                    )
                log.warning("the sampler ended with code %s; starting it again", self._child.returncode)
                stop_child(self._child)
                self.start()
        finally:
            self._kept = False

    def pids(self) -> dict[str, int]:
        return {} if self._child is None else {"sampler": self._child.pid}

    async def close(self) -> None:
        if self._child is not None:
            await asyncio.to_thread(stop_child, self._child)
        if self._http is not None:
            await self._http.close()
        if self._listener is not None:
            self._listener.close()
        self._child = self._http = self._listener = None
