"""Makes the model that the calculator example trains: a tokenizer, a fresh Llama (0.9 million parameters), a warm start.

    python examples/calculator/warm_start.py --seed 0 --to runs/calculator-model

The warm start teaches the protocol, and some arithmetic sense, from the equations of 15 % of the training questions (of
ASDiv-A and MAWPS; with --slice all, of every set); one
demonstration in five follows a random program, so that the model stays curious. Reinforcement learning then sees answers
only. With --control it is what that is compared with: the same labels, more of the same training, no reinforcement learning.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from data import Problem, Step, load, program, read_own, split, split_all, training_rows
from transformers import PreTrainedTokenizerFast
from word_problem import OPERATORS, Calculator, name_numbers

from agentlightning.demo import tiny_model
from agentlightning.demo.imitation import Imitation, imitate
from agentlightning.engines.local.decoder import open_decoder

LLAMA = {"intermediate_size": 336, "initializer_range": 0.04, "scaled": True}
PROTOCOL = [
    "answer",
    *OPERATORS,
    "ok",
    "neg",
    "frac",
    "err",
    *(f"N{i}" for i in range(10)),
    *(f"R{i}" for i in range(4)),
]
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    <|{{ message.role }}|>{{ message.content or '' }}
    {%- for call in message.tool_calls or [] -%}
        <tool> {{ call.function.arguments.expression }} </tool>
    {%- endfor -%}
    <|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
RESPONSE_TEMPLATE = {
    "start_anchor": "<|assistant|>",
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {"close": tiny_model.END},
        "tool_calls": {
            "open": "<tool>",
            "close": "</tool>",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "calculate", "arguments": {"expression": "{content}"}},
            },
        },
    },
}
"""How transformers reads a tool call out of sampled text: the other direction of the chat template."""

EPOCHS, CONTROL_EPOCHS = 20, 50
BATCH = 64
LABELLED = 0.15
RANDOM_PROGRAMS = 0.2
BLANKED = 0.1
CONTEXT = 256
MAX_CALLS, MAX_TOKENS = 4, 8
"""As the agent has them."""


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make and warm-start the model of the calculator example.")
    parser.add_argument("--to", type=Path, required=True, help="folder for the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slice", choices=tuple(SLICES), default=next(iter(SLICES)), help="which questions")
    parser.add_argument("--data", type=Path, help="JSONL of your own questions (README.md says what a row holds)")
    parser.add_argument("--labelled", type=float, default=LABELLED, help="share of questions whose equations are shown")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=int, default=EPOCHS)
    length.add_argument("--control", dest="epochs", action="store_const", const=CONTROL_EPOCHS)
    arguments = parser.parse_args(given)
    if arguments.data is not None and arguments.slice != parser.get_default("slice"):
        parser.error(f"--data: your own questions in place of those of --slice {arguments.slice}; give one of them")
    torch.set_num_threads(1)
    rng = random.Random(arguments.seed)
    try:
        training, held_out = SLICES[arguments.slice]() if arguments.data is None else split(read_own(arguments.data))
    except FileNotFoundError as cause:
        raise SystemExit(str(cause)) from cause
    labelled = [problem for problem in training if program(problem)]
    labelled = rng.sample(labelled, int(arguments.labelled * len(labelled)))
    if len(labelled) < BATCH or not held_out:
        raise SystemExit(
            f"{len(labelled)} questions whose equation is shown, {len(held_out)} held out; expected at least {BATCH} and 1: "
            "give more rows with an equation, or a greater share of them with --labelled"
        )
    tokenizer = make_tokenizer([name_numbers(problem.question)[0] for problem in training])
    tiny_model.write(arguments.to, tokenizer, hidden=128, context=CONTEXT, seed=arguments.seed, **LLAMA)
    warm_start(arguments.to, tokenizer, labelled, arguments.epochs, rng)
    report = {
        "model": str(arguments.to),
        "seed": arguments.seed,
        "epochs": arguments.epochs,
        "labelled": len(labelled),
        "held_out": len(held_out),
        "held_out_greedy": round(greedy_success(arguments.to, tokenizer, held_out), 4),
    }
    if arguments.data is not None:
        held_out_rows = [problem.row() for problem in held_out]
        for name, rows in (("train", training_rows(training, arguments.seed)), ("heldout", held_out_rows)):
            path = arguments.to / f"{name}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            report[name] = str(path)
    sys.stdout.write(json.dumps(report) + "\n")


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Whole words, those that occur twice in `texts`; the rest is unknown. A question has 25 to 40 tokens, a tool call 6."""
    tokenizer = tiny_model.word_tokenizer(texts, PROTOCOL, min_times_seen=2, tags=("<tool>", "</tool>"))
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def warm_start(
    folder: Path, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], epochs: int, rng: random.Random
) -> None:
    """Supervised training on demonstrations, in place."""
    seed = rng.randrange(2**31)
    found = ([demonstrate(problem, tokenizer, rng) for problem in batch] for batch in _batches(problems, rng))
    rows = ([row for row in batch if row is not None] for batch in found)
    updates = epochs * len(problems) // BATCH
    imitate(folder, rows, Imitation(steps=updates, linear=True, weight_decay=0.05, dropout=0.2, seed=seed))


def demonstrate(
    problem: Problem, tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> tuple[list[int], list[bool]] | None:
    """A conversation that follows the problem's program, or a random one: its tokens, and which the model should write."""
    question, numbers = name_numbers(problem.question)
    steps = program(problem) if rng.random() >= RANDOM_PROGRAMS else None
    calculator = Calculator(numbers)
    tokens = _prompt(question, tokenizer)
    first = len(tokens)
    mask = [False] * first
    unknown = tokenizer.unk_token_id
    names = {f"N{index}" for index in range(len(numbers))} | {".", ","}
    for at in range(1, first - 2):
        if tokenizer.convert_ids_to_tokens(tokens[at]) not in names and rng.random() < BLANKED:
            tokens[at] = unknown
    for text, own in _turns(steps or _random_program(len(numbers), rng), calculator):
        ids = tokenizer.encode(text, add_special_tokens=False)
        tokens += ids
        mask += [own] * len(ids)
    return (tokens, mask) if calculator.results and len(tokens) <= CONTEXT else None


def greedy_success(folder: Path, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], rows: int = 64) -> float:
    """Share of problems solved at temperature 0: what the agent would do, without agent, gateway and processes."""
    decoder = open_decoder(folder)
    decoder.reserve(rows, CONTEXT + MAX_CALLS * 2 * MAX_TOKENS)
    problems = sorted(problems, key=lambda problem: len(problem.question))
    solved = 0
    for start in range(0, len(problems), rows):
        episodes = [_Episode(problem, tokenizer) for problem in problems[start : start + rows]]
        lengths = torch.tensor([len(episode.pending) for episode in episodes])
        prompts = torch.zeros(len(episodes), int(lengths.max()), dtype=torch.long)
        for row, episode in enumerate(episodes):
            prompts[row, : len(episode.pending)] = torch.tensor(episode.pending)
            episode.pending.clear()
        logits = decoder.extend(0, prompts, torch.zeros_like(lengths), lengths - 1)
        while not all(episode.done for episode in episodes):
            chosen = logits.argmax(-1).tolist()
            fed = torch.tensor([episode.feed(token) for episode, token in zip(episodes, chosen, strict=True)])
            logits = decoder.extend(0, fed[:, None], lengths, torch.zeros_like(lengths))
            lengths = lengths + 1
        solved += sum(episode.solved for episode in episodes)
    return solved / len(problems)


class _Episode:
    """One question being answered, a token at a time."""

    def __init__(self, problem: Problem, tokenizer: PreTrainedTokenizerFast) -> None:
        question, numbers = name_numbers(problem.question)
        self._problem, self._tokenizer, self._calculator = problem, tokenizer, Calculator(numbers)
        self._written: list[int] = []
        self._calls = 0
        self.pending = _prompt(question, tokenizer)
        """Tokens to be read before the model writes again."""
        self.done = self.solved = False

    def feed(self, token: int) -> int:
        """The token that the model reads next: a pending one, else the one it chose."""
        if self.pending:
            return self.pending.pop(0)
        if not self.done:
            self._written.append(token)
            if token == self._tokenizer.eos_token_id or len(self._written) == MAX_TOKENS:
                self._end_message()
        return token

    def _end_message(self) -> None:
        message = self._tokenizer.parse_response(self._written, prefix="")
        self._written = []
        self._calls += 1
        calls = message.get("tool_calls", [])
        for call in calls:
            result = self._calculator.calculate(call["function"]["arguments"]["expression"])
            self.pending += self._tokenizer.encode(f"<|tool|>{result}<|end|>", add_special_tokens=False)
        self.pending += [self._tokenizer.convert_tokens_to_ids("<|assistant|>")]
        self.done = not calls or self._calls == MAX_CALLS
        self.solved = not calls and self._calculator.is_right(message.get("content", ""), self._problem.answer)


def _prompt(question: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    return ids


def _turns(steps: list[Step], calculator: Calculator) -> Iterator[tuple[str, bool]]:
    """Yields each text after the question, and whether the model writes it. A negative final difference is turned round."""
    renamed: dict[str, str] = {}
    for index, (left, operator, right) in enumerate(steps):
        left, right = renamed.get(left, left), renamed.get(right, right)
        for _ in range(2):
            reply = calculator.calculate(f"{left} {operator} {right}")
            yield f"<tool> {left} {operator} {right} </tool><|end|>", True
            yield f"<|tool|>{reply}<|end|><|assistant|>", False
            if not (reply.startswith("neg") and operator == "-" and index == len(steps) - 1):
                break
            left, right = right, left
        renamed[f"R{index}"] = reply.split()[-1]
    yield f"answer {renamed[f'R{len(steps) - 1}']}<|end|>", True


def _random_program(numbers: int, rng: random.Random) -> list[Step]:
    names = [f"N{index}" for index in range(max(1, min(numbers, 10)))]
    left, right = rng.sample(names, 2) if len(names) > 1 else names * 2
    steps = [(left, rng.choice("+-*/"), right)]
    if len(names) > 2 and rng.random() < 0.4:
        operands = ["R0", rng.choice([name for name in names if name not in (left, right)])]
        rng.shuffle(operands)
        steps.append((operands[0], rng.choice("+-*/"), operands[1]))
    return steps


def _batches(problems: list[Problem], rng: random.Random) -> Iterator[list[Problem]]:
    while True:
        order = rng.sample(problems, len(problems))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            yield order[start : start + BATCH]


SLICES: dict[str, Callable[[], tuple[list[Problem], list[Problem]]]] = {
    "templates": lambda: split(load()),
    "all": split_all,
}
"""Training and held-out questions."""

if __name__ == "__main__":
    main()
