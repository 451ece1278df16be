"""Doubles of what the training loop uses: agents that answer at random, an engine that remembers its updates, crashes.

`Crash` stands for kill -9: it is raised at the n-th call of a store or engine verb, before or after the verb took effect.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import build
from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.config.run import Config, parse_config
from agentlightning.gateway.attempts import gateway_span
from agentlightning.records import Claim, Finish, ImageSpan, Rollout, VersionSpan, WorkerStatus
from agentlightning.rendering.images import image_hash
from agentlightning.store.base import LightningStore
from agentlightning.store.gateway_events import REFUSED_CALLS
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.loop import RLLoop, TrainingLoop
from agentlightning.trainer.monitor.metric_logger import MetricLogger
from agentlightning.trainer.policies import TrainedPolicy
from agentlightning.trainer.progress import Silent
from agentlightning.trainer.scheduler import RolloutCollector
from agentlightning.training_types import Loss, TrainingSequence

STEPS, TASKS, GROUP = 3, 2, 2


class Crash(BaseException):
    """The process is gone."""


class Crashing:
    """Passes every verb on to what it wraps, and raises Crash around the n-th one."""

    def __init__(self, wrapped: Any, counter: "Countdown") -> None:
        self._wrapped = wrapped
        self._counter = counter

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._wrapped, name)

        async def counted(*arguments: Any, **options: Any) -> Any:
            self._counter.tick()
            result = await verb(*arguments, **options)
            self._counter.tick()
            return result

        return counted


EVERY = pytest.mark.parametrize("every", [23, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.long])])
"""Distance between the verbs at which a run is killed: some of them each time, each one in `make test-trainer`."""


class Countdown:
    def __init__(self, ticks: int, error: type[BaseException] = Crash) -> None:
        self.left = ticks
        self._error = error

    def tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self._error


class RememberingEngine:
    """An engine whose weights are the list of updates made so far, and of the rollouts that they were made of."""

    def __init__(self) -> None:
        self.updates: list[str] = []
        self.learned: list[str] = []
        self.pictures: list[bytes] = []
        self._pending = hashlib.sha256()
        self.served: list[int] = []

    async def start(self) -> list[str]:
        return ["http://engine"]

    async def close(self) -> None: ...

    async def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Loss, policy: str = "default"
    ) -> dict[str, float]:
        for row in sequences:
            self.learned.append(row.rollout_id)
            self.pictures += [image.data for image in row.images]
            self._pending.update(json.dumps([row.tokens, row.advantages, row.weights]).encode())
        return {"loss": 0.0, "tokens": 1.0}

    async def logprobs(self, sequences: Sequence[TrainingSequence], policy: str = "default") -> list[list[float]]:
        return [row.logprobs for row in sequences]

    async def optim_step(self, learning_rate: float, grad_clip: float, policy: str = "default") -> dict[str, float]:
        self.updates.append(f"{self._pending.hexdigest()[:12]} {learning_rate:.6f}")
        self._pending = hashlib.sha256()
        return {"grad_norm": 1.0}

    async def publish(self, version: int, policy: str = "default") -> None:
        self.served.append(version)

    async def save(self, path: Path, policy: str = "default") -> None:
        await asyncio.to_thread(write, path, [self.updates, self.learned])

    async def load(self, path: Path, policy: str = "default") -> None:
        self.updates, self.learned = json.loads(await asyncio.to_thread((path / "learner.pt").read_text))

    async def restart_learner(self) -> None:
        self.updates, self.learned, self._pending = [], [], hashlib.sha256()


def write(path: Path, updates: list[list[str]]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "learner.pt").write_text(json.dumps(updates))


def reward_of(claim: Claim) -> float:
    """What the agent earns depends on its task and place alone, so that two runs can be compared."""
    text = f"{claim.rollout.group_id} {claim.rollout.replica}"
    return float(hashlib.md5(text.encode()).digest()[0] % 2)


async def refuse(store: LightningStore, claim: Claim) -> None:
    """The gateway refuses a call, and the agent ends of it."""
    told = {"fields": "top_a", "count": 1}
    await store.append_spans([gateway_span(claim.rollout, claim.lease.attempt, REFUSED_CALLS, told)])
    await store.finish([Finish(lease=claim.lease, state="failed", error="refused")])


async def answer(
    store: LightningStore, claim: Claim, calls: int, reward: float, failed: bool = False, picture: bytes = b""
) -> None:
    rollout = claim.rollout
    images = {image_hash(picture): picture} if picture else {}
    if images:
        await store.put_files(rollout.run_id, rollout.id, images)
    task = hashlib.md5(rollout.group_id.encode()).digest()[0]
    served = await store.resources(rollout.run_id, "default")
    for number in range(calls if served else 0):  # nobody answers before a policy is published
        made = build.call(
            claim,
            f"{rollout.id}-{number}",
            suffix_ids=[1, task],
            sampled_ids=[3, 4 + rollout.replica],
            versions=[VersionSpan(version=served[0].version, start=0, end=2)],
            messages=[],
            completion={"role": "assistant", "content": "x"},
            replayed_id=replayed_id(rollout, number),
            images=[ImageSpan(hash=name, start=0, end=1) for name in images],
        )
        await store.append_calls([made])
    record = build.reward(claim, reward, f"reward-{rollout.id}")
    if failed:
        await store.finish([Finish(lease=claim.lease, state="failed", error="boom", exited=True)])
    else:
        await store.finish([Finish(lease=claim.lease, state="succeeded", rewards=(record,))])


def replayed_id(rollout: Rollout, number: int) -> str | None:
    """The call that a gateway would answer this one from."""
    fork = rollout.fork
    return None if fork is None or number >= fork.calls else f"{fork.rollout_id}-{number}"


class Noting(Silent):
    """Remembers what a run notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class Gate:
    """Agents of rollouts that `held` names wait until it is opened."""

    def __init__(self, held: Callable[[Rollout], bool] = lambda _: False) -> None:
        self.held = held
        self.opened = asyncio.Event()


WORKER = WorkerStatus(id="w", run_id="run", host="h", pid=1, running=0, seen_ns=0)


@asynccontextmanager
async def working(
    store: LightningStore, run: str, work: Callable[[Claim, asyncio.TaskGroup], Awaitable[None]]
) -> AsyncIterator[None]:
    """A worker that survives the trainer's crashes: does its `work` with each claim."""

    async def claim_for_ever() -> None:
        async with asyncio.TaskGroup() as waiting:
            while True:
                for claim in await store.claim(replace(WORKER, run_id=run), limit=8, wait_s=10):
                    await work(claim, waiting)

    task = asyncio.create_task(claim_for_ever())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def agents(
    store: LightningStore,
    calls: int = 1,
    run: str = "run",
    broken: bool = False,
    gate: Gate | None = None,
    reward_of: Callable[[Claim], float] = reward_of,
    refused: Callable[[Rollout], bool] = lambda _: False,
    picture: bytes = b"",
    forgets: Callable[[Rollout], bool] = lambda _: False,
) -> AbstractAsyncContextManager[None]:
    """`broken` agents always fail after their calls, those of `refused` rollouts because their first call is refused. Their
    calls show the `picture`, where there is one; forks that `forgets` names do something else than what they are to
    continue, so that nothing is replayed."""
    gate = gate or Gate()

    async def wait(claim: Claim) -> None:
        await gate.opened.wait()
        await answer(store, claim, calls, reward_of(claim))

    async def work(claim: Claim, waiting: asyncio.TaskGroup) -> None:
        if forgets(claim.rollout):
            claim = replace(claim, rollout=replace(claim.rollout, fork=None))
        if refused(claim.rollout):
            await refuse(store, claim)
        elif gate.held(claim.rollout):
            waiting.create_task(wait(claim))
        else:
            await answer(store, claim, calls, reward_of(claim), broken, picture)

    return working(store, run, work)


async def killed_and_resumed(
    store: LightningStore,
    every: int,
    make: Callable[[Any, Any, str], TrainingLoop],
    agents_of: Callable[[str], AbstractAsyncContextManager[None]] = lambda run: nullcontext(),
    engine: Callable[[], Any] = RememberingEngine,
) -> AsyncIterator[tuple[str, Any]]:
    """Kills one run after the other, each `every` verbs later than the one before, and resumes it to its last step. Yields
    its name and the engine that it ended with.

    make: the loop of a run over a store and an engine. agents_of: its agents, whom the crash leaves alone."""
    for ticks in count(1, every):
        run, countdown = f"run-{ticks}", Countdown(ticks)
        await store.create_run("test", {}, run)
        async with agents_of(run):
            try:
                await make(Crashing(store, countdown), Crashing(engine(), countdown), run).run(resume=False)
                break  # the run has fewer verbs than that: every point has been tried
            except Crash:
                pass
            resumed = engine()
            again = make(store, resumed, run)
            assert await again.run(resume=True) == again.config.trainer.steps, f"after a crash at verb {ticks}"
        yield run, resumed
    assert ticks > 40


def config(on_failure: str = "drop", **trainer: Any) -> Config:
    return parse_config(
        {
            "model": {"path": "m"},
            "agent": {"run": "a.py:f", "on_failure": on_failure},
            "data": {"train": "t", "val": "v"},
            "trainer": {"steps": STEPS, "tasks_per_step": TASKS, "learning_rate": 0.01, "checkpoint_every": 2}
            | trainer,
            "eval": {"every": 2},
        }
    )


def loop(
    store: Any,
    engine: Any,
    folder: Path,
    run: str = "run",
    val: Sequence[dict[str, int]] = ({"n": 100},),
    algorithm: LightningRL | None = None,
    **trainer: Any,
) -> RLLoop:
    run_folder = RunFolder(folder, run)
    settings = config(**trainer)
    run_folder.create(settings)
    trained = TrainedPolicy(
        config=settings, algorithm=algorithm or LightningRL(group_size=GROUP, minibatches=1), value={"model": "m"}
    )
    return RLLoop(
        config=settings,
        policies={"default": trained},
        run_id=run,
        folder=run_folder,
        store=store,
        engine=engine,
        collector=RolloutCollector(store, run),
        train=[{"n": number} for number in range(5)],
        val=val,
        progress=Silent(),
        metric_logger=MetricLogger(run_id=run, folder=run_folder, store=store, progress=Silent()),
    )
