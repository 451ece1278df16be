"""Searches for prompts against training the weights: every arm has the same number of rollouts.

A tiny model imitates a demonstrator that does what its system prompt says, so that sentences of the prompt matter, and
that confuses two relations whatever it says (instructed.py). The agent starts from a poor prompt. No language model
writes: the optimiser is the scripted one, with a grammar of edits of which four help. The points are greedy rewards on
held-out tasks that no arm sees. Figures: rollouts, and after_sampled, the reward at temperature 1 at the end.
"""

from __future__ import annotations

import tempfile
import tomllib
from pathlib import Path
from random import Random

import instructed
from claim import (
    AGL,
    HELD_OUT,
    HELD_OUT_SEED,
    Cell,
    Claim,
    Outcome,
    execute,
    last_json,
    options,
    train,
    write_rows,
)

from agentlightning.demo import lookup, tiny_model
from agentlightning.demo.imitation import Imitation, batches, encode_all, imitate
from agentlightning.demo.tasks import rows
from agentlightning.records import JSON

HERE = Path(__file__).parent
CONFIG = HERE / "people.toml"
SEARCHES = {"random_search": f"{HERE}/random_search.py:RandomSearch", "apo": "apo", "gepa": "gepa"}
ROLLOUTS, TASKS_PER_STEP, GROUP = 2048, 16, 8
QUICK_ROLLOUTS, QUICK_TASKS_PER_STEP = 96, 2
DEMONSTRATIONS, STEPS = 9_000, 240
TRAIN, VAL = 512, 48


def prepare(cell: Cell) -> None:
    """The tasks and the model."""
    made = rows(lookup, "train", TRAIN + VAL, cell.seed)
    held_out = rows(lookup, "test", 16 if cell.quick else HELD_OUT, HELD_OUT_SEED)
    for name, part in (("train", made[VAL:]), ("val", made[: 8 if cell.quick else VAL]), ("heldout", held_out)):
        write_rows(cell.folder / f"{name}.jsonl", part)
    if cell.model.exists():
        return
    rng, demos = Random(f"demonstrations {cell.seed}"), []
    for _ in range(DEMONSTRATIONS):
        demos.append(instructed.demonstrate(lookup.sample(rng, "train"), instructed.any_prompt(rng), rng))
    with tempfile.TemporaryDirectory(dir=cell.folder) as temporary:
        model = Path(temporary) / "model"
        texts = [message["content"] for demo in demos for message in demo]
        tiny_model.build(model, texts, seed=cell.seed, special_words=lookup.SPECIAL_WORDS, vocabulary=600)
        settings = Imitation(steps=60 if cell.quick else STEPS, threads=None)
        imitate(model, batches(encode_all(model, demos), cell.seed), settings)
        model.rename(cell.model)


def measure(cell: Cell) -> Outcome:
    first = str(tomllib.loads(CONFIG.read_text())["prompts"]["templates"]["system"])
    settings = {
        "model.path": str(cell.model),
        "data.train": str(cell.folder / "train.jsonl"),
        "data.val": str(cell.folder / "val.jsonl"),
        "trainer.seed": cell.seed,
    }
    policy, prompt, used = (train_weights if cell.arm == "weights_only" else search)(cell, settings)
    before = evaluate(cell, settings, "before", str(cell.model), first)
    after = evaluate(cell, settings, "after", policy, prompt or first)
    points = [(0.0, before["greedy"]), (float(used), after["greedy"])]
    return Outcome(points, {"rollouts": used, "after_sampled": after["sampled"]})


def search(cell: Cell, settings: JSON) -> tuple[str, str, int]:
    """The unchanged model, the prompt that was found, and the rollouts used."""
    settings = settings | {
        "algorithm.type": SEARCHES[cell.arm],
        "algorithm.minibatch": 8,
        "optimize.max_rollouts": QUICK_ROLLOUTS if cell.quick else ROLLOUTS,
        "optimize.model": f"{HERE}/writer.py:write",
    }
    store = ("--store", f"sqlite:///{cell.place}/agl.db", "--runs", cell.place / "runs")
    words = (*AGL, "optimize", CONFIG, *options(settings), "--json", *store)
    found = last_json(execute(cell, f"{cell.arm}/optimize", *words))
    return str(cell.model), str(found["texts"]["system"]), int(found["rollouts"])


def train_weights(cell: Cell, settings: JSON) -> tuple[str, str, int]:
    """The trained weights, no new prompt, and the rollouts used."""
    rollouts, tasks = (QUICK_ROLLOUTS, QUICK_TASKS_PER_STEP) if cell.quick else (ROLLOUTS, TASKS_PER_STEP)
    steps = rollouts // (tasks * GROUP)
    settings = settings | {
        "eval.tasks": 8 if cell.quick else VAL,
        "eval.sampled": False,
        "trainer.steps": steps,
        "trainer.tasks_per_step": tasks,
        "trainer.learning_rate": 1e-3,
        "trainer.warmup_steps": 2,
        "trainer.checkpoint_every": steps,
        "algorithm.group_size": GROUP,
        "algorithm.minibatches": 4,
    }
    run, metrics = train(cell, CONFIG, settings)
    used = sum(row["rollout/count"] for row in metrics if row["kind"] == "step")
    return str(run.path / "checkpoints" / f"step-{steps:06}"), "", int(used)


def evaluate(cell: Cell, settings: JSON, name: str, policy: str, prompt: str) -> JSON:
    """Held-out rewards of a policy under a prompt, greedy and sampled."""
    more = {"model.path": policy, "data.val": str(cell.folder / "heldout.jsonl"), "prompts.templates.system": prompt}
    store = ("--store", f"sqlite:///{cell.place}/{name}.db", "--runs", cell.place / f"{name}-runs")
    return last_json(execute(cell, f"{cell.arm}/{name}", *AGL, "eval", CONFIG, *options(settings | more), *store))


CLAIMS = {
    "prompts": Claim(
        arms=("random_search", "apo", "gepa", "weights_only"),
        measure=measure,
        prepare=prepare,
        cost="rollouts",
        seeds=5,
    )
}
