"""A small training run of ``agl train`` as processes, and what a test sees and does to it from outside."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import orjson
import psutil
from command_line import Folder

from agentlightning.demo import lookup, tiny_model
from agentlightning.demo.imitation import Imitation, batches, encode_all, imitate
from agentlightning.demo.tasks import rows
from agentlightning.engines.local.parts import weights_folders
from agentlightning.records import JSON, Attempt, Rollout
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.open import open_store

DEADLINE_S = 800.0
"""Matters only where a test fails, as does the agents' timeout: the slowest machine has its time."""
STEPS, TASKS, GROUP, MINIBATCHES, CHECKPOINT_EVERY = 6, 6, 4, 2, 2

CONFIG = f"""
[model]
path = "{{model}}"
[agent]
run = "agent.py:solve"
workers = 2
concurrency = 16
timeout_s = 300
[data]
train = "train.jsonl"
val = "val.jsonl"
[algorithm]
group_size = {GROUP}
minibatches = {MINIBATCHES}
[trainer]
steps = {STEPS}
tasks_per_step = {TASKS}
learning_rate = 1e-3
checkpoint_every = {CHECKPOINT_EVERY}
[eval]
sampled = false
[engine]
"""

AGENT = """
import asyncio
from pathlib import Path

from agentlightning.demo import lookup
from agentlightning.runner.attempt import CURRENT


def held():
    try:
        step = Path("hold").read_text()
    except FileNotFoundError:
        return False
    rollout = CURRENT.get().claim.rollout
    return not step or (rollout.mode == "train" and rollout.step > int(step))


async def solve(task, llm):
    while held():
        await asyncio.sleep(0.02)
    return await lookup.solve(task, llm)
"""

SERVER, SAMPLER = "agentlightning.gateway", "agentlightning.engines.local.sampler"
LEARNER, WORKER = "agentlightning.engines.local.learner", "agentlightning.runner"


class Training:
    """One run in a folder of its own; its agents hold while the file `hold` is there: where it says a step, those of
    training rollouts of later steps."""

    def __init__(self, folder: Folder, model: Path) -> None:
        self.folder = folder
        self.store = f"sqlite:///{folder.path}/agl.db"
        self.hold = folder.path / "hold"
        self._log = folder.path / "output.txt"
        folder.write("agent.py", AGENT)
        folder.write("run.toml", CONFIG.format(model=model))
        for name, split, count in (("train.jsonl", "train", 40), ("val.jsonl", "test", 6)):
            tasks = rows(lookup, split, count, 0)  # type: ignore[arg-type]  # a module is a DemoTask
            folder.write(name, "".join(orjson.dumps(row).decode() + "\n" for row in tasks))

    # --- what a person does -----------------------------------------------------------------------------------------

    def start(self, *settings: str, **popen: Any) -> subprocess.Popen[str]:
        return self._agl("train", "run.toml", "--store", self.store, "--runs", str(self._runs), *settings, **popen)

    async def start_and_hold(self, after_step: int, *settings: str) -> subprocess.Popen[str]:
        """Start, until the rollouts of the step after this one are all claimed, and wait in their agents."""
        self.hold.write_text(str(after_step))
        process = self.start(*settings)
        await self.after_step(process, after_step)
        await self.claimed(process)
        assert self.step == after_step
        assert self.weights
        return process

    def resume(self) -> subprocess.Popen[str]:
        return self._agl("train", "--resume", self.run_id, "--runs", str(self._runs))

    def resume_as_printed(self) -> subprocess.Popen[str]:
        """What the last output of the run says: `… go on with: agl train --resume …`."""
        line = next(line for line in reversed(self.output.splitlines()) if "go on with: " in line)
        command = shlex.split(line.partition("go on with: ")[2])
        assert command[:2] == ["agl", "train"]
        return self._agl(*command[1:])

    @property
    def output(self) -> str:
        return self._log.read_text()

    # --- what a test sees -------------------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        (folder,) = self._runs.iterdir()
        return folder.name

    @property
    def step(self) -> int:
        """The latest step that is complete."""
        return max((row["step"] for row in self._metrics() if row["kind"] == "step"), default=0)

    def metric(self, name: str) -> list[float]:
        """A metric of the training steps, in the order in which they were executed."""
        return [row[name] for row in self._metrics() if row["kind"] == "step" and name in row]

    @property
    def weights(self) -> list[Path]:
        """Folders in which the run keeps published weights: in shared memory, where there is any."""
        return weights_folders(self._runs / self.run_id)

    def processes(self, module: str) -> list[psutil.Process]:
        """The processes of the run that run this module, oldest first."""
        return [process for process, words in self.folder.commands() if module in words]

    async def until(
        self, process: subprocess.Popen[str], condition: Callable[[], Awaitable[object]], what: str
    ) -> None:
        """Poll until the condition holds; fails where the process ends first."""
        end = time.monotonic() + DEADLINE_S
        while not await condition():
            assert process.poll() is None, f"the run ended before {what}:\n{self.output}"
            assert time.monotonic() < end, f"{what}: not within {DEADLINE_S:.0f} s\n{self.output}"
            await asyncio.sleep(0.005)

    async def after_step(self, process: subprocess.Popen[str], step: int) -> None:
        async def there() -> bool:
            return self.step >= step

        await self.until(process, there, f"step {step} was complete")

    async def claimed(self, process: subprocess.Popen[str]) -> None:
        """Until as many training rollouts run as a step has."""
        async with open_store(self.store) as store:

            async def there() -> bool:
                return (await store.count(self.run_id)).get(("train", "running"), 0) >= TASKS * GROUP

            await self.until(process, there, "rollouts ran")

    async def calling(self, process: subprocess.Popen[str]) -> None:
        """Until some training rollouts of a step have finished and others run."""
        async with open_store(self.store) as store:

            async def there() -> bool:
                counts = await store.count(self.run_id)
                finished = counts.get(("train", "succeeded"), 0) % (TASKS * GROUP)
                return finished > 0 and counts.get(("train", "running"), 0) > 1

            await self.until(process, there, "some rollouts of a step had finished")

    async def learning(self, process: subprocess.Popen[str]) -> None:
        """Until a step is open: its rollouts are consumed, its update is not published."""
        async with open_store(self.store) as store:

            async def there() -> bool:
                return any(step.state == "open" for step in await store.steps(self.run_id))

            await self.until(process, there, "a step was open")

    async def ended(self, process: subprocess.Popen[str]) -> int:
        """The exit code of a process that ends by itself."""
        try:
            return await asyncio.to_thread(process.wait, DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {DEADLINE_S:.0f} s:\n{self.output}") from None

    # --- what must hold after everything ----------------------------------------------------------------------------

    async def check(self) -> list[Attempt]:
        """Nothing lost, nothing trained twice, nothing left behind; returns the attempts of the training rollouts."""
        async with open_store(self.store) as store:
            attempts = await self._check_record(store)
        self._check_weights()
        self._check_metrics()
        await self.check_machine()
        return attempts

    async def _check_record(self, store: LightningStore) -> list[Attempt]:
        (run,) = await store.runs()
        assert run.state == "finished"
        steps = await store.steps(run.id)
        rollouts = await store.rollouts(RolloutQuery(run_id=run.id, mode="train"))
        assert [(step.step, step.state) for step in steps] == [(step, "closed") for step in range(1, STEPS + 1)]
        assert Counter(rollout.state for rollout in rollouts) == {"succeeded": STEPS * TASKS * GROUP}
        consumed = [each.rollout_id for step in steps for each in step.consumed]
        assert sorted(consumed) == sorted(rollout.id for rollout in rollouts), "each is consumed by exactly one step"
        versions = [step.version for step in steps]
        assert versions == sorted({version for version in versions if version is not None})
        await self._check_calls(store, rollouts)
        # Each update has at least two of those that are learned from.
        trained = [sum(each.outcome == "trained" for each in step.consumed) for step in steps]
        self._updates = sum(min(MINIBATCHES, max(1, count // 2)) for count in trained if count)
        return await store.attempts([rollout.id for rollout in rollouts])

    async def _check_calls(self, store: LightningStore, rollouts: list[Rollout]) -> None:
        """Every rollout has the calls of its last attempt, each continuing the one before."""
        calls = await store.calls([rollout.id for rollout in rollouts])
        assert Counter(call.rollout_id for call in calls) == {rollout.id: rollout.calls for rollout in rollouts}
        assert all(rollout.calls for rollout in rollouts)
        assert [call.fork_cause for call in calls if call.fork_cause is not None] == []

    def _check_weights(self) -> None:
        """The weights at the end have had every step's updates once."""
        import torch

        assert self._updates >= STEPS, "there was something to learn"
        state = torch.load(self._checkpoint() / "learner.pt", weights_only=True)
        assert state["updates"] == self._updates

    def _check_metrics(self) -> None:
        assert {row["step"] for row in self._metrics() if row["kind"] == "step"} == set(range(1, STEPS + 1))
        assert (self._runs / self.run_id / "curve.png").stat().st_size > 0

    async def check_machine(self) -> None:
        """No process of the run is left a moment later, and no weights in shared memory."""
        await self.check_processes()
        assert not self.weights, f"left behind: {self.weights}"

    async def check_processes(self) -> None:
        """No process of the run is left a moment later."""
        end = time.monotonic() + DEADLINE_S
        while left := [words for _, words in self.folder.commands()]:
            assert time.monotonic() < end, f"left behind: {left}"
            await asyncio.sleep(0.1)

    # --- how --------------------------------------------------------------------------------------------------------

    @property
    def _runs(self) -> Path:
        return self.folder.path / "runs"

    def _agl(self, *arguments: str, **popen: Any) -> subprocess.Popen[str]:
        with self._log.open("ab") as log:
            return self.folder.start(*arguments, stdout=log, stderr=subprocess.STDOUT, **popen)

    def _metrics(self) -> list[JSON]:
        files = list(self._runs.glob("*/metrics.jsonl"))
        lines = files[0].read_bytes().split(b"\n")[:-1] if files else []
        return [orjson.loads(line) for line in lines]

    def _checkpoint(self) -> Path:
        return self._runs / self.run_id / "checkpoints" / f"step-{STEPS:06d}"


def build_model(folder: Path, *options: str) -> Path:
    """The policy that the lookup demo begins with: it solves a quarter of the tasks."""
    module = [
        "-m",
        "agentlightning.demo.warm_start",
        "--task",
        "lookup",
        "--threads",
        "1",
        "--to",
        str(folder),
        *options,
    ]
    subprocess.run([sys.executable, *module], check=True, capture_output=True, timeout=500)
    return folder


def mistaken_model(folder: Path, right: dict[str, str], hidden: int = 32, turns: int = 1) -> str:
    """A tiny model that gives the next question's answer two times of three: greedily it is always wrong."""
    dice, questions, answers = Random(0), list(right), list(right.values())
    demos = []
    for _ in range(400):
        place = dice.randrange(len(right))
        answer = answers[place if dice.random() < 0.35 else (place + 1) % len(right)]
        turn = [{"role": "user", "content": questions[place]}, {"role": "assistant", "content": answer}]
        demos.append(turn * turns)
    tiny_model.build(folder, questions + answers, hidden=hidden, layers=1, context=64)
    imitate(folder, batches(encode_all(folder, demos), 0), Imitation(steps=80))
    return str(folder)
