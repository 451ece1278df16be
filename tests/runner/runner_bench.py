"""A real server for the runner's tests, and workers of it: in this process and in processes of their own."""

import asyncio
import contextlib
import inspect
import os
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uuid_utils

import build
from agentlightning.records import FINAL_STATES, JSON, Attempt, Call, NewRollout, RetryPolicy, Rollout
from agentlightning.runner.agent import LLM
from agentlightning.runner.air import AttemptAir
from agentlightning.runner.execution import Execution
from agentlightning.runner.function import FunctionRunner
from agentlightning.runner.scoring import FunctionScorer, Scorer
from agentlightning.runner.worker import Worker, WorkerOptions
from agentlightning.runtime.children import listen, secrets_line, stop_child
from agentlightning.store.base import RolloutQuery
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.templates import TemplateReader
from agentlightning.tracing.air import Air

KEY = "key-of-the-tests"
SERVER_PYTHON = os.environ.get("AGL_TEST_SERVER_PYTHON", sys.executable)
"""The server's Python: `make test-pythons` has workers of another one, in an environment that could not run a server."""
LEASE_S = 3.0
"""Lease of workers whose end a test waits for: soon over, and not so soon that a busy machine ends it."""
SHORT_LEASE = ("--lease-s", str(LEASE_S), "--heartbeat-s", "0.3")
DEADLINE_S = 90.0
"""Matters only where a test fails: the slowest machine has its time."""


class Server:
    """A server process on a port that it keeps when it is started again."""

    def __init__(self, store: str) -> None:
        self._store = store
        self._listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.start()

    def start(self) -> None:
        descriptor, module = self._listener.fileno(), ("-m", "agentlightning.gateway")
        self.process = subprocess.Popen(
            [SERVER_PYTHON, *module, "--store", self._store, "--fd", str(descriptor), "--lease-s", str(2 * LEASE_S)],
            stdin=subprocess.PIPE,
            pass_fds=[descriptor],
            start_new_session=True,
        )
        assert self.process.stdin is not None
        os.write(self.process.stdin.fileno(), secrets_line({"AGL_SERVER_KEY": KEY}))

    def kill(self) -> None:
        self.process.kill()
        stop_child(self.process)

    def close(self) -> None:
        stop_child(self.process)
        self._listener.close()


@dataclass
class Bench:
    """One run on the server, and what tests do with it."""

    server: Server
    store: LightningStoreClient
    run_id: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    async def enqueue(self, *tasks: JSON, **retry: Any) -> list[Rollout]:
        return await self.store.enqueue(
            [
                NewRollout(run_id=self.run_id, task=task, group_id=str(uuid.uuid4()), retry=RetryPolicy(**retry))
                for task in tasks
            ]
        )

    async def settled(self, rollouts: list[Rollout]) -> list[Rollout]:
        """The rollouts once all of them are finished."""
        wanted = {rollout.id for rollout in rollouts}
        deadline = time.monotonic() + DEADLINE_S
        while True:
            finished = await self.store.wait(self.run_id, at_least=len(wanted), timeout_s=1.0)
            if wanted <= {rollout.id for rollout in finished}:
                found = {rollout.id: rollout for rollout in await self.store.rollouts(RolloutQuery(ids=list(wanted)))}
                assert all(rollout.state in FINAL_STATES for rollout in found.values())
                return [found[rollout.id] for rollout in rollouts]
            assert time.monotonic() < deadline, "the rollouts did not finish"

    async def solved(self, agent: Callable[..., Any], *tasks: JSON, **options: Any) -> list[Rollout]:
        """What a worker on this event loop made of tasks, one attempt each; `options` are `worker`'s."""
        queued = await self.enqueue(*tasks, max_attempts=1)
        async with self.worker(agent, **options):
            return await self.settled(queued)

    async def attempts(self, rollout: Rollout) -> list[Attempt]:
        return await self.store.attempts([rollout.id])

    async def running(self, count: int) -> None:
        """Wait until so many rollouts run."""
        deadline = time.monotonic() + DEADLINE_S
        while (await self.store.count(self.run_id)).get(("train", "running"), 0) < count:
            assert time.monotonic() < deadline, "it did not come to that"
            await asyncio.sleep(0.02)

    def worker_process(self, *options: str, env: dict[str, str] | None = None, **popen: Any) -> subprocess.Popen[bytes]:
        """A worker process."""
        arguments = ["--server", self.server.url, "--run", self.run_id, *options]
        process = subprocess.Popen(
            [sys.executable, "-m", "agentlightning.runner", *arguments],
            env={**os.environ, "AGL_SERVER_KEY": KEY, **(env or {})},
            **popen,
        )
        self.processes.append(process)
        return process

    @contextlib.asynccontextmanager
    async def worker(
        self,
        agent: Callable[..., Any],
        *,
        reward: Callable[..., Any] | Scorer | None = None,
        air: Air | None = None,
        private: Sequence[str] = (),
        concurrency: int = 8,
        abandon_s: float = 30.0,
        **options: Any,
    ) -> AsyncIterator[Worker]:
        """A worker on this event loop."""
        with ThreadPoolExecutor(concurrency) as threads:
            execution = Execution(
                store=self.store,
                server_url=self.server.url,
                model="policy",
                runner=FunctionRunner(agent, threads, scored=reward is not None),
                reward=FunctionScorer(reward, threads) if inspect.isroutine(reward) else reward,
                abandon_s=abandon_s,
                templates=TemplateReader(self.store),
                air=None if air is None else AttemptAir(air, self.store, threads),
                private=private,
            )
            worker = Worker(
                execution,
                WorkerOptions(
                    run_id=self.run_id,
                    worker_id=f"worker-{uuid.uuid4()}",
                    concurrency=concurrency,
                    **{"drain_timeout_s": 0.5, **options},
                ),
                open_store=lambda: LightningStoreClient(self.server.url, KEY),
                boots=lambda: self.store.boots,
            )
            running = asyncio.create_task(worker.run())
            try:
                yield worker
            finally:
                worker.stop()
                await running

    def file(self, folder: Path, source: str) -> str:
        """The spec of an agent file with this source."""
        path = folder / "agent.py"
        path.write_text(source)
        return f"{path}:solve"

    def ended(self, process: subprocess.Popen[bytes]) -> int:
        """The exit code of a process that ends by itself."""
        return process.wait(DEADLINE_S)


def gone(pid: int) -> bool:
    """Whether a process has ended, or does so soon; a zombie that nobody reaps has ended."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


async def written(path: Path) -> str:
    """The text of a file once it ends in a newline."""
    deadline = time.monotonic() + DEADLINE_S
    while not (text := _text(path)).endswith("\n"):
        assert time.monotonic() < deadline, f"{path} was not written"
        await asyncio.sleep(0.01)
    return text


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def a_call(llm: LLM, content: str) -> Call:
    """A recorded call of the attempt that an LLM belongs to."""
    rollout_id, attempt = llm.anthropic_base_url.split("/")[-2:]
    place = {"run_id": "", "rollout_id": rollout_id, "attempt": int(attempt)}
    completion = {"role": "assistant", "content": content}
    fields = {"policy": "policy", "model": "policy", "sampling": llm.sampling, "messages": [], "completion": completion}
    return build.call(id=str(uuid_utils.uuid7()), **place, **fields)
