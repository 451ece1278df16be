"""Power cuts: a training run whose machine loses its power at random moments, and what is left of it.

The run of chaos.py over SQLite with ``?synchronous=full``. At a cut every process of the run is killed at once, and its
folder is put into the state of a disk that kept only what was synced (tests/store/power_loss.py: a library that is preloaded
into the processes; no privileges). Then the run is resumed. At the end it reads store and checkpoint as chaos.py does, and
prints as last line {"cuts", "finished", "lost", "trained_twice", "resampled", "completed", …}.

    python benchmarks/power_cut.py --cuts 10 [--seed N] [--model FOLDER] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import psutil

from chaos import DEADLINE_S, GROUP, TASKS, ChaosRun, build_model
from chaos_engines import engine_named
from chaos_record import Record

sys.path.append(str(Path(__file__).parents[1] / "tests" / "store"))
from power_loss import PowerCut, missing

STEPS_A_CUT = 3


class PoweredFile:
    """A SQLite file whose commits wait for the disk."""

    roles = ()

    def __init__(self, folder: Path) -> None:
        self.url = self.record = f"sqlite:///{folder}/agl.db?synchronous=full"

    def kill(self) -> None:
        """Nothing serves it but the run itself."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuts", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="the demo's warm-started policy, where it is built already")
    parser.add_argument("--keep", type=Path, help="work in this folder, and leave it")
    given = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    with contextlib.ExitStack() as stack:
        place = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-power-cut-")))
        folder = place.resolve() / "machine"
        folder.mkdir(parents=True)
        steps = STEPS_A_CUT * given.cuts + 2
        model = given.model or build_model(place.resolve() / "model")
        run = ChaosRun(folder, PoweredFile(folder), model, steps, engine_named("local"))
        power = PowerCut(folder, place.resolve() / "disk")
        os.environ.update(power.environment)  # for what the run starts; this process is loaded already
        stack.callback(run.end)
        rng = random.Random(given.seed)
        run.start()
        for number in range(given.cuts):
            until_step(run, number * STEPS_A_CUT)
            pause = time.monotonic() + rng.uniform(0, (STEPS_A_CUT - 1) * run.step_s)
            while time.monotonic() < pause and run.ended is None:
                time.sleep(0.01)
            print(f"the power is cut ({number + 1} of {given.cuts}) after step {run.step}", flush=True)
            cut(run, power)
            run.start()
        until_step(run, steps + 1)
        for name in power.environment:
            del os.environ[name]
        assert run.run_folder is not None
        record = Record(run.run_folder, run.place.record, steps, steps * TASKS * GROUP)
        print(json.dumps({"cuts": given.cuts, **asyncio.run(record.figures())}))


def until_step(run: ChaosRun, step: int) -> None:
    """Until a step is complete, or the run has ended; one that ends with an error ends this program."""
    deadline = time.monotonic() + DEADLINE_S
    while run.ended is None and (run.run_folder is None or run.step < step):
        if time.monotonic() > deadline:
            sys.exit(f"step {step} did not come: {run.output.read_text()[-2000:]}")
        time.sleep(0.05)
    if run.ended:
        sys.exit(f"the run ended with {run.ended}: {run.output.read_text()[-2000:]}")


def cut(run: ChaosRun, power: PowerCut) -> None:
    """SIGKILL for all processes of the run, before any of them sees another's end; then the disk as it is."""
    trainer = run._trainer
    assert trainer is not None
    processes = [psutil.Process(trainer.pid)]
    with contextlib.suppress(psutil.NoSuchProcess):
        processes[0].suspend()
        processes += processes[0].children(recursive=True)
    for act in (psutil.Process.suspend, psutil.Process.kill):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                act(process)
    trainer.wait()
    psutil.wait_procs(processes, timeout=30)
    power.cut()


if __name__ == "__main__":
    main()
