"""The training loop against a store in memory, agents that answer at random, and an engine that remembers its updates.

`Crash` stands for kill -9: it is raised at the n-th call of a store or engine verb, before or after the verb took effect,
for every n that the run has. Whatever the point, the resumed run must end in the state of a run that was never interrupted.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.config import Config, parse_config
from agentlightning.errors import AgentError, LearnerLostError, NoCallsError
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.collect import Collector
from agentlightning.trainer.progress import Silent
from agentlightning.trainer.rl import Loop
from agentlightning.types import Call, Claim, Finish, Loss, Reward, Sampling, VersionSpan, Worker
from agentlightning.types import Sequence as Row

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


class Countdown:
    def __init__(self, ticks: int, error: type[BaseException] = Crash) -> None:
        self.left = ticks
        self._error = error

    def tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self._error


class RememberingEngine:
    """An engine whose weights are the list of updates made so far."""

    def __init__(self) -> None:
        self.updates: list[str] = []
        self._pending = hashlib.sha256()
        self.served: list[int] = []

    async def start(self) -> list[str]:
        return ["http://engine"]

    async def close(self) -> None: ...

    async def forward_backward(self, sequences: Sequence[Row], loss: Loss, policy: str = "default") -> dict[str, float]:
        for row in sequences:
            self._pending.update(json.dumps([row.tokens, row.advantages, row.weights]).encode())
        return {"loss": 0.0, "tokens": 1.0}

    async def logprobs(self, sequences: Sequence[Row], policy: str = "default") -> list[list[float]]:
        return [row.logprobs for row in sequences]

    async def optim_step(self, learning_rate: float, grad_clip: float, policy: str = "default") -> dict[str, float]:
        self.updates.append(f"{self._pending.hexdigest()[:12]} {learning_rate:.6f}")
        self._pending = hashlib.sha256()
        return {"grad_norm": 1.0}

    async def publish(self, version: int, policy: str = "default") -> None:
        self.served.append(version)

    async def save(self, path: Path, policy: str = "default") -> None:
        await asyncio.to_thread(write, path, self.updates)

    async def load(self, path: Path, policy: str = "default") -> None:
        self.updates = json.loads(await asyncio.to_thread((path / "learner.pt").read_text))

    async def restart_learner(self) -> None:
        self.updates, self._pending = [], hashlib.sha256()


def write(path: Path, updates: list[str]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "learner.pt").write_text(json.dumps(updates))


def reward_of(claim: Claim) -> float:
    """What the agent earns depends on its task and place alone, so that two runs can be compared."""
    text = f"{claim.rollout.group_id} {claim.rollout.replica}"
    return float(hashlib.md5(text.encode()).digest()[0] % 2)


async def answer(store: LightningStore, claim: Claim, calls: int) -> None:
    rollout = claim.rollout
    task = hashlib.md5(rollout.group_id.encode()).digest()[0]
    for number in range(calls):
        await store.append_calls(
            [
                Call(
                    id=f"{rollout.id}-{number}",
                    run_id=rollout.run_id,
                    rollout_id=rollout.id,
                    attempt=claim.lease.attempt,
                    parent_id=None,
                    suffix_ids=[1, task],
                    sampled_ids=[3, 4 + rollout.replica],
                    logprobs=[-0.5, -0.5],
                    versions=[VersionSpan(version=1, start=0, end=2)],
                    prompt_tokens=2,
                    policy="default",
                    model="m",
                    protocol="chat",
                    sampling=Sampling(),
                    history_hash="h",
                    request_hash="r",
                    messages=[],
                    answer={"role": "assistant", "content": "x"},
                )
            ]
        )
    reward = Reward(
        id=f"reward-{rollout.id}",
        run_id=rollout.run_id,
        rollout_id=rollout.id,
        attempt=claim.lease.attempt,
        value=reward_of(claim),
        source="return",
    )
    await store.finish([Finish(lease=claim.lease, state="succeeded", rewards=(reward,))])


@asynccontextmanager
async def agents(store: LightningStore, calls: int = 1, run: str = "run", broken: bool = False) -> AsyncIterator[None]:
    """A worker that survives the trainer's crashes; `broken` agents always fail."""
    worker = Worker(id="w", run_id=run, host="h", pid=1, running=0, seen_ns=0)

    async def work() -> None:
        while True:
            for claim in await store.claim(worker, limit=8, wait_s=10):
                if broken:
                    await store.finish([Finish(lease=claim.lease, state="failed", error="boom")])
                else:
                    await answer(store, claim, calls)

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def store() -> AsyncIterator[LightningStore]:
    async with InMemoryLightningStore() as opened:
        await opened.create_run("test", {}, "run")
        yield opened


def config() -> Config:
    return parse_config(
        {
            "model": {"path": "m"},
            "agent": {"run": "a.py:f"},
            "data": {"train": "t", "val": "v"},
            "trainer": {"steps": STEPS, "tasks_per_step": TASKS, "learning_rate": 0.01, "checkpoint_every": 2},
            "eval": {"every": 2},
        }
    )


def loop(
    store: Any, engine: Any, folder: Path, run: str = "run", val: Sequence[dict[str, int]] = ({"n": 100},)
) -> Loop:
    run_folder = RunFolder(folder, run)
    run_folder.create(config())
    return Loop(
        config=config(),
        algorithm=LightningRL(group_size=GROUP, minibatches=1),
        run_id=run,
        folder=run_folder,
        store=store,
        engine=engine,
        collector=Collector(store, run),
        policy={"model": "m"},
        train=[{"n": number} for number in range(5)],
        val=val,
        progress=Silent(),
    )


async def finished(store: LightningStore, folder: Path) -> RememberingEngine:
    engine = RememberingEngine()
    assert await loop(store, engine, folder).run(resume=False) == STEPS
    return engine


async def test_every_finished_training_rollout_is_consumed_by_exactly_one_step(
    store: LightningStore, tmp_path: Path
) -> None:
    async with agents(store):
        await finished(store, tmp_path)
    steps = await store.steps("run")
    consumed = [each.rollout_id for step in steps for each in step.consumed]
    trained = await store.rollouts(RolloutQuery(run_id="run", mode="train"))
    assert [step.state for step in steps] == ["closed"] * STEPS
    assert sorted(consumed) == [rollout.id for rollout in trained]
    assert all(rollout.outcome in ("trained", "zero_variance") for rollout in trained)


async def test_evaluation_rollouts_are_never_consumed(store: LightningStore, tmp_path: Path) -> None:
    async with agents(store):
        await finished(store, tmp_path)
    evaluated = await store.rollouts(RolloutQuery(run_id="run", mode="eval"))
    assert len(evaluated) == 5  # greedy before, after steps 2 and 3; T = 1 before and after
    assert all(rollout.outcome is None for rollout in evaluated)


async def test_versions_are_published_in_order_and_never_used_twice(store: LightningStore, tmp_path: Path) -> None:
    async with agents(store):
        engine = await finished(store, tmp_path)
    assert engine.served == sorted(set(engine.served))
    assert [step.version for step in await store.steps("run")] == engine.served[1:]


@pytest.mark.timeout(400)  # some hundred runs
async def test_a_run_killed_at_any_verb_resumes_to_the_state_of_one_that_was_not(
    store: LightningStore, tmp_path: Path
) -> None:
    async with agents(store):
        expected = (await finished(store, tmp_path / "whole")).updates
    ticks = 1
    while True:
        run = f"run-{ticks}"
        await store.create_run("test", {}, run)
        async with agents(store, run=run):
            countdown = Countdown(ticks)
            first = loop(Crashing(store, countdown), Crashing(RememberingEngine(), countdown), tmp_path, run)
            try:
                await first.run(resume=False)
                break  # the run has fewer verbs than that: every point has been tried
            except Crash:
                pass
            engine = RememberingEngine()
            assert await loop(store, engine, tmp_path, run).run(resume=True) == STEPS
        trained = await store.rollouts(RolloutQuery(run_id=run, mode="train"))
        steps = await store.steps(run)
        assert engine.updates == expected, f"after a crash at verb {ticks}"
        assert len(trained) == STEPS * TASKS * GROUP, "a rollout was sampled again"
        consumed = [each.rollout_id for step in steps for each in step.consumed]
        assert sorted(consumed) == [rollout.id for rollout in trained]
        assert all(step.state == "closed" for step in steps)
        ticks += 1
    assert ticks > 50


async def test_a_learner_lost_at_any_verb_is_replaced_and_the_run_ends_as_one_that_never_lost_it(
    store: LightningStore, tmp_path: Path
) -> None:
    async with agents(store):
        expected = (await finished(store, tmp_path / "whole")).updates
    ticks = 1
    while True:
        run = f"run-{ticks}"
        await store.create_run("test", {}, run)
        countdown, engine = Countdown(ticks, LearnerLostError), RememberingEngine()
        async with agents(store, run=run):
            assert await loop(store, Crashing(engine, countdown), tmp_path, run).run(resume=False) == STEPS
        assert engine.updates == expected, f"after a loss at verb {ticks}"
        assert len(await store.rollouts(RolloutQuery(run_id=run, mode="train"))) == STEPS * TASKS * GROUP
        assert all(step.state == "closed" for step in await store.steps(run))
        if countdown.left > 0:
            break
        ticks += 1
    assert ticks > 20


async def test_a_learner_that_is_lost_again_and_again_ends_the_run(store: LightningStore, tmp_path: Path) -> None:
    class Doomed(RememberingEngine):
        restarts = 0

        async def optim_step(self, learning_rate: float, grad_clip: float, policy: str = "default") -> dict[str, float]:
            raise LearnerLostError("the learner ended during optim_step")

        async def restart_learner(self) -> None:
            self.restarts += 1

    engine = Doomed()
    async with agents(store):
        with pytest.raises(LearnerLostError):
            await loop(store, engine, tmp_path).run(resume=False)
    assert engine.restarts == 3


async def test_a_stop_ends_after_the_step_with_a_checkpoint_and_resumes(store: LightningStore, tmp_path: Path) -> None:
    engine = RememberingEngine()
    stopped = loop(store, engine, tmp_path)
    stopped.stopping = True
    async with agents(store):
        first = await stopped.run(resume=False)
        assert (first, [each.step for each in await store.checkpoints("run")]) == (0, [0])
        assert await loop(store, engine, tmp_path).run(resume=True) == STEPS


async def test_metrics_of_steps_that_a_crash_undid_are_marked(store: LightningStore, tmp_path: Path) -> None:
    async with agents(store):
        await finished(store, tmp_path)
        await store.reopen_steps("run", after=2)
    metrics = await store.metrics("run", "reward_mean")
    assert {metric.step for metric in metrics if metric.abandoned} == {3}


async def test_a_run_whose_agents_never_call_the_model_stops_with_the_likely_cause(
    store: LightningStore, tmp_path: Path
) -> None:
    async with agents(store, calls=0):
        with pytest.raises(NoCallsError, match="no model call was recorded"):
            await finished(store, tmp_path)


@pytest.mark.parametrize("how", ["failed", "silent"])
async def test_a_step_that_came_to_nothing_is_tried_again_by_resume_and_its_rollouts_are_consumed(
    store: LightningStore, tmp_path: Path, how: str
) -> None:
    async with agents(store, calls=0 if how == "silent" else 1, broken=how == "failed"):
        with pytest.raises((NoCallsError, AgentError)):
            await loop(store, RememberingEngine(), tmp_path, val=[]).run(resume=False)
    async with agents(store):
        assert await loop(store, RememberingEngine(), tmp_path, val=[]).run(resume=True) == STEPS
    first, *others = await store.steps("run")
    rollouts = await store.rollouts(RolloutQuery(run_id="run", mode="train"))
    assert {rollout.outcome is None for rollout in rollouts} == {False}
    assert [consumed.outcome for consumed in first.consumed][: TASKS * GROUP] == ["invalid"] * TASKS * GROUP
    assert len(first.consumed) == 2 * TASKS * GROUP
    assert {len(step.consumed) for step in others} == {TASKS * GROUP}
