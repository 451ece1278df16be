"""Chaos: a training run whose processes are killed (SIGKILL) or hang (SIGSTOP) at random moments, and what is left of it.

A small run of ``agl train`` (the lookup demo's agents, a tiny model) as real processes: trainer, sampler, learner, server,
workers and, where the store has a server of its own, that one: PostgreSQL, Redis, or an ``agl serve`` over SQLite that the
trainer reaches over HTTP. What its supervisor does not start again, this program does: the trainer by ``--resume``, the
store's server after a second. At the end it reads the store and the last checkpoint, and prints as last line

    {"kills", "finished", "lost", "trained_twice", "resampled", "evidence", "causes", "probes", "completed"}

With --hang processes are stopped instead: the trainer has to notice that its children hang, and replaces them. What nobody
watches goes on after a while: the trainer, the store's server, and now and then all of the run at once, as a machine that
slept. `hung` counts the children that the trainer killed; it must be the number of those that were stopped alone.

finished: rollouts in a final state. lost: rollouts in no final state, finished training rollouts without an outcome, and
those without the calls that they were counted with. trained_twice: rollouts that several surviving steps consumed, updates
beyond those of the steps' lists, and 1 if the weights are not those that a fresh learner gets from the lists, each executed
once. resampled: attempts at a step's rollouts that began after its list was written, and rollouts beside the list.
evidence: tries that the task sampler has lost or counts twice. causes: attempts that ended without a cause, and rollouts
with another than their last attempt. probes: steps with updates that have no weight probe, or several.
completed: every step is closed and the run is finished.

    python benchmarks/chaos.py --store sqlite|postgres|redis|http --kills 20 [--hang] [--seed N] [--quick]
        [--keep FOLDER] [--engine local|vllm|verl] [--engine-python PYTHON]

With --engine vllm the sampler is a vLLM server, started by an interpreter that has it; with verl its driver, workers,
rollout servers and a Ray node's processes die, too. Both take about half a minute to be back.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import psutil

from agentlightning.demo import lookup
from agentlightning.demo.tasks import rows
from agentlightning.trainer.checkpoint import RunFolder
from chaos_engines import ChaosEngine, engine_named
from chaos_record import Record
from chaos_stores import PLACES, Place, start_agl

PARTS = {"server": "agentlightning.gateway", "worker": "agentlightning.runner"}
"""By role, the modules of the processes that every engine has beside its own."""
TASKS, GROUP, MINIBATCHES, CHECKPOINT_EVERY, EVAL_EVERY = 6, 4, 2, 3, 8
DEADLINE_S = 1200.0
STEPS_A_KILL, STEPS_A_QUICK_KILL = 5, 3
"""Steps of the run for each kill; it comes within the time that all but one of them take."""
MAX_UNASKED = 10
"""Ends of the trainer that nobody asked for, after which it is hopeless."""
HANG_S = 15.0
"""The run's trainer.hang_timeout_s with --hang: on a busy machine a process may well be late by a few seconds."""
STOPPED_S = 1.5 * HANG_S
"""Seconds for which a process that nobody watches is stopped: longer than others may be."""
CONFIG = f"""
[model]
path = "{{model}}"
[agent]
run = "agentlightning.demo.lookup:solve"
workers = 2
concurrency = 16
timeout_s = 60
[data]
train = "train.jsonl"
val = "val.jsonl"
sampler = "learnability"
[algorithm]
group_size = {GROUP}
minibatches = {MINIBATCHES}
[trainer]
steps = {{steps}}
tasks_per_step = {TASKS}
learning_rate = 1e-3
checkpoint_every = {CHECKPOINT_EVERY}
{{limits}}
[eval]
every = {EVAL_EVERY}
sampled = false
{{engine}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", choices=("sqlite", "http", "postgres", "redis"), default="sqlite")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--hang", action="store_true", help="SIGSTOP in place of SIGKILL")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="fewer steps between kills")
    parser.add_argument("--model", type=Path, help="the demo's warm-started policy, where it is built already")
    parser.add_argument("--engine", choices=("local", "vllm", "verl"), default="local")
    parser.add_argument("--engine-python", type=Path, metavar="PYTHON", help="interpreter that has vLLM or verl")
    parser.add_argument("--keep", type=Path, help="work in this folder, and leave it")
    given = parser.parse_args()
    engine = engine_named(given.engine, given.engine_python)
    with contextlib.ExitStack() as stack:
        folder = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-chaos-")))
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        apart = STEPS_A_QUICK_KILL if given.quick else STEPS_A_KILL
        steps = apart * given.kills + 2
        place = stack.enter_context(PLACES[given.store](folder))
        model = given.model or build_model(folder / "model", *engine.model_arguments)
        run = ChaosRun(folder, place, model, steps, engine, given.hang)
        stack.callback(run.end)
        started = time.monotonic()
        run.start()
        unasked = Killer(run, random.Random(given.seed), given.kills, apart).work()
        print(f"the run took {time.monotonic() - started:.0f} s; checking", flush=True)
        assert run.run_folder is not None
        record = Record(run.run_folder, place.record, steps, steps * TASKS * GROUP)
        figures = asyncio.run(record.figures())
        counts = {f"killed_{role}": number for role, number in sorted(run.killed.items())}
        hung = {"hung": run.hung, "stopped": run.stopped} if given.hang else {}
        print(json.dumps({"kills": run.killed.total(), **figures, **hung, "ended_unasked": unasked, **counts}))


def build_model(folder: Path, *more: str) -> Path:
    """The policy that the lookup demo begins with."""
    module = ["-m", "agentlightning.demo.warm_start", "--task", "lookup", "--threads", "1", "--to", str(folder)]
    subprocess.run([sys.executable, *module, *more], check=True, stdout=subprocess.DEVNULL)
    return folder


# --- the run and its processes ------------------------------------------------------------------------------------------


class ChaosRun:
    """One run of ``agl train`` in a folder, seen and killed from outside."""

    def __init__(
        self, folder: Path, place: Place, model: Path, steps: int, engine: ChaosEngine, hang: bool = False
    ) -> None:
        self.place = place
        self._engine = engine
        self._parts = {**PARTS, **engine.parts}
        self.hangs = hang
        self.roles = ("trainer", *engine.parts, *place.roles, *(("machine",) if hang else ()))
        self.killed: Counter[str] = Counter()
        """By role; with `hang`, stopped."""
        self.stopped = 0
        """Children of the trainer that were stopped alone."""
        self._folder = folder
        self._trainer: subprocess.Popen[bytes] | None = None
        limits = f"hang_timeout_s = {HANG_S}\nstart_timeout_s = {engine.start_s}"
        (folder / "run.toml").write_text(
            CONFIG.format(
                model=model.resolve(),
                steps=steps,
                limits=limits if hang else "",
                engine=engine.table,
            )
        )
        for name, split, count in (("train.jsonl", "train", TASKS * steps), ("val.jsonl", "test", 6)):
            tasks = rows(lookup, split, count, 0)  # type: ignore[arg-type]  # a module is a DemoTask
            (folder / name).write_bytes(b"".join(orjson.dumps(task) + b"\n" for task in tasks))

    @property
    def output(self) -> Path:
        return self._folder / "output.txt"

    @property
    def run_folder(self) -> RunFolder | None:
        """None before the trainer has made it."""
        found = list(self._folder.glob("runs/*/config.json"))
        return RunFolder(self._folder / "runs", found[0].parent.name) if found else None

    @property
    def step(self) -> int:
        """The latest step that was ever complete."""
        return max((row["step"] for row in self._rows()), default=0)

    @property
    def step_s(self) -> float:
        """Seconds that a step takes: the median."""
        return statistics.median([row["time/step_s"] for row in self._rows()] or [1.0])

    def _rows(self) -> list[dict[str, Any]]:
        """Of every execution of a step."""
        found = []
        for file in self._folder.glob("runs/*/metrics.jsonl"):
            for line in file.read_bytes().splitlines():
                with contextlib.suppress(orjson.JSONDecodeError):
                    row = orjson.loads(line)
                    if row["kind"] == "step":
                        found.append(row)
        return found

    @property
    def ended(self) -> int | None:
        """The trainer's exit code; None while it runs."""
        return self._trainer.poll() if self._trainer is not None else None

    def start(self) -> None:
        """Start the trainer: a new run, or the one that there is."""
        folder = self.run_folder
        words = ["run.toml", "--store", self.place.url] if folder is None else ["--resume", folder.run_id]
        with self.output.open("ab") as output:
            self._trainer = start_agl(self._folder, output, "train", *words, "--runs", str(self._folder / "runs"))

    def kill(self, role: str, rng: random.Random) -> bool:
        """SIGKILL for a process of this role; False where none runs now."""
        if role == "store":
            self.place.kill()
        elif role == "trainer":
            assert self._trainer is not None
            if self._trainer.poll() is not None:
                return False
            self._trainer.kill()
            self._trainer.wait()
            time.sleep(rng.random())
            self.start()
        else:
            running = self.processes(role)
            if not running:
                return False
            with contextlib.suppress(psutil.NoSuchProcess):
                rng.choice(running).send_signal(signal.SIGKILL)
        self.killed[role] += 1
        return True

    def stop(self, role: str, rng: random.Random) -> bool:
        """SIGSTOP for a process of this role until it is replaced, or for a while where nobody replaces it; False where none
        runs now."""
        assert self._trainer is not None
        if self._trainer.poll() is not None:
            return False
        if role in self._parts and role not in self._engine.unwatched:
            running = self.processes(role)
            if not running:
                return False
            chosen = rng.choice(running)
            with contextlib.suppress(psutil.NoSuchProcess):
                chosen.suspend()
            self.killed[role] += 1
            self.stopped += 1
            return self._until_replaced(chosen)
        trainer = psutil.Process(self._trainer.pid)
        tree = [trainer, *trainer.children(recursive=True)]
        chosen_ones = {
            "trainer": [trainer],
            "store": self.place.processes(),
            "machine": [*tree, *self.place.processes()],
            **{one: self.processes(one) for one in self._engine.unwatched},
        }
        if role in self._engine.unwatched and not chosen_ones[role]:
            return False
        for process in chosen_ones[role]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        time.sleep(STOPPED_S)
        for process in rng.sample(chosen_ones[role], k=len(chosen_ones[role])):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        self.killed[role] += 1
        return True

    def _until_replaced(self, process: psutil.Process) -> bool:
        """Wait until the stopped process is gone; a SIGSTOP that came in its first seconds is noticed later."""
        limit_s = self._engine.start_s + 2 * HANG_S
        end = time.monotonic() + limit_s
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > end:
                sys.exit(f"{process} hangs, and nobody noticed within {limit_s:g} s")
            time.sleep(0.1)
        return True

    @property
    def hung(self) -> int:
        """Children that the trainer killed because they hung, and rollout servers that verl's driver found so."""
        logs = [file.read_text(errors="replace") for file in self._folder.glob("runs/*/logs/verl.log")]
        found = sum(log.count("gave no sign of life for") for log in logs)
        return found + self.output.read_text(errors="replace").count("; killing it")

    def processes(self, role: str) -> list[psutil.Process]:
        """The processes of this role below the trainer, in the order of their ids."""
        assert self._trainer is not None
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._trainer.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    program, *words = process.cmdline() or [""]
                    actor = re.split("[. ]", program)[
                        0
                    ]  # the title of a Ray actor goes on with the method that it executes
                    if self._parts[role] in (*words, Path(program).name, actor):
                        found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def end(self) -> None:
        if self._trainer is not None and self._trainer.poll() is None:
            self._trainer.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._trainer.wait(5)
            self._trainer.kill()
            self._trainer.wait()


class Killer:
    """Kills as often as asked for, spread over the steps, at moments and in an order that the seed decides."""

    def __init__(self, run: ChaosRun, rng: random.Random, kills: int, apart: int) -> None:
        self._run = run
        self._rng = rng
        self._apart = apart
        known = run.roles
        self._harm = run.stop if run.hangs else run.kill
        rounds = -(-kills // len(known))
        self._roles = [role for _ in range(rounds) for role in rng.sample(known, k=len(known))][:kills]
        self._unasked = 0
        self._end = time.monotonic() + DEADLINE_S

    def work(self) -> int:
        """Kill until all is done and the run has ended; returns how often the trainer ended without being killed."""
        for number, role in enumerate(self._roles):
            self._until(partial(self._is_due, number))
            self._pause(self._rng.uniform(0, self._apart - 1) * self._run.step_s)
            self._until(partial(self._harm, role, self._rng))
            done = "stopped" if self._run.hangs else "killed"
            print(f"{done} {role} ({number + 1} of {len(self._roles)}) after step {self._run.step}", flush=True)
        self._until(lambda: self._run.ended == 0)
        return self._unasked

    def _is_due(self, number: int) -> bool:
        return self._run.step >= number * self._apart

    def _pause(self, seconds: float) -> None:
        resume = time.monotonic() + seconds
        self._until(lambda: time.monotonic() >= resume)

    def _until(self, condition: Callable[[], bool]) -> None:
        """Poll until the condition holds; meanwhile a trainer that gave up is started again."""
        while True:
            if self._run.run_folder is not None:
                if condition():
                    return
                if self._run.ended == 0:
                    sys.exit("the run ended before every kill was done")
            if self._run.ended:
                self._unasked += 1
                last = self._run.output.read_text(errors="replace").strip().splitlines()[-1:]
                print(f"the trainer ended with exit code {self._run.ended}: {''.join(last)}", flush=True)
                if self._unasked > MAX_UNASKED:
                    sys.exit("the trainer ends again and again")
                self._run.start()
            if time.monotonic() > self._end:
                sys.exit(f"not done within {DEADLINE_S:.0f} s; {self._run.output} ends: {self._tail()}")
            time.sleep(0.02)

    def _tail(self) -> str:
        return self._run.output.read_text(errors="replace")[-2000:]


if __name__ == "__main__":
    main()
