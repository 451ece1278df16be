"""VllmServers: the sampler part of vLLM servers that sample as equals, each with all weights.

LocalEngine drives it. A server that dies or hangs is killed with its whole group (vLLM's workers do not always end with it)
and started again on its old socket, so that calls wait for its successor; it gets the weights that were published last
before it samples, and so does one that others run if it lost them. Generation pauses between two steps while weights
change, so that every token is of the version that it is stamped with; requests keep their tokens, which the new weights
read again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import aiohttp
import orjson
from aiohttp import web

from agentlightning.config.engine import EngineConfig, LocalSampler, VllmSampler, VllmServerSampler
from agentlightning.engines.base import Endpoints, together
from agentlightning.engines.folders import MANIFEST, damage
from agentlightning.engines.local.parts import MAX_KILLED_STARTS, PublishedWeights, WeightsForm, Workplace
from agentlightning.engines.sampler_address import SAMPLING_KEY
from agentlightning.errors import ConfigError, EngineError
from agentlightning.runtime.children import listen, start_child

VLLM_SIDE = Path(__file__).parent / "vllm_side"
"""Folder of the package that runs inside vLLM's servers."""
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes by which weights change
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",  # its 5 s end connections just as gateways use them again
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
HEALTH_TIMEOUT_S = 2.0
GRACE_S = 10.0
"""Seconds that a server may take to end."""
POLICY = "policy"
"""Name under which such servers know the model."""
PROBE_S = 1.0
"""Seconds between looks at a server."""
PROBES = 2
"""Probes in a row that are not answered before a server counts as hung: if this process stood still for a moment, the first
one is late although its answer is there."""
MAX_FAILURES = 3
"""Ends or refusals of a server in a row, without one publication between them, after which another start does not help."""

Logprobs = Literal["processed", "raw"]

log = logging.getLogger(__name__)


class ServerRefusedError(EngineError):
    """The server answered, with an error."""


class ServerEndedError(Exception):
    """The server's process ended, with this code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class VllmServer:
    """A server that others run."""

    reload = ("reload_weights", "weights_path")
    """Method of its workers that reads a folder of weights, and the name of its argument."""
    ended: int | None = None
    """Exit code of its process, if that is ours and ended."""
    pid: int | None = None

    def __init__(self, name: str, url: str, http: aiohttp.ClientSession, headers: Mapping[str, str]) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self.publishing = asyncio.Lock()
        """Held while its weights change: it then answers late, and that is no sign of a hang."""
        self._http = http
        self.up = False
        """True from its first answer until it is killed or started again."""
        self._headers = dict(headers)
        self._complaint = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.url})"

    async def ask(self, method: str, path: str, timeout_s: float, body: Any = None) -> Any:
        """The JSON of its answer, None if that is none. Raises ServerRefusedError, aiohttp.ClientError, TimeoutError."""
        timeout = aiohttp.ClientTimeout(timeout_s)
        url = self.url + path
        async with self._http.request(method, url, json=body, headers=self._headers, timeout=timeout) as answer:
            if answer.status != 200:
                text = (await answer.text())[:500]
                raise ServerRefusedError(f"{self} answered {path} with {answer.status}: {text}")
            return await answer.json() if answer.content_type == "application/json" else None

    async def serving(self, timeout_s: float) -> None:
        """Wait until it answers. Raises TimeoutError, and ServerEndedError if its process ends first."""
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

    def __init__(self, number: int, http: aiohttp.ClientSession, place: Workplace, gpus: str | None = None) -> None:
        self._listener = place.address.listen(number)
        self._key = secrets.token_urlsafe(32)
        headers = {"Authorization": f"Bearer {self._key}"}
        super().__init__(f"sampler {number}", place.address.url(self._listener), http, headers)
        self._place = place
        self._gpus = gpus
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def ended(self) -> int | None:  # type: ignore[override]
        """It is not reaped here: as long as it is not, its group's id is nobody else's."""
        if self._child is None or self._child.returncode is not None:
            return None if self._child is None else self._child.returncode
        found = os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    @property
    def pid(self) -> int | None:  # type: ignore[override]
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
        config = self._place.setup.config
        assert isinstance(config.sampler, VllmSampler)
        paths = [str(VLLM_SIDE), *filter(None, [os.environ.get("PYTHONPATH")])]
        devices = {} if self._gpus is None else {"CUDA_VISIBLE_DEVICES": self._gpus}
        descriptor = self._listener.fileno()
        address = ["--host", self._place.address.host, "--port", str(self._listener.getsockname()[1])]
        arguments = server_arguments(config, config.sampler, self._place.model)
        self._child = start_child(
            ["agentlightning_vllm", "--fd", str(descriptor), *address, *arguments],
            python=config.sampler.python,
            secrets={"weights_key": self._key, SAMPLING_KEY: self._place.address.key},
            withhold=self._place.setup.withhold,
            pass_fds=[descriptor],
            env={**ENVIRONMENT, **devices, "PYTHONPATH": os.pathsep.join(paths)},
            log=self._place.log_file(self._file),
        )

    def kill(self, reason: str) -> None:
        """So that `watch` finds it ended. By SIGKILL: SIGTERM stays pending in a process that was stopped."""
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


def check_settings(sampler: VllmSampler | VllmServerSampler) -> None:
    """ConfigError if servers cannot be started."""
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
    return [*arguments, "--worker-extension-cls", "agentlightning_vllm.worker.WeightsWorker", *sampler.arguments]


class WeightsServer:
    """Gives the safetensors files of the weights that were published last, and nothing else, to holders of the key; for
    servers that share no path with this machine. agentlightning_vllm.fetch reads them."""

    def __init__(self, host: str) -> None:
        """host: by which servers know this machine."""
        self._host = host
        self._key = secrets.token_urlsafe(32)
        self._url = ""
        self._weights: PublishedWeights | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listens on a free port. Raises OSError where the host is no address of this machine."""
        app = web.Application()
        app.router.add_get("/{version}/{file}", self._give)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        listener = listen(self._host.strip("[]"), 0)
        await web.SockSite(self._runner, listener).start()
        self._url = f"http://{self._host}:{listener.getsockname()[1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None

    def put(self, weights: PublishedWeights) -> None:
        self._weights = weights

    def update(self, weights: PublishedWeights) -> dict[str, Any]:
        """The update_info by which a server fetches these weights."""
        files = orjson.loads((weights.folder / MANIFEST).read_bytes())["files"]
        hashes = {name: file["sha256"] for name, file in files.items() if Path(name).suffix == ".safetensors"}
        return {"url": f"{self._url}/{weights.version}", "key": self._key, "files": hashes}

    async def _give(self, http: web.Request) -> web.StreamResponse:
        given = http.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {self._key}".encode()):
            raise web.HTTPUnauthorized
        weights, file = self._weights, http.match_info["file"]
        if weights is None or http.match_info["version"] != str(weights.version) or Path(file).suffix != ".safetensors":
            raise web.HTTPNotFound
        return web.FileResponse(weights.folder / Path(file).name)


class VllmServers:
    form: WeightsForm = "sealed"
    images = False

    def __init__(self, place: Workplace) -> None:
        config = place.setup.config
        assert not isinstance(config.sampler, LocalSampler)
        self._place = place
        self._settings = config.sampler
        self._servers: Sequence[VllmServer] = ()
        self._http: aiohttp.ClientSession | None = None
        self._published: PublishedWeights | None = None
        self._kept = True
        """False once nobody starts servers again."""
        weights = "" if isinstance(config.sampler, VllmSampler) else config.sampler.weights
        http = weights.startswith("http://")
        self._source = WeightsServer(weights.removeprefix("http://")) if http else None
        limits = place.setup.watchdog.limits
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
        http = self._http = aiohttp.ClientSession()
        if isinstance(self._settings, VllmServerSampler):
            headers = self._place.address.headers
            self._servers = [
                VllmServer(f"sampler {number}", url, http, headers) for number, url in enumerate(self._settings.urls)
            ]
        else:
            gpus = self._settings.gpus or [None]
            self._servers = [OwnServer(number, http, self._place, visible) for number, visible in enumerate(gpus)]
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
            served_model=model,
            logprobs=logprobs,
            key_env=self._place.address.key_env,
            seeded=False,  # a seed gives other tokens in other company, and on CPUs kills vLLM 0.32 where it pauses
        )

    async def publish(self, weights: PublishedWeights) -> None:
        if (lacks := await asyncio.to_thread(damage, weights.folder)) is not None:
            # Half of a model kills a vLLM server that reloads it.
            raise EngineError(
                f"weights version {weights.version} in {weights.folder} are not whole, and are not published: {lacks}"
            )
        if self._source is not None:
            self._source.put(weights)  # before any server pauses
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
            await self._source.close()
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
        return (POLICY, "processed") if isinstance(server, OwnServer) else await self._look_at(server)

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
                except (TimeoutError, ServerRefusedError) as failed:
                    cause = failed
                    failures += 1
                    late = isinstance(failed, TimeoutError)
                    server.kill(
                        "did not take weights in time" if late else "refused weights, and may have lost its own"
                    )
                except aiohttp.ClientError as away:
                    cause = cause or away  # a server that ends meanwhile says less than what it refused before
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
        """True once it answered and has the weights that were published last."""
        async with server.publishing:
            for probe in range(PROBES):
                try:  # answered between two steps of the model, so that a model that hangs shows
                    version = (await server.ask("GET", "/weight_info", self._step_timeout_s))["weight_version"]
                    break
                except TimeoutError:
                    if probe + 1 == PROBES:
                        raise
            weights = self._published
            if weights is not None and str(version) != str(weights.version):
                await self._send(server, weights)
            return True

    async def _send(self, server: VllmServer, weights: PublishedWeights) -> None:
        """Raises ServerRefusedError, aiohttp.ClientError or TimeoutError; safe to retry."""
        await self._ask(server, "/pause?mode=keep")
        if self._source is not None:
            await self._ask(server, "/start_weight_update")
            update = {"update_info": self._source.update(weights)}
            await self._ask(server, "/update_weights", update, self._load_timeout_s)
            await self._ask(server, "/finish_weight_update")
        else:
            method, folder = server.reload
            body = {"method": method, "kwargs": {folder: str(weights.folder)}}
            await self._ask(server, "/collective_rpc", body, self._load_timeout_s)
        await self._ask(server, "/update_weight_version", {"new_version": str(weights.version)})
        # What the old weights computed of prompts is theirs: nothing but this forgets it.
        reset = await self._ask(server, "/reset_prefix_cache?reset_running_requests=true")
        if not reset["success"]:
            raise ServerRefusedError(f"{server} did not reset its prefix cache")
        await self._ask(server, "/resume")

    async def _ask(self, server: VllmServer, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        return await server.ask("POST", path, timeout_s or self._step_timeout_s, body or {})
