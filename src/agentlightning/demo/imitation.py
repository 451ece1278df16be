"""Imitation: supervised training of a tiny model on what the assistant says in demonstrations.

The demo's warm start, ``agl models import`` and the examples drive it. A demonstration is a list of chat messages; its row
is token ids and which of them are trained.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from agentlightning.config.engine import EngineConfig, Muon
from agentlightning.demo import tiny_model
from agentlightning.demo.tasks import Message
from agentlightning.engines.base import LearnerSetup
from agentlightning.engines.local.learner import Learner
from agentlightning.errors import DataError
from agentlightning.records import JSON
from agentlightning.trainer.data.tasks import load_tasks
from agentlightning.training_types import Loss, TrainingSequence

Row = tuple[list[int], list[bool]]
"""Token ids of a demonstration, and which of them are trained."""

BATCH = 64
LEARNING_RATE = 3e-3  # of AdamW; the matrices of the layers get 20/3 of it, 0.02, from Muon
WARM_UP = 20
GRAD_CLIP = 1.0

MIN_DEMONSTRATIONS = 50
MAX_STEPS, PASSES = 400, 6
"""Of a policy made from somebody's demonstrations: so many passes over them, and no more steps than that."""
LEARNING_RATES = (1e-3, 3e-3, 6e-3)
TRIAL_STEPS = 40
"""Of each learning rate, before the best is taken."""
LOOK_EVERY = 20
"""Steps between two looks at the demonstrations that are held out."""
MAX_HELD_OUT = 300
MAX_VOCABULARY, MIN_TIMES_SEEN = 4000, 5
SMALL_VOCABULARY = 600
"""Up to so many tokens 64 dimensions do; beyond, 128."""
MAX_CONTEXT = 2048
TAG = re.compile(r"</?[A-Za-z][\w-]{0,20}>")
"""Such as <sql> in what the assistant writes: one token each."""


def read_demonstrations(path: str | Path) -> list[list[Message]]:
    """Returns the conversations of a JSONL file of ``{"messages": [{"role", "content"}, …]}``.

    DataError names file, row and field of what is not that.
    """
    demos = []
    for number, row in enumerate(load_tasks(str(path)), 1):
        messages, where = row.get("messages"), f"{path}, row {number}"
        if not isinstance(messages, list) or not messages:
            raise DataError(f"{where}: messages: expected a list of chat messages")
        for place, message in enumerate(messages):
            here = f"{where}: messages[{place}]"
            if not isinstance(message, dict) or message.get("role") not in tiny_model.ROLES:
                raise DataError(f"{here}.role: expected one of {', '.join(tiny_model.ROLES)}")
            if not isinstance(message.get("content"), str):
                hint = "; write a tool call as text, which the agent reads" if message.get("tool_calls") else ""
                raise DataError(f"{here}.content: expected text{hint}")
        if all(message["role"] != "assistant" for message in messages):
            raise DataError(f"{where}: messages: none has the role assistant, so there is nothing to imitate")
        demos.append([{"role": message["role"], "content": message["content"]} for message in messages])
    if len(demos) < MIN_DEMONSTRATIONS:
        raise DataError(f"{path}: holds {len(demos)} demonstrations; expected at least {MIN_DEMONSTRATIONS}")
    return demos


@dataclass(frozen=True, slots=True, kw_only=True)
class Imitation:
    """Settings of supervised training."""

    steps: int
    learning_rate: float = LEARNING_RATE
    linear: bool = False
    """The rate falls from the warm-up to the end, down to a twentieth; else over the second half, down to a tenth."""
    weight_decay: float = 0.0
    dropout: float = 0.0
    seed: int = 0
    """Of dropout."""
    threads: int | None = 1
    """None: as many as there are cores that nobody else uses."""
    device: str = "cpu"
    """On CUDA computed in bfloat16, where the device has it."""

    def rate(self, step: int) -> float:
        """Returns the learning rate of a step: it warms up first."""
        left = 1 - step / self.steps
        falls = max(0.05, left) if self.linear else min(1.0, max(0.1, 2 * left))
        return self.learning_rate * min(1.0, (step + 1) / WARM_UP) * falls


def make_policy(
    demos: Sequence[list[Message]], folder: Path, *, seed: int, threads: int | None, report: Callable[[JSON], None]
) -> JSON:
    """Makes a tokenizer and a small Llama in `folder`, warm-starts it on the demonstrations, and returns the facts about it.

    A tenth is held out: of three learning rates the one whose first steps do best on it is taken, and the best step's
    weights are kept.
    """
    disable_progress_bar()
    said = [message["content"] for demo in demos for message in demo if message["role"] == "assistant"]
    tags = [tag for tag, times in Counter(TAG.findall("\n".join(said))).items() if times >= len(demos) / 20]
    texts = [message["content"] for demo in demos for message in demo]
    tokenizer = tiny_model.train_tokenizer(texts, tags, MAX_VOCABULARY, MIN_TIMES_SEEN)
    rows = [encode(tokenizer, demo) for demo in demos]
    longest = max(range(len(rows)), key=lambda index: len(rows[index][0]))
    if (length := len(rows[longest][0])) > MAX_CONTEXT:
        raise DataError(f"demonstration {longest + 1} has {length} tokens; expected at most {MAX_CONTEXT}")
    context = min(MAX_CONTEXT, max(128, 64 * math.ceil(2 * length / 64)))  # an agent talks longer than who shows it how
    hidden = 64 if len(tokenizer) <= SMALL_VOCABULARY else 128
    parameters = tiny_model.write(folder, tokenizer, hidden=hidden, context=context, seed=seed)
    order = Random(f"held out {seed}").sample(rows, len(rows))
    held_out, trained = order[: min(MAX_HELD_OUT, len(rows) // 10)], order[min(MAX_HELD_OUT, len(rows) // 10) :]

    def attempt(rate: float, steps: int, *, keep: bool, phase: str) -> float:
        return imitate(
            folder,
            batches(trained, seed),
            Imitation(steps=steps, learning_rate=rate, threads=threads),
            held_out=held_out,
            keep=keep,
            report=lambda facts: report({"phase": phase, **facts}),
        )

    trials = {rate: attempt(rate, TRIAL_STEPS, keep=False, phase=f"learning rate {rate:g}") for rate in LEARNING_RATES}
    rate = min(trials, key=lambda each: trials[each])
    steps = min(MAX_STEPS, max(2 * WARM_UP, math.ceil(PASSES * len(trained) / min(BATCH, len(trained)))))
    loss = attempt(rate, steps, keep=True, phase="warm start")
    return {
        "demonstrations": len(demos),
        "parameters": parameters,
        "hidden": hidden,
        "vocabulary": len(tokenizer),
        "context": context,
        "learning_rate": rate,
        "steps": steps,
        "heldout_loss": round(loss, 4),
        "folder": str(folder),
    }


def imitate(
    folder: Path,
    chosen: Iterable[list[Row]],
    settings: Imitation,
    *,
    held_out: Sequence[Row] = (),
    keep: bool = True,
    report: Callable[[JSON], None] = lambda _: None,
) -> float:
    """Trains the model in `folder` on batches of rows, in place, and returns its loss in nats per token.

    held_out: rows that decide which step's weights are kept; without any the last one's are, and the loss is the mean of the
    last 20 batches. keep: False leaves the folder as it was.
    """
    learner = Learner(
        folder,
        LearnerSetup(
            config=EngineConfig(
                optimizer=Muon(weight_decay=settings.weight_decay), dropout=settings.dropout, device=settings.device
            ),
            threads=settings.threads,
            seed=settings.seed,
        ),
    )
    steps = settings.steps
    losses: list[float] = []
    best = math.inf
    for step, batch in zip(range(steps), chosen, strict=False):
        losses.append(learner.forward_backward(to_sequences(batch), Loss(name="sft"))["loss"])
        learner.optim_step(settings.rate(step), GRAD_CLIP)
        if held_out and ((step + 1) % LOOK_EVERY == 0 or step + 1 == steps):
            loss = heldout_loss(learner, held_out)
            if loss < best and keep:
                learner.export(folder)
            best = min(best, loss)
        if (step + 1) % 10 == 0 or step + 1 == steps:
            report({"step": step + 1, "of": steps, "loss": round(losses[-1], 4)})
    if not held_out and keep:
        learner.export(folder)
    return best if held_out else sum(losses[-20:]) / len(losses[-20:])


def heldout_loss(learner: Learner, rows: Sequence[Row]) -> float:
    """Returns the mean of -log p over the trained tokens, in nats per token."""
    pairs = zip(learner.logprobs(to_sequences(rows)), rows, strict=True)
    values = [value for found, (_, mask) in pairs for value, trained in zip(found, mask, strict=True) if trained]
    return -sum(values) / len(values)


def encode(tokenizer: PreTrainedTokenizerBase, demo: list[Message]) -> Row:
    """Returns the token ids of a demonstration, and which of them the assistant wrote (its end token with them)."""
    tokens: list[int] = tokenizer.apply_chat_template(demo, tokenize=True, return_dict=False)
    begin, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", tiny_model.END])
    mask: list[bool] = []
    speaks = False
    for token in tokens:
        mask.append(speaks)
        speaks = token == begin or (speaks and token != end)
    return tokens, mask


def encode_all(folder: Path, demos: Iterable[list[Message]]) -> list[Row]:
    """Returns the rows of demonstrations, by the tokenizer in `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [encode(tokenizer, demo) for demo in demos]


def to_sequences(batch: Sequence[Row]) -> list[TrainingSequence]:
    """Returns sequences whose weights make an engine's sum the mean over the trained tokens of the batch."""
    weight = 1 / sum(sum(mask) for _, mask in batch)
    return [
        TrainingSequence(
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


def batches(rows: Sequence[Row], seed: int) -> Iterator[list[Row]]:
    """Yields batches without end; every epoch in an order of its own, the last incomplete batch dropped."""
    rng = Random(f"warm start {seed}")
    order: list[Row] = []
    while True:
        if len(order) < BATCH:
            order = rng.sample(rows, len(rows))
        yield [order.pop() for _ in range(min(BATCH, len(order)))]
