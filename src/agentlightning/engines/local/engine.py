"""LocalEngine: a sampler and a learner on this machine, each in a process of its own.

The trainer drives it through the Engine protocol. It starts the children, hands them their sockets, moves weights between
them through shared memory, and restarts a sampler that died; it imports no torch and computes nothing itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import secrets
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import aiohttp

from agentlightning import errors
from agentlightning.children import listen, stop_child
from agentlightning.disk import make_private_folder
from agentlightning.engines.base import DEFAULT_POLICY, Endpoints, ForwardingEngine, together
from agentlightning.engines.local.models import reads_images
from agentlightning.engines.local.options import (
    SETTINGS,
    WEIGHTS_KEY,
    LearnerOptions,
    SamplerOptions,
    learner_options,
    sampler_options,
    support,
)
from agentlightning.engines.models import find_model
from agentlightning.engines.setup import EngineSetup
from agentlightning.engines.support import Support
from agentlightning.errors import AgentLightningError, EngineError, LearnerLostError, MissingExtraError, ModelError
from agentlightning.watchdog import Watchdog

MODULES = {"sampler": "sampler", "learner": "learner_process"}
WATCH_S = 0.1
MAX_QUICK_RESTARTS = 5
"""A sampler that dies this often within a minute is not restarted again: the fault is not a passing one."""
MAX_KILLED_STARTS = 3
"""A child that a signal ends before it is ready is started again, this often."""

log = logging.getLogger(__name__)


class LocalEngine(ForwardingEngine):
    """One policy, sampled and trained on this machine.

    model is a transformers folder or hub name; logs go to work_dir/logs. `start` must be called on a thread that lives as
    long as the engine: on Linux children end with the thread that started them.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        work_dir: str | Path,
        sampler: SamplerOptions | None = None,
        learner: LearnerOptions | None = None,
        watchdog: Watchdog | None = None,
        withhold: Iterable[str] = (),
    ) -> None:
        """withhold: variables of the environment that sampler and learner do not inherit."""
        self._withhold = set(withhold)
        self._model = model
        self._watchdog = watchdog or Watchdog()
        self._start_timeout_s = self._watchdog.limits.start_timeout_s
        self._work_dir = Path(work_dir).resolve()
        self._sampler_options = sampler or SamplerOptions()
        self._learner_options = learner or LearnerOptions()
        self._device = ""
        self._folder = Path()
        self._listener: socket.socket | None = None
        self._sampler: subprocess.Popen[bytes] | None = None
        self._learner: _LearnerProcess | None = None
        self._http: aiohttp.ClientSession | None = None
        self._watch: asyncio.Task[None] | None = None
        self._published: tuple[Path, str] | None = None
        self._publishing = asyncio.Lock()
        self._weights_key = secrets.token_urlsafe(32)
        """Opens the sampler's route for weights: everybody on this machine can reach its port."""
        self._weights_folder = Path()
        """Folder of published weights until the sampler has newer ones; removed by `close`."""

    @classmethod
    def from_setup(cls, setup: EngineSetup) -> Self:
        """The engine of `engine.name = "local"`. ConfigError, or MissingExtraError where a child would lack a package."""
        setup.expect_only(*SETTINGS)
        engine = setup.config
        for package, extra, needed in (
            ("torch", "train", True),
            ("peft", "lora", engine.lora is not None),
            ("bitsandbytes", "adamw8bit", engine.optimizer == "adamw_8bit"),
        ):
            if needed and importlib.util.find_spec(package) is None:
                raise MissingExtraError(package, extra)
        return cls(
            setup.model,
            work_dir=setup.work_dir,
            sampler=sampler_options(setup),
            learner=learner_options(setup),
            watchdog=setup.watchdog,
            withhold=setup.withhold,
        )

    @property
    def device(self) -> str:
        return self._device

    @property
    def support(self) -> Support:
        """Of the model, once started: whether it has sight is in its folder."""
        found = support(self._learner_options)
        return replace(found, images=found.images and reads_images(self._folder)) if self._listener else found

    def pids(self) -> dict[str, int]:
        children = {"sampler": self._sampler, "learner": self._learner.child if self._learner else None}
        return {name: child.pid for name, child in children.items() if child is not None}

    async def start(self) -> dict[str, Endpoints]:
        self._folder = find_model(self._model).resolve()
        make_private_folder(self._work_dir)
        (self._work_dir / "logs").mkdir(exist_ok=True)
        for left in weights_folders(self._work_dir):  # by a killed run
            shutil.rmtree(left, ignore_errors=True)
        shared, prefix = weights_place(self._work_dir)
        self._weights_folder = Path(tempfile.mkdtemp(prefix=prefix, dir=shared))
        self._listener = listen("127.0.0.1", 0)
        self._http = aiohttp.ClientSession()
        try:
            self._sampler = self._start_sampler()
            self._learner = self._start_learner()
            # Together: one that goes on waiting takes the end of its child for a mishap and starts another.
            await together([self._sampler_ready(), self._learner_ready()])
        except BaseException:
            await self.close()
            raise
        self._watch = asyncio.create_task(self._keep_sampler())
        return {DEFAULT_POLICY: Endpoints(urls=[self._url])}

    async def watch(self) -> None:
        assert self._watch is not None
        await asyncio.shield(self._watch)  # a watch that is no longer needed is cancelled, the next one watches on

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineError):  # whoever watched was told
                await self._watch
            self._watch = None
        children = [self._sampler, self._learner.child if self._learner else None]
        await asyncio.gather(*(asyncio.to_thread(stop_child, child) for child in children if child is not None))
        if self._learner is not None:
            self._learner.pipe.close()
        if self._http is not None:
            await self._http.close()
        if self._listener is not None:
            self._listener.close()
        self._sampler = self._learner = self._http = self._listener = None
        if self._weights_folder != Path():
            shutil.rmtree(self._weights_folder, ignore_errors=True)

    async def restart_learner(self) -> None:
        if self._learner is not None:
            await asyncio.to_thread(stop_child, self._learner.child)
            self._learner.pipe.close()
        self._learner = self._start_learner()
        await self._learner_ready()

    async def publish(self, version: int, policy: str = DEFAULT_POLICY) -> None:
        async with self._publishing:
            folder = self._weights_folder / f"v{version}"
            await self._operate(policy, "export", str(folder))
            old = self._published
            # From here on a restarted sampler starts with these weights, so a death in the middle loses nothing.
            self._published = folder, str(version)
            await self._reload(folder, str(version))
            if old is not None and old[0] != folder:
                shutil.rmtree(old[0], ignore_errors=True)

    @property
    def _url(self) -> str:
        assert self._listener is not None
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _log_file(self, name: str) -> Path:
        return self._work_dir / "logs" / f"{name}.log"

    def _start_child(
        self,
        name: str,
        descriptor: int,
        options: SamplerOptions | LearnerOptions,
        *more: str,
        secrets: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        arguments = ["--model", str(self._folder), "--fd", str(descriptor), "--options", json.dumps(asdict(options))]
        limits = self._watchdog.limits
        return self._watchdog.start(
            name,
            [f"agentlightning.engines.local.{MODULES[name]}", *arguments, *more],
            stall_timeout_s=max(limits.stall_timeout_s, limits.start_timeout_s),  # loading the model makes no progress
            secrets=secrets,
            withhold=self._withhold,
            pass_fds=[descriptor],
            env=_thread_bound(options.threads),
            log=self._log_file(name),
        )

    def _start_sampler(self) -> subprocess.Popen[bytes]:
        assert self._listener is not None
        more = ["--weights-folder", str(self._weights_folder)]
        if self._published is not None:
            more += ["--weights", str(self._published[0]), "--weight-version", self._published[1]]
        key = {WEIGHTS_KEY: self._weights_key}
        return self._start_child("sampler", self._listener.fileno(), self._sampler_options, *more, secrets=key)

    def _start_learner(self) -> _LearnerProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            limits = json.dumps(asdict(self._watchdog.limits))
            child = self._start_child("learner", theirs.fileno(), self._learner_options, "--limits", limits)
        return _LearnerProcess(child, Connection(ours.detach()))

    async def _sampler_ready(self) -> None:
        """The socket is ours and listens already, so the first answer comes when the sampler serves."""
        assert self._http is not None
        assert self._sampler is not None
        deadline = time.monotonic() + self._start_timeout_s
        killed = 0
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._http.get(f"{self._url}/health", timeout=aiohttp.ClientTimeout(0.5)) as answer:
                    if answer.status == 200:
                        return
            code = self._sampler.poll()
            if code is not None:
                killed += 1
                if code >= 0 or killed > MAX_KILLED_STARTS:
                    raise self._ended_early("sampler", code)
                stop_child(self._sampler)
                self._sampler = self._start_sampler()
                deadline = time.monotonic() + self._start_timeout_s
            if time.monotonic() > deadline:
                raise self._late("sampler")

    async def _learner_ready(self) -> None:
        for killed in range(MAX_KILLED_STARTS + 1):
            assert self._learner is not None
            learner = self._learner
            try:
                self._device = await asyncio.wait_for(asyncio.to_thread(learner.receive), self._start_timeout_s)
                return
            except TimeoutError as late:
                # Its end of the pipe closes with it, which ends the thread that waits.
                learner.child.kill()
                raise self._late("learner") from late
            except _PipeEndedError as ended:
                code = await asyncio.to_thread(learner.child.wait)
                if code >= 0 or killed == MAX_KILLED_STARTS:
                    raise self._ended_early("learner", code) from ended
                stop_child(learner.child)
                learner.pipe.close()
                self._learner = self._start_learner()

    def _late(self, name: str) -> EngineError:
        return EngineError(
            f"the {name} is not ready after {self._start_timeout_s:g} s; on a busy machine raise trainer.start_timeout_s, "
            f"else see why: {self._tail(name)}"
        )

    def _ended_early(self, name: str, code: int) -> AgentLightningError:
        if code == ModelError.exit_code:
            lines = self._log_file(name).read_text(errors="replace").strip().splitlines()
            return ModelError(lines[-1] if lines else f"the {name} refused the model {self._folder}")
        return EngineError(f"the {name} ended with code {code} before it was ready; {self._tail(name)}")

    def _tail(self, name: str) -> str:
        path = self._log_file(name)
        lines = path.read_text(errors="replace").strip().splitlines()[-5:] if path.is_file() else []
        return f"its log {path} ends: {' | '.join(lines)}" if lines else f"its log {path} is empty"

    async def _operate(self, policy: str, operation: str, *arguments: Any) -> Any:
        if policy != DEFAULT_POLICY:
            raise EngineError(f"the local engine has one policy, {DEFAULT_POLICY!r}; {policy!r} is not known")
        if self._learner is None:
            raise EngineError("the engine is not started")
        try:
            return await asyncio.to_thread(self._learner.call, operation, *arguments)
        except _PipeEndedError as ended:
            raise LearnerLostError(
                f"the learner ended during {operation}; resume from the last checkpoint ({self._tail('learner')})"
            ) from ended

    async def _reload(self, folder: Path, version: str) -> None:
        """Tell the sampler; where it dies meanwhile, its successor starts with the weights and agrees.

        One that hangs is killed by the watchdog; what it may take in all is that and the start of its successor.
        """
        assert self._http is not None
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder), "weight_version": version}}
        limits = self._watchdog.limits
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
                if time.monotonic() > deadline or self._watch is None or self._watch.done():
                    raise EngineError(
                        f"the sampler did not take weights version {version}; {self._tail('sampler')}"
                    ) from cause
                await asyncio.sleep(WATCH_S)

    async def _keep_sampler(self) -> None:
        """Start a sampler that died again, on the same port, with the weights that were published last."""
        deaths: list[float] = []
        while True:
            await asyncio.sleep(WATCH_S)
            assert self._sampler is not None
            if self._sampler.poll() is None:
                continue
            deaths = [at for at in deaths if at > time.monotonic() - 60] + [time.monotonic()]
            if len(deaths) > MAX_QUICK_RESTARTS:
                raise EngineError(f"the sampler ended {len(deaths)} times within a minute; {self._tail('sampler')}")
            log.warning("the sampler ended with code %s; starting it again", self._sampler.returncode)
            stop_child(self._sampler)
            self._sampler = self._start_sampler()


class _PipeEndedError(Exception):
    """The learner's end of the pipe closed."""


class _LearnerProcess:
    """The learner's end of the pipe: one method call at a time, whole, even where the caller stops waiting."""

    def __init__(self, child: subprocess.Popen[bytes], pipe: Connection) -> None:
        self.child = child
        self.pipe = pipe
        self._one = threading.Lock()

    def call(self, method: str, *arguments: Any) -> Any:
        with self._one:
            try:
                self.pipe.send((method, arguments))
            except OSError as cause:
                raise _PipeEndedError from cause
            return self.receive()

    def receive(self) -> Any:
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError) as cause:
            raise _PipeEndedError from cause
        if answer[0] == "ok":
            return answer[1]
        kind = getattr(errors, answer[1], EngineError)
        raise kind(answer[2])


def weights_folders(work_dir: Path) -> list[Path]:
    """The folders of published weights of engines that worked in this folder: no links, and nobody else's."""
    shared, prefix = weights_place(work_dir)
    found = []
    for path in shared.glob(f"{prefix}*"):
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            found.append(path)
    return found


def weights_place(work_dir: Path) -> tuple[Path, str]:
    """Returns the folder in which weights are published, and how the name of theirs begins: shared memory, where there is
    any, is everybody's; named after the run's folder, what a killed run left there is found."""
    name = hashlib.sha256(str(work_dir.resolve()).encode()).hexdigest()[:16]
    shared = Path("/dev/shm")
    return (shared if shared.is_dir() else work_dir), f"agentlightning-{name}-"


def _thread_bound(threads: int | None) -> dict[str, str]:
    """OpenMP threads that wait for work must sleep: the machine's other core belongs to somebody else."""
    bound = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {**bound, "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
