"""Learning through a grammar: the demo's retrieval agent with a JSON schema on every call.

    python benchmarks/structured.py [--seed 0] [--quick]

A tiny model imitates a flawed demonstrator that writes JSON, and is then trained on reward: the sampler decodes every call
under the schema, and the learner computes its log-probabilities under the same mask.

Last line: {"before_greedy", "after_greedy", "forked_calls", "kl_per_token", "valid_share"}: held-out success, calls whose
prompt continued none exactly, the largest divergence between sampler and learner before a step's first update (k3, nats per
token), and the share of completions that are what the schema says. --quick learns too little to judge, and checks the rest.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import structured_agent
from agentlightning.cli.train import supervised
from agentlightning.config.run import Config, parse_config
from agentlightning.demo import lookup, tiny_model
from agentlightning.demo.imitation import Imitation, batches, encode_all, imitate
from agentlightning.demo.tasks import rows
from agentlightning.records import JSON
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.display import Display
from agentlightning.trainer.training import new_run_id

DEMONSTRATIONS = 3000
TASKS_PER_STEP = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(run(Path(place), given.seed, quick=given.quick)))


def run(place: Path, seed: int, *, quick: bool) -> JSON:
    """Warm start, training and figures, in a folder of its own."""
    folder = RunFolder(place / "runs", new_run_id())
    folder.make()
    store = place / "store.db"
    warm_start(folder.path / "warm-start", seed, steps=60 if quick else 150)
    config = configure(folder, seed, f"sqlite:///{store}", quick)
    with Display("structured output") as display:
        result = supervised(config, folder, display, name="structured")
    greedy = [row["eval/greedy/reward_mean"] for row in result.metrics if "eval/greedy/reward_mean" in row]
    steps = [row for row in result.metrics if row["kind"] == "step"]
    return {
        "before_greedy": greedy[0],
        "after_greedy": greedy[-1],
        "forked_calls": int(sum(row.get("rollout/forked_calls", 0) for row in steps)),
        "kl_per_token": max(row["policy/sampler_gap"] for row in steps),
        "valid_share": valid_share(store),
    }


def warm_start(folder: Path, seed: int, steps: int) -> None:
    """A policy that writes JSON and has the demonstrator's bad habits."""
    rng = Random(f"demonstrations {seed}")
    demos = [structured_agent.demonstration(lookup.sample(rng, "train"), rng) for _ in range(DEMONSTRATIONS)]
    texts = [message["content"] for demo in demos for message in demo]
    tiny_model.build(folder, texts, seed=seed)
    imitate(folder, batches(encode_all(folder, demos), seed), Imitation(steps=steps, threads=None))


def configure(folder: RunFolder, seed: int, store: str, quick: bool) -> Config:
    """As the demo's, with the agent of this benchmark."""
    steps = 2 if quick else lookup.TRAINING.steps
    tasks = 8 if quick else TASKS_PER_STEP
    train = rows(lookup, "train", steps * tasks, seed)
    val = rows(lookup, "test", 30 if quick else 300, 12345)
    table: dict[str, dict[str, Any]] = {
        "model": {"path": str((folder.path / "warm-start").resolve())},
        "agent": {
            "run": f"{Path(structured_agent.__file__).resolve()}:solve",
            "workers": 1 if quick else 2,
            "concurrency": 48,
            "timeout_s": 60,
        },
        "data": {"train": folder.write_tasks("train.jsonl", train), "val": folder.write_tasks("val.jsonl", val)},
        "algorithm": {"group_size": 8, "minibatches": 4},
        "trainer": {
            "steps": steps,
            "tasks_per_step": tasks,
            "learning_rate": 1e-3,
            "warmup_steps": 1 if quick else 3,
            "final_learning_rate": 0.1,
            "checkpoint_every": 5,
            "seed": seed,
        },
        "eval": {"every": steps},
        "engine": {"device": "cpu"},
        "store": {"url": store},
    }
    return parse_config(table, "structured")


def valid_share(store: Path) -> float:
    """The share of all recorded completions that are steps by the schema."""
    with sqlite3.connect(store) as connection:
        found = [json.loads(text) for (text,) in connection.execute("SELECT completion FROM calls")]
    return sum(structured_agent.valid_step(one.get("content") or "") is not None for one in found) / len(found)


if __name__ == "__main__":
    main()
