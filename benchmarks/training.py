"""What merging and prefix trees save of the learner's gradient.

    python benchmarks/training.py [--quick] [--model smollm2|FOLDER]

A model of 4.95 million random parameters, or a given one, on one thread; CPU seconds of this process, medians of 5 rounds
taken in turns. Each ratio is "how many times quicker" for the first of its two names. gpu.py and real_model.py compare whole
steps with TRL.

- merged_over_transition: three-turn rollouts of 200 + 3 x 30 tokens, one row per rollout against one row per call.
- tree_over_merged: 8 rollouts that share a prompt of 256 and go on in two ways, 64 tokens a part, as a prefix tree against
  merged rows.
- tree_cost_spread: CPU seconds for each unique token of such trees, the dearest over the cheapest of 4, 8 and 16 rollouts:
  1 if the cost is linear in unique tokens.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from agentlightning.config.engine import EngineConfig
from agentlightning.engines.base import LearnerSetup
from agentlightning.engines.local.learner import Learner
from agentlightning.training_types import Loss, TrainingSequence

sys.path.insert(0, str(Path(__file__).resolve().parent / "training"))

from work import branches, turns, unique, write_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short rounds, to see that it runs")
    parser.add_argument("--model", help="smollm2, or a folder; 4.95 million random parameters by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        if options.model is None:
            write_model(model)
        elif options.model == "smollm2":
            from agentlightning.demo.pretrained import pretrained_model

            model = pretrained_model()
        else:
            model = Path(options.model)
        print(json.dumps(measure(model, rounds=3 if options.quick else 5, small=options.quick)))


def measure(model: Path, rounds: int, small: bool) -> dict[str, float]:
    padded = Learner(model, LearnerSetup(config=EngineConfig(device="cpu", packing="padded")))
    shared = Learner(model, LearnerSetup(config=EngineConfig(device="cpu", packing="prefix_tree")))
    merged, calls = turns(2 if small else 16)
    trees = {rollouts: branches(rollouts) for rollouts in ((2, 4) if small else (4, 8, 16))}
    middle = sorted(trees)[1]
    work: dict[str, tuple[Learner, list[TrainingSequence]]] = {
        "merged": (padded, merged),
        "transition": (padded, calls),
        "branches": (padded, trees[middle]),
    } | {f"tree {rollouts}": (shared, rows) for rollouts, rows in trees.items()}
    seen: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, (learner, rows) in work.items():
            started = time.process_time()
            learner.forward_backward(rows, Loss())
            took = time.process_time() - started
            learner.model.zero_grad(set_to_none=True)
            if number:  # the first does not count
                seen[name].append(took)
    medians = {name: statistics.median(times) for name, times in seen.items()}
    for name, took in medians.items():
        rows = work[name][1]
        print(f"{name:<11} {took:6.3f} s, {sum(len(row.tokens) for row in rows)} tokens, {unique(rows)} of them unique")
    costs = [medians[f"tree {rollouts}"] / unique(rows) for rollouts, rows in trees.items()]
    return {
        "merged_over_transition": round(medians["transition"] / medians["merged"], 3),
        "tree_over_merged": round(medians["branches"] / medians[f"tree {middle}"], 3),
        "tree_cost_spread": round(max(costs) / min(costs), 3),
    }


if __name__ == "__main__":
    main()
