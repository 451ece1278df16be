"""The warm start: a policy that knows the protocol of a demo task and has a demonstrator's bad habits.

`python -m agentlightning.demo.warm_start --task sql --to FOLDER` is what `agl demo` runs first. It builds the tiny model,
lets it imitate scripted demonstrations and writes a transformers folder. Progress goes to standard output, one JSON
object a line; the last one has the demonstrator's success rate. Rewards and agents play no part here.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from agentlightning.children import end_with_parent
from agentlightning.demo import tasks, tiny
from agentlightning.demo.tasks import Message
from agentlightning.engines.local.learner import Learner
from agentlightning.types import JSON, Loss, Sequence

DEMONSTRATIONS = 3000
BATCH = 64
LEARNING_RATE = 3e-3  # of AdamW; the matrices of the layers get 20/3 of it, 0.02, from Muon
WARM_UP = 20
GRAD_CLIP = 1.0


def main() -> None:
    """Entry point; raises the errors of errors.py as they are."""
    parser = argparse.ArgumentParser(prog="agentlightning.demo.warm_start", description=__doc__)
    parser.add_argument("--task", choices=tasks.NAMES, default="sql")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--child", action="store_true", help="end when the parent does")
    options = parser.parse_args()
    if options.child:
        end_with_parent()
    transformers_logging.disable_progress_bar()

    def report(facts: JSON) -> None:
        sys.stdout.write(json.dumps({"phase": "warm_start", **facts}) + "\n")
        sys.stdout.flush()

    report(warm_start(options.task, options.to, seed=options.seed, threads=options.threads, report=report))


def warm_start(
    name: str,
    folder: Path,
    *,
    seed: int,
    threads: int,
    report: Callable[[JSON], None],
    steps: int | None = None,
    count: int = DEMONSTRATIONS,
) -> JSON:
    """Make the policy of a demo task in `folder`; returns the facts about it. `steps`: the task's own number."""
    started = time.monotonic()
    task = tasks.load(name)
    steps = task.WARM_START_STEPS if steps is None else steps
    demos, success = tasks.demonstrations(task, count, seed)
    texts = [message["content"] for demo in demos for message in demo]
    parameters = tiny.build(folder, texts, seed=seed, special_words=task.SPECIAL_WORDS)
    imitate(folder, demos, steps=steps, seed=seed, threads=threads, report=report)
    return {
        "task": name,
        "seed": seed,
        "demonstrator": round(success, 4),
        "demonstrations": count,
        "parameters": parameters,
        "seconds": round(time.monotonic() - started, 2),
        "folder": str(folder),
    }


def imitate(
    folder: Path,
    demos: list[list[Message]],
    *,
    steps: int,
    seed: int,
    threads: int,
    report: Callable[[JSON], None],
) -> None:
    """Supervised learning on what the assistant says in the demonstrations; the result replaces the folder's weights."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = [encode(tokenizer, demo) for demo in demos]
    learner = Learner(folder, threads=threads, optimizer="muon")
    for step, chosen in enumerate(batches(len(encoded), steps, Random(f"warm start {seed}"))):
        batch = to_sequences([encoded[index] for index in chosen])
        loss = learner.forward_backward(batch, Loss(name="sft"))["loss"]
        learner.optim_step(LEARNING_RATE * schedule(step, steps), GRAD_CLIP)
        if (step + 1) % 10 == 0 or step + 1 == steps:
            report({"step": step + 1, "of": steps, "loss": round(loss, 4)})
    learner.export(folder)


def encode(tokenizer: PreTrainedTokenizerBase, demo: list[Message]) -> tuple[list[int], list[bool]]:
    """Token ids of a demonstration, and which of them the assistant wrote (its end token with them)."""
    tokens: list[int] = tokenizer.apply_chat_template(demo, tokenize=True, return_dict=False)
    begin, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", tiny.END])
    mask, speaks = [], False
    for token in tokens:
        mask.append(speaks)
        speaks = token == begin or (speaks and token != end)
    return tokens, mask


def to_sequences(batch: list[tuple[list[int], list[bool]]]) -> list[Sequence]:
    """Sequences whose weights make the sum that an engine computes the mean over the trained tokens of the batch."""
    weight = 1 / sum(sum(mask) for _, mask in batch)
    return [
        Sequence(
            rollout_id=f"demonstration {index}",
            tokens=tokens,
            mask=mask,
            logprobs=[0.0] * len(tokens),
            advantages=[1.0] * len(tokens),
            weights=[weight * trained for trained in mask],
            segments=[],
        )
        for index, (tokens, mask) in enumerate(batch)
    ]


def batches(count: int, steps: int, rng: Random) -> Iterator[list[int]]:
    """`steps` batches of indices below `count`; every epoch in an order of its own, the last incomplete batch dropped."""
    order: list[int] = []
    for _ in range(steps):
        if len(order) < BATCH:
            order = rng.sample(range(count), count)
        yield [order.pop() for _ in range(min(BATCH, len(order)))]


def schedule(step: int, steps: int) -> float:
    """Share of the full learning rate: a short warm-up, then level, then down to a tenth over the second half."""
    return min(1.0, (step + 1) / WARM_UP) * min(1.0, max(0.1, (steps - step) / (steps / 2)))


if __name__ == "__main__":
    main()
