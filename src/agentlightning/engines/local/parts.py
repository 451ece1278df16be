"""The parts of an engine on this machine: SamplerProcess, which samples, LearnerProcess, and their Workplace.

LocalEngine composes them. A part starts its process, waits for it, and starts one that died again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import secrets
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import aiohttp

from agentlightning.engines.base import Endpoints, EngineSetup
from agentlightning.engines.pipe import ChildPipe, PipeEndedError
from agentlightning.engines.sampler_address import SAMPLING_KEY, SamplerAddress
from agentlightning.errors import AgentLightningError, EngineError, LearnerLostError, ModelError
from agentlightning.runtime.children import stop_child

WEIGHTS_KEY = "weights_key"
"""Name of the sampler's secret, which opens its route for weights."""
WATCH_S = 0.1
"""Seconds between looks at whether a child still runs."""
MAX_KILLED_STARTS = 3
"""A child that a signal ends before it is ready is started again, this often."""
MAX_QUICK_RESTARTS = 5
"""A sampler that dies this often within a minute is not restarted again: the fault is not a passing one."""
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
"""OpenMP threads that wait for work must sleep: the machine's other cores belong to others."""

WeightsForm = Literal["weights", "sealed"]
"""Form in which samplers get weights: a transformers folder; one with its manifest, sealed."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """A folder that is whole and does not change, and the version that its weights serve under."""

    folder: Path
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """Folders and limits that both parts are started with, and how they speak of their processes."""

    setup: EngineSetup
    model: Path
    weights_folder: Path
    address: SamplerAddress = field(default_factory=SamplerAddress)

    @property
    def start_timeout_s(self) -> float:
        return self.setup.watchdog.limits.start_timeout_s

    @property
    def load_timeout_s(self) -> float:
        """For what makes no progress while it loads a model."""
        return max(self.setup.watchdog.limits.stall_timeout_s, self.start_timeout_s)

    def log_file(self, name: str) -> Path:
        return self.setup.work_dir / "logs" / f"{name}.log"

    def start_child(
        self, name: str, descriptor: int, *more: str, secrets: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start the process of a part of the local engine, with its end of a socket."""
        arguments = ["--model", str(self.model), "--fd", str(descriptor), "--setup", self.setup.to_json()]
        return self.setup.watchdog.start(
            name,
            [f"agentlightning.engines.local.{name}", *arguments, *more],
            stall_timeout_s=self.load_timeout_s,
            secrets=secrets,
            withhold=self.setup.withhold,
            pass_fds=[descriptor],
            env=ENVIRONMENT,
            log=self.log_file(name),
        )

    def late(self, name: str) -> EngineError:
        return EngineError(
            f"the {name} is not ready after {self.start_timeout_s:g} s; on a busy machine raise trainer.start_timeout_s, "
            f"else see why: {self.tail(name)}"
        )

    def ended_early(self, name: str, code: int) -> AgentLightningError:
        if code == ModelError.exit_code:
            lines = self.log_file(name).read_text(errors="replace").strip().splitlines()
            return ModelError(lines[-1] if lines else f"the {name} refused the model {self.model}")
        return EngineError(f"the {name} ended with code {code} before it was ready; {self.tail(name)}")

    def tail(self, name: str) -> str:
        path = self.log_file(name)
        lines = path.read_text(errors="replace").strip().splitlines()[-5:] if path.is_file() else []
        return f"its log {path} ends: {' | '.join(lines)}" if lines else f"its log {path} is empty"


class SamplerProcess:
    """The sampler part that is one process of ours (sampler.py), on a socket that outlives it. `start` and `ready` come
    first, then `watch` runs beside everything else. VllmServers has the same methods."""

    form: WeightsForm = "weights"
    images = False
    """It reads images; known once ready."""
    device = ""
    """Torch's name of its device; known once ready."""

    def __init__(self, place: Workplace) -> None:
        self._place = place
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
        """Known once ready; a server that is started again has its old URL."""
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
        self._child = self._place.start_child("sampler", self._listener.fileno(), *more, secrets=keys)

    async def ready(self) -> None:
        """The socket is ours and listens already, so the first answer comes when the sampler serves."""
        assert self._http is not None
        deadline = time.monotonic() + self._place.start_timeout_s
        killed = 0
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._http.get(f"{self._url}/health", timeout=aiohttp.ClientTimeout(0.5)) as answer:
                    if answer.status == 200:
                        told = await answer.json()
                        self.images, self.device = told["images"], told["device"]
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
        """Samples with these weights from now on, also after a restart; the folder stays until the next call has returned.

        EngineError if it does not take them in the time of a hang and the start of its successor.
        """
        assert self._http is not None
        # From here on a restarted sampler starts with these weights, so a death in the middle loses nothing.
        self._published = weights
        version = weights.version
        kwargs = {"weights_path": str(weights.folder), "weight_version": str(version)}
        body = {"method": "reload_weights", "kwargs": kwargs}
        limits = self._place.setup.watchdog.limits
        deadline = time.monotonic() + self._place.load_timeout_s + limits.hang_timeout_s + limits.start_timeout_s
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
        """Start a sampler that died again, on the same port, with the weights that were published last; never returns."""
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


class LearnerProcess:
    """The learner, a process of ours (learner.py), driven over a socket pair, one operation at a time."""

    def __init__(self, place: Workplace) -> None:
        self._place = place
        self.device = ""
        """Empty before it is ready."""
        self._learner: ChildPipe | None = None

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            limits = json.dumps(asdict(self._place.setup.watchdog.limits))
            child = self._place.start_child("learner", theirs.fileno(), "--limits", limits)
        self._learner = ChildPipe(child, Connection(ours.detach()))

    async def ready(self) -> None:
        for killed in range(MAX_KILLED_STARTS + 1):
            assert self._learner is not None
            learner = self._learner
            try:
                self.device = await asyncio.wait_for(asyncio.to_thread(learner.receive), self._place.start_timeout_s)
                return
            except TimeoutError as late:
                # Its end of the pipe closes with it, which ends the thread that waits.
                learner.child.kill()
                raise self._place.late("learner") from late
            except PipeEndedError as ended:
                code = await asyncio.to_thread(learner.child.wait)
                if code >= 0 or killed == MAX_KILLED_STARTS:
                    raise self._place.ended_early("learner", code) from ended
                stop_child(learner.child)
                learner.close()
                self.start()

    async def operate(self, operation: str, *arguments: Any) -> Any:
        """Carry out an operation of the learner. Raises its errors, and LearnerLostError if it ended."""
        assert self._learner is not None
        try:
            return await asyncio.to_thread(self._learner.call, operation, *arguments)
        except PipeEndedError as ended:
            raise LearnerLostError(
                f"the learner ended during {operation}; resume from the last checkpoint ({self._place.tail('learner')})"
            ) from ended

    async def restart(self) -> None:
        await self._stop()
        self.start()
        await self.ready()

    def pids(self) -> dict[str, int]:
        return {} if self._learner is None else {"learner": self._learner.child.pid}

    async def close(self) -> None:
        await self._stop()
        self._learner = None

    async def _stop(self) -> None:
        if self._learner is not None:
            await asyncio.to_thread(stop_child, self._learner.child)
            self._learner.close()


def make_weights_folder(work_dir: Path, *, in_work_dir: bool = False) -> Path:
    """Makes an empty one that only this user can open; those that killed runs left there are removed."""
    left = [*weights_folders(work_dir), work_dir / "weights"]
    for folder in left:
        shutil.rmtree(folder, ignore_errors=True)
    if in_work_dir:
        left[-1].mkdir(mode=0o700)
        return left[-1]
    shared, prefix = weights_place(work_dir)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=shared))


def weights_folders(work_dir: Path) -> list[Path]:
    """Folders of published weights of engines that worked in this folder: no links, and nobody else's."""
    shared, prefix = weights_place(work_dir)
    found = []
    for path in shared.glob(f"{prefix}*"):
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            found.append(path)
    return found


def weights_place(work_dir: Path) -> tuple[Path, str]:
    """Returns the folder that weights are published in (shared memory, if there is any), and the prefix of this run's names,
    by which the files of a killed run are found."""
    name = hashlib.sha256(str(work_dir.resolve()).encode()).hexdigest()[:16]
    shared = Path("/dev/shm")
    return (shared if shared.is_dir() else work_dir), f"agentlightning-{name}-"
