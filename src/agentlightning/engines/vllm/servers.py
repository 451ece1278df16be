"""VllmServers: the sampler part of `engine.sampler = "vllm"`: vLLM servers that sample as equals, each with all weights.

LocalEngine drives it. A server that dies or hangs is killed and started again at its old URL, and gets the weights that were
published last before it samples; one that others run gets them again where it lost them. Gateways repeat what was in flight.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Literal

import aiohttp

from agentlightning.config.engine import EngineConfig
from agentlightning.engines.base import Endpoints, together
from agentlightning.engines.local.options import WeightsForm
from agentlightning.engines.local.parts import MAX_KILLED_STARTS, PublishedWeights, SamplerPart, Workplace
from agentlightning.engines.vllm.arguments import POLICY, server_arguments
from agentlightning.engines.vllm.publication import ADAPTER, Publisher, check_whole
from agentlightning.engines.vllm.server import OwnServer, ServerEndedError, ServerRefusedError, VllmServer
from agentlightning.engines.vllm.weights_server import WeightsServer
from agentlightning.engines.vllm.weights_url import WeightsUrl
from agentlightning.errors import EngineError, StoreError

PROBE_S = 1.0
"""Seconds between looks at a server."""
PROBES = 2
"""Probes in a row that are not answered before a server counts as hung: where this process stood still for a moment, the
first one is late although its answer is there."""
MAX_FAILURES = 3
"""Ends or refusals of a server in a row, without one publication between them, after which another start does not help."""

Logprobs = Literal["processed", "raw"]

log = logging.getLogger(__name__)


class VllmServers(SamplerPart):
    def __init__(self, place: Workplace, config: EngineConfig) -> None:
        assert config.vllm is not None
        self._place = place
        self._config = config
        self._vllm = config.vllm
        self._servers: Sequence[VllmServer] = ()
        self._http: aiohttp.ClientSession | None = None
        self._published: PublishedWeights | None = None
        self._kept = True
        """False once nobody starts servers again."""
        limits = place.watchdog.limits
        self._weights_server: WeightsServer | None = None
        self._weights_url: WeightsUrl | None = None
        if self._vllm.weights_url is not None:
            self._weights_url = WeightsUrl(self._vllm.weights_url, place.work_dir)
        elif self._vllm.weights == "transfer":
            self._weights_server = WeightsServer(self._vllm.weights_host)
        self._publisher = Publisher(
            source=self._weights_url or self._weights_server,
            adapter=self._vllm.weights == "lora",
            step_timeout_s=limits.hang_timeout_s,
            load_timeout_s=limits.start_timeout_s,
        )
        self._publish_timeout_s = limits.hang_timeout_s * PROBES + 2 * limits.start_timeout_s
        """A server may hang, start, and load."""
        self._endpoints: Endpoints | None = None

    @property
    def form(self) -> WeightsForm:
        return "adapter" if self._publisher.adapter else "sealed"

    @property
    def endpoints(self) -> Endpoints:
        assert self._endpoints is not None
        return self._endpoints

    def start(self) -> None:
        self._http = aiohttp.ClientSession()
        if self._vllm.python is None:
            self._servers = [
                VllmServer(f"sampler {number}", url, self._http, self._place.address.headers)
                for number, url in enumerate(self._vllm.urls)
            ]
        else:
            arguments = server_arguments(self._config, self._place.model)
            gpus = self._vllm.gpus or [None] * self._vllm.replicas
            self._servers = [
                OwnServer(number, self._http, self._place, self._vllm.python, arguments, visible)
                for number, visible in enumerate(gpus)
            ]
        for server in self._servers:
            server.start()

    async def ready(self) -> None:
        if self._weights_server is not None:
            await self._weights_server.start()
        found = await together(self._ready(server) for server in self._servers)
        if len(set(found)) > 1:
            raise EngineError(
                "engine.vllm.urls: expected servers that are alike, of one model under one name and with the same "
                f"--logprobs-mode; found {sorted(set(found))}"
            )
        model, logprobs = found[0]
        self._endpoints = Endpoints(
            urls=self._place.address.advertise or [server.url for server in self._servers],
            served_model=ADAPTER if self._publisher.adapter else model,
            logprobs=logprobs,
            key_env=self._place.address.key_env,
            seeded=False,  # a seed gives other tokens in other company, and on CPUs kills vLLM 0.32 where it pauses
        )

    async def publish(self, weights: PublishedWeights) -> None:
        await asyncio.to_thread(check_whole, weights)
        if self._weights_url is not None:
            await self._weights_url.copy(weights)  # before any server pauses
        # From here on a restarted server gets these weights, so a death in the middle loses nothing.
        self._published = weights
        await together(self._publish(server, weights) for server in self._servers)

    async def watch(self) -> None:
        try:
            await together(self._keep(server) for server in self._servers)
        finally:
            self._kept = False

    def pids(self) -> dict[str, int]:
        return {server.name: server.pid for server in self._servers if server.pid is not None}

    async def close(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(server.close) for server in self._servers))
        if self._weights_server is not None:
            await self._weights_server.close()
        if self._weights_url is not None:
            try:
                await self._weights_url.close()
            except StoreError as why:
                log.warning("published weights stay until the run is started again: %s", why)
        if self._http is not None:
            await self._http.close()
        self._servers, self._http = (), None

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _ready(self, server: VllmServer) -> tuple[str, Logprobs]:
        """Waits until it serves; returns the model's name there and the kind of its log-probabilities."""
        for killed in range(MAX_KILLED_STARTS + 1):
            try:
                await server.serving(self._place.start_timeout_s)
                break
            except ServerEndedError as ended:
                if ended.code >= 0 or killed == MAX_KILLED_STARTS:
                    raise EngineError(
                        f"{server} ended with code {ended.code} before it was ready; {server.words}"
                    ) from ended
                server.start()
            except TimeoutError as late:
                raise EngineError(
                    f"{server} is not ready after {self._place.start_timeout_s:g} s; on a busy machine raise "
                    f"trainer.start_timeout_s, else see why: {server.words}"
                ) from late
        if isinstance(server, OwnServer):
            return POLICY, "processed"
        return await self._look_at(server)

    async def _look_at(self, server: VllmServer) -> tuple[str, Logprobs]:
        """The model's name and the kind of log-probabilities of a server whose command line was written by others."""
        timeout_s = self._publisher.step_timeout_s
        try:
            await server.ask("GET", "/weight_info", timeout_s)
            model = (await server.ask("GET", "/v1/models", timeout_s))["data"][0]["id"]
        except ServerRefusedError as refused:
            raise EngineError(f"engine.vllm.urls: {refused}; expected vLLM with VLLM_SERVER_DEV_MODE=1") from refused
        # Of the one token that is allowed, the log-probability after the mask is 0.
        params = {"max_tokens": 1, "temperature": 1.0, "logprobs": 1, "allowed_token_ids": [1]}
        request = {"model": model, "token_ids": [1], "sampling_params": params}
        try:
            answer = await server.ask("POST", "/inference/v1/generate", timeout_s, request)
        except ServerRefusedError as refused:
            raise EngineError(f"engine.vllm.urls: {refused}; expected vLLM with --enable-scale-out") from refused
        logprob = answer["choices"][0]["logprobs"]["content"][0]["logprob"]
        return model, "processed" if logprob > -1e-3 else "raw"

    async def _publish(self, server: VllmServer, weights: PublishedWeights) -> None:
        """Until it has them; what dies or hangs meanwhile is replaced by `watch`."""
        deadline = time.monotonic() + self._publish_timeout_s
        cause: Exception | None = None
        failures = 0
        while failures < MAX_FAILURES and time.monotonic() < deadline and self._kept:
            if server.up and server.ended is None:  # else its socket would take a request that nobody answers
                try:
                    async with server.publishing:
                        await self._publisher.publish(server, weights)
                    return
                except TimeoutError as late:
                    cause = late
                    failures += 1
                    server.kill("did not take weights in time")
                except ServerRefusedError as refused:
                    cause = refused
                    failures += 1
                    server.kill("refused weights, and may have lost those that it had")
                except aiohttp.ClientError as away:
                    cause = away
            await asyncio.sleep(PROBE_S)
        reason = "it is away" if cause is None else str(cause) or type(cause).__name__
        raise EngineError(
            f"{server} did not take weights version {weights.version}: {reason}; {server.words}"
        ) from cause

    async def _keep(self, server: VllmServer) -> None:
        failures = 0
        while True:
            await asyncio.sleep(PROBE_S)
            try:
                if (code := server.ended) is not None:
                    failures += 1
                    if failures > MAX_FAILURES:
                        raise EngineError(f"{server} ended {failures} times in a row; {server.words}")
                    log.warning("%s ended with code %s; starting it again", server, code)
                    server.start()
                    await server.serving(self._place.start_timeout_s)
                if not server.publishing.locked() and await self._has_published(server):
                    failures = 0
            except TimeoutError:
                server.kill("gives no sign of life")
            except ServerRefusedError as refused:
                server.kill(f"is of no use ({refused})")
            except (aiohttp.ClientError, ServerEndedError):
                pass  # it ended, or is away; the next look shows which

    async def _has_published(self, server: VllmServer) -> bool:
        """True where it answers and has the weights that were published last; False where others see to that now."""
        async with server.publishing:
            for probe in range(PROBES):
                try:
                    version = await self._publisher.version(server)
                    break
                except TimeoutError:
                    if probe + 1 == PROBES:
                        raise
            weights = self._published
            if weights is not None and version != str(weights.version):
                await self._publisher.publish(server, weights)
            return True
