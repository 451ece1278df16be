"""Makes the model that the picture game trains: a tokenizer, a fresh LLaVA (0.25 million parameters), a warm start.

    python examples/pictures/warm_start.py --seed 0 --to runs/pictures-model

The warm start teaches the protocol and no colour: the demonstrations name one at random, whatever the picture shows. The
vision tower keeps its random weights: it mixes pixels, and the projector and the language model learn to read the mixture.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

from game import COLOURS, GREETING, QUESTION, draw
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from agentlightning.config.engine import EngineConfig
from agentlightning.demo import tiny_model, tiny_vision
from agentlightning.engines.base import LearnerSetup
from agentlightning.engines.local.learner import Learner
from agentlightning.rendering.images import ImageProcessor, image_hash
from agentlightning.training_types import ImageInput, Loss, TrainingSequence

STEPS, BATCH, LEARNING_RATE = 60, 32, 3e-3


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make and warm-start the model of the picture game.")
    parser.add_argument("--to", type=Path, required=True, help="folder for the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args(given)
    disable_progress_bar()
    words = [*GREETING.split(), *QUESTION.split(), "look", *COLOURS]
    tokenizer = tiny_model.word_tokenizer([], words, min_times_seen=1)
    parameters = tiny_vision.write(arguments.to, tokenizer, seed=arguments.seed)
    loss = imitate(arguments.to, Random(f"warm start {arguments.seed}"), arguments.steps)
    facts = {"model": str(arguments.to), "seed": arguments.seed, "parameters": parameters, "loss": round(loss, 4)}
    sys.stdout.write(json.dumps(facts) + "\n")


def imitate(folder: Path, rng: Random, steps: int) -> float:
    """Supervised training on demonstrations, in place; returns the last loss in nats per token."""
    tokenizer, processor = AutoTokenizer.from_pretrained(folder), ImageProcessor.find(folder)
    assert processor is not None
    learner = Learner(folder, LearnerSetup(config=EngineConfig(optimizer="muon")))
    loss = 0.0
    for step in range(steps):
        rows = [demonstration(tokenizer, processor, rng, number) for number in range(BATCH)]
        loss = learner.forward_backward(rows, Loss(name="sft"))["loss"]
        learner.optim_step(LEARNING_RATE * min(1.0, (step + 1) / 10, 2 * (steps - step) / steps), 1.0)
    learner.export(folder)
    return loss


def demonstration(tokenizer: object, processor: ImageProcessor, rng: Random, number: int) -> TrainingSequence:
    """A conversation that names a colour at random."""
    _, picture = draw(f"warm start {rng.random()}")
    expansion = processor.expansion(picture)
    encode = tokenizer.encode  # type: ignore[attr-defined]
    ask = encode(f"<|user|>{GREETING}<|end|><|assistant|>", add_special_tokens=False)
    look = encode("look<|end|>", add_special_tokens=False)
    before = encode("<|user|>", add_special_tokens=False)
    after = encode(f"{QUESTION}<|end|><|assistant|>", add_special_tokens=False)
    say = encode(f"{rng.choice(sorted(COLOURS))}<|end|>", add_special_tokens=False)
    parts = [(ask, False), (look, True), (before, False), (expansion, False), (after, False), (say, True)]
    tokens = [token for ids, _ in parts for token in ids]
    mask = [trained for ids, trained in parts for _ in ids]
    start = len(ask) + len(look) + len(before)
    image = ImageInput(hash=image_hash(picture), start=start, end=start + len(expansion), data=picture)
    return TrainingSequence(
        rollout_id=f"demonstration {number}",
        tokens=tokens,
        mask=mask,
        logprobs=[0.0] * len(tokens),
        advantages=[1.0] * len(tokens),
        weights=[trained / (BATCH * sum(mask)) for trained in mask],
        segments=[],
        images=[image],
    )


if __name__ == "__main__":
    main()
