"""A model with sight learns from reward in a picture game; held-out success, and how exactly its calls are recorded.

    python benchmarks/images.py [--seed 0] [--quick]

Makes the model of examples/pictures and trains it through the whole system. Success is greedy, on pictures that training
never draws. A call is exact where its prompt continues the calls before it token for token and image for image, or is the
first; and, of the calls that were sampled with the weights of the end, where a learner that loads these weights and the
stored images finds the recorded log-probabilities again, each to 1e-4. --quick: two steps, to see that it runs.

Last line: {"before", "after", "exact_share"}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from agentlightning.adapters.sequences import merge
from agentlightning.adapters.trajectories import trajectories
from agentlightning.engines.local.learner import Learner
from agentlightning.engines.setup import LearnerSetup
from agentlightning.records import Call, Rollout
from agentlightning.store.base import RolloutQuery
from agentlightning.store.open import open_store
from agentlightning.store.scan import read_images
from agentlightning.trainer.checkpoint import RunFolder

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLE = REPOSITORY / "examples" / "pictures"
TOLERANCE = 1e-4
QUICK = ["trainer.steps=2", "trainer.tasks_per_step=4", "eval.every=2"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(Path(folder), given.seed, given.quick)))


def run(work: Path, seed: int, quick: bool) -> dict[str, float]:
    """Makes the model, trains it, and returns the figures."""
    began = time.monotonic()
    execute(str(EXAMPLE / "warm_start.py"), "--seed", str(seed), "--to", str(work / "model"), *["--steps=20"] * quick)
    settings = [f"model.path={work / 'model'}", f"trainer.seed={seed}", *QUICK * quick]
    options = [part for one in settings for part in ("--set", one)]
    store = f"sqlite:///{work}/agl.db"
    training = ("-m", "agentlightning", "train", str(EXAMPLE / "train.toml"), "--store", store)
    execute(*training, "--runs", str(work / "runs"), *options)
    (path,) = (work / "runs").iterdir()
    rows = RunFolder(work / "runs", path.name).metrics()
    greedy = {row["step"]: row["eval/greedy/reward_mean"] for row in rows if "eval/greedy/reward_mean" in row}
    last = max(greedy)
    print(f"{time.monotonic() - began:.0f} s; held out, greedy, by step: {greedy}", flush=True)
    exact, calls = asyncio.run(count_exact(store, path.name, max((path / "checkpoints").iterdir()), last))
    return {"before": greedy[0], "after": greedy[last], "exact_share": round(exact / calls, 4)}


def execute(*command: str) -> None:
    done = subprocess.run([sys.executable, *command], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout[-2000:]}{done.stderr[-4000:]}\n{' '.join(command)} failed")


async def count_exact(url: str, run_id: str, weights: Path, last: int) -> tuple[int, int]:
    """Returns the number of exact calls, and of all."""
    learner = Learner(weights, LearnerSetup())
    exact = total = 0
    async with open_store(url) as store:
        rollouts = await store.rollouts(RolloutQuery(run_id=run_id))
        for rollout in rollouts:
            calls = await store.calls([rollout.id])
            wrong = {call.id for call in calls if call.fork_cause is not None}
            if rollout.mode == "eval" and rollout.step == last:
                wrong |= differing(learner, rollout, calls, await read_images(store, calls))
            total += len(calls)
            exact += len(calls) - len(wrong)
    return exact, total


def differing(learner: Learner, rollout: Rollout, calls: list[Call], images: dict[str, bytes]) -> set[str]:
    """The ids of the calls of which the learner finds other log-probabilities than are recorded."""
    kept, left_out = trajectories([rollout], calls, keep_unrewarded=True, images=images)
    if left_out:
        return {call.id for call in calls}
    found = set()
    for one in kept:
        nothing = [0.0] * len(one.transitions)
        rows = merge(one.rollout_id, one.transitions, nothing, nothing)
        recorded = {call.id: call.logprobs for call in calls}
        ends = [transition.call_id for transition in one.transitions]
        values = [row_values[start:end] for row, row_values in zip(rows, learner.logprobs(rows), strict=True)
                  for start, end in row.segments]  # fmt: skip
        for call_id, of_call in zip(ends, values, strict=True):
            if any(abs(a - b) > TOLERANCE for a, b in zip(recorded[call_id], of_call, strict=True)):
                found.add(call_id)
    return found


if __name__ == "__main__":
    main()
