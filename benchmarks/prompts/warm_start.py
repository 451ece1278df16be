"""Makes the model of benchmarks/prompts.py, its tasks and the grammar of the scripted optimiser.

    python benchmarks/prompts/warm_start.py --seed 0 --to FOLDER [--quick]

The model imitates a demonstrator under many system prompts, so that sentences of a prompt matter to it. Held-out tasks are
the same for every seed. Last line: {"seconds", "parameters"}.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from random import Random

import instructed
from transformers.utils.logging import disable_progress_bar

from agentlightning.demo import lookup, tiny_model
from agentlightning.demo.imitation import Imitation, batches, encode_all, imitate
from agentlightning.demo.tasks import rows

DEMONSTRATIONS, STEPS = 9_000, 240
TRAIN, VAL, HELD_OUT = 512, 48, 200
HELD_OUT_SEED = 12345


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="few tasks, and a model that hardly knows the protocol")
    given = parser.parse_args()
    disable_progress_bar()
    began = time.monotonic()
    given.to.mkdir(parents=True, exist_ok=True)
    write_tasks(given.to, given.seed, quick=given.quick)
    parameters = warm_start(given.to / "model", given.seed, steps=60 if given.quick else STEPS)
    print(json.dumps({"seconds": round(time.monotonic() - began, 1), "parameters": parameters}))


def write_tasks(folder: Path, seed: int, *, quick: bool) -> None:
    """train.jsonl, val.jsonl and heldout.jsonl, and grammar.json."""
    made = rows(lookup, "train", TRAIN + VAL, seed)
    held_out = rows(lookup, "test", 16 if quick else HELD_OUT, HELD_OUT_SEED)
    for name, part in (("train", made[VAL:]), ("val", made[: 8 if quick else VAL]), ("heldout", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (folder / "grammar.json").write_text(json.dumps(instructed.GRAMMAR, indent=1))


def warm_start(folder: Path, seed: int, steps: int) -> int:
    """Makes the model; returns the number of its parameters."""
    rng = Random(f"demonstrations {seed}")
    demos = []
    for _ in range(DEMONSTRATIONS):
        demos.append(instructed.demonstrate(lookup.sample(rng, "train"), instructed.any_prompt(rng), rng))
    texts = instructed.texts_of(demos)
    parameters = tiny_model.build(folder, texts, seed=seed, special_words=lookup.SPECIAL_WORDS, vocabulary=600)
    imitate(folder, batches(encode_all(folder, demos), seed), Imitation(steps=steps, threads=None), report=print_line)
    return parameters


def print_line(facts: dict[str, float]) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
