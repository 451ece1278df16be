"""VllmServers: the sampler part of vLLM servers that sample as equals, each with all weights.

LocalEngine drives it. A server that dies or hangs is killed and started again at its old URL, and gets the weights that were
published last before it samples; one that others run gets them again if it lost them. Gateways repeat what was in flight.
Generation pauses between two steps while weights change, so that every token is of the version that it is stamped with;
requests keep their tokens, which are read again under the new weights.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import aiohttp

from agentlightning.config.engine import EngineConfig, LocalSampler, VllmSampler, VllmServerSampler
from agentlightning.engines.base import Endpoints, together
from agentlightning.engines.local.parts import MAX_KILLED_STARTS, PublishedWeights, WeightsForm, Workplace
from agentlightning.engines.saved_folders import damage
from agentlightning.engines.url_folder import UrlFolder
from agentlightning.engines.vllm.server import OwnServer, ServerEndedError, ServerRefusedError, VllmServer
from agentlightning.engines.vllm.weights import WeightsServer, WeightsSource, WeightsUrl
from agentlightning.errors import ConfigError, EngineError, StoreError

POLICY = "policy"
"""Name under which such servers know the model."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes for --max-lora-rank."""


def check_settings(sampler: VllmSampler | VllmServerSampler) -> None:
    """ConfigError where servers cannot be started, MissingExtraError where weights cannot be put in their place."""
    if "://" in sampler.weights and not sampler.weights.startswith("http://"):
        UrlFolder(sampler.weights)
    if isinstance(sampler, VllmSampler) and shutil.which(sampler.python) is None:
        raise ConfigError(
            f"engine.sampler.python: {sampler.python} is no program here; expected the interpreter of an environment in "
            "which vLLM is installed"
        )


def server_arguments(config: EngineConfig, sampler: VllmSampler, model: Path) -> list[str]:
    """Arguments after the program's name of a server that is started here."""
    arguments = ["--model", str(model), "--served-model-name", POLICY, "--max-num-seqs", str(config.max_num_seqs)]
    # What the learner rebuilds: log-probabilities after temperature, cuts and masks, with llguidance's masks.
    arguments += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    arguments += ["--structured-outputs-config", json.dumps({"backend": "guidance"})]
    arguments += ["--disable-uvicorn-access-log"]
    if config.dtype != "auto":
        arguments += ["--dtype", config.dtype]
    arguments += ["--worker-extension-cls", "agentlightning_vllm.worker.WeightsWorker"]
    if "://" in sampler.weights:
        arguments += ["--weight-transfer-config", json.dumps({"backend": "agentlightning"})]
    elif sampler.weights == "lora":
        assert config.lora_rank is not None
        rank = next((known for known in LORA_RANKS if known >= config.lora_rank), config.lora_rank)
        arguments += ["--enable-lora", "--max-lora-rank", str(rank)]
    return [*arguments, *sampler.arguments]


ADAPTER = "agentlightning"
"""Name under which servers sample with the adapter."""


def check_whole(weights: PublishedWeights) -> None:
    """EngineError where the folder is not as it was sealed: half of a model kills a vLLM server that reloads it."""
    if (lacks := damage(weights.folder)) is not None:
        raise EngineError(
            f"weights version {weights.version} in {weights.folder} are not whole, and are not published: {lacks}"
        )


PROBE_S = 1.0
"""Seconds between looks at a server."""
PROBES = 2
"""Probes in a row that are not answered before a server counts as hung: where this process stood still for a moment, the
first one is late although its answer is there."""
MAX_FAILURES = 3
"""Ends or refusals of a server in a row, without one publication between them, after which another start does not help."""

Logprobs = Literal["processed", "raw"]

log = logging.getLogger(__name__)


class VllmServers:
    images = False

    def __init__(self, place: Workplace) -> None:
        config = place.setup.config
        assert not isinstance(config.sampler, LocalSampler)
        self._place = place
        self._config = config
        self._settings = config.sampler
        self._servers: Sequence[VllmServer] = ()
        self._http: aiohttp.ClientSession | None = None
        self._published: PublishedWeights | None = None
        self._kept = True
        """False once nobody starts servers again."""
        self._source: WeightsSource | None = None
        weights, limits = config.sampler.weights, place.setup.watchdog.limits
        if weights.startswith("http://"):
            self._source = WeightsServer(weights.removeprefix("http://"))
        elif "://" in weights:
            self._source = WeightsUrl(weights, place.setup.work_dir)
        self.form: WeightsForm = "adapter" if weights == "lora" else "sealed"
        self._step_timeout_s, self._load_timeout_s = limits.hang_timeout_s, limits.start_timeout_s
        """For what waits for one step of the model at most, and for a load of weights."""
        self._publish_timeout_s = limits.hang_timeout_s * PROBES + 2 * limits.start_timeout_s
        """A server may hang, start, and load."""
        self._endpoints: Endpoints | None = None

    @property
    def endpoints(self) -> Endpoints:
        assert self._endpoints is not None
        return self._endpoints

    def start(self) -> None:
        self._http = aiohttp.ClientSession()
        if isinstance(self._settings, VllmServerSampler):
            self._servers = [
                VllmServer(f"sampler {number}", url, self._http, self._place.address.headers)
                for number, url in enumerate(self._settings.urls)
            ]
        else:
            python = self._settings.python
            arguments = server_arguments(self._config, self._settings, self._place.model)
            self._servers = [
                OwnServer(number, self._http, self._place, python, arguments, visible)
                for number, visible in enumerate(self._settings.gpus or [None])
            ]
        for server in self._servers:
            server.start()

    async def ready(self) -> None:
        if self._source is not None:
            await self._source.start()
        found = await together(self._ready(server) for server in self._servers)
        if len(set(found)) > 1:
            raise EngineError(
                "engine.sampler.urls: expected servers that are alike, of one model under one name and with the same "
                f"--logprobs-mode; found {sorted(set(found))}"
            )
        model, logprobs = found[0]
        self._endpoints = Endpoints(
            urls=self._place.address.advertise or [server.url for server in self._servers],
            served_model=ADAPTER if self.form == "adapter" else model,
            logprobs=logprobs,
            key_env=self._place.address.key_env,
            seeded=False,  # a seed gives other tokens in other company, and on CPUs kills vLLM 0.32 where it pauses
        )

    async def publish(self, weights: PublishedWeights) -> None:
        await asyncio.to_thread(check_whole, weights)
        if self._source is not None:
            await self._source.put(weights)  # before any server pauses
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
        if self._source is not None:
            try:
                await self._source.close()
            except StoreError as why:
                log.warning("published weights stay until the run is started again: %s", why)
        if self._http is not None:
            await self._http.close()
        self._servers, self._http = (), None

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
        timeout_s = self._step_timeout_s
        try:
            await server.ask("GET", "/weight_info", timeout_s)
            model = (await server.ask("GET", "/v1/models", timeout_s))["data"][0]["id"]
        except ServerRefusedError as refused:
            raise EngineError(f"engine.sampler.urls: {refused}; expected vLLM with VLLM_SERVER_DEV_MODE=1") from refused
        # Of the one token that is allowed, the log-probability after the mask is 0.
        params = {"max_tokens": 1, "temperature": 1.0, "logprobs": 1, "allowed_token_ids": [1]}
        request = {"model": model, "token_ids": [1], "sampling_params": params}
        try:
            answer = await server.ask("POST", "/inference/v1/generate", timeout_s, request)
        except ServerRefusedError as refused:
            raise EngineError(f"engine.sampler.urls: {refused}; expected vLLM with --enable-scale-out") from refused
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
                        await self._send(server, weights)
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
                    version = await self._version(server)
                    break
                except TimeoutError:
                    if probe + 1 == PROBES:
                        raise
            weights = self._published
            if weights is not None and version != str(weights.version):
                await self._send(server, weights)
            return True

    async def _send(self, server: VllmServer, weights: PublishedWeights) -> None:
        """Raises ServerRefusedError, aiohttp.ClientError or TimeoutError; it can be asked again then."""
        await self._ask(server, "/pause?mode=keep")
        await self._load(server, weights)
        await self._ask(server, "/update_weight_version", {"new_version": str(weights.version)})
        # What the old weights computed of prompts is theirs: nothing but this forgets it.
        reset = await self._ask(server, "/reset_prefix_cache?reset_running_requests=true")
        if not reset["success"]:
            raise ServerRefusedError(f"{server} did not reset its prefix cache", 503)
        await self._ask(server, "/resume")

    async def _version(self, server: VllmServer) -> str:
        """Label of its weights; answered between two steps of the model, so that a model that hangs shows."""
        answer = await server.ask("GET", "/weight_info", self._step_timeout_s)
        return str(answer["weight_version"])

    async def _load(self, server: VllmServer, weights: PublishedWeights) -> None:
        if self.form == "adapter":
            body: Any = {"lora_name": ADAPTER, "lora_path": str(weights.folder), "load_inplace": True}
            await self._ask(server, "/v1/load_lora_adapter", body, self._load_timeout_s)
        elif self._source is not None:
            await self._ask(server, "/start_weight_update")
            body = {"update_info": self._source.update(weights)}
            await self._ask(server, "/update_weights", body, self._load_timeout_s)
            await self._ask(server, "/finish_weight_update", {})
        else:
            method, folder = server.reload
            body = {"method": method, "kwargs": {folder: str(weights.folder)}}
            await self._ask(server, "/collective_rpc", body, self._load_timeout_s)

    async def _ask(self, server: VllmServer, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        return await server.ask("POST", path, timeout_s or self._step_timeout_s, {} if body is None else body)
