"""Makes the model that the retrieval example trains: a tokenizer, a fresh Llama (0.1 million parameters), a warm start.

    python examples/rag/warm_start.py --seed 0 --to runs/rag-model
    python examples/rag/warm_start.py --seed 0 --to runs/rag-spans-model --slice musique

The warm start teaches the protocol and nothing else: its demonstrations search for names at random (and answer with any that
was shown), so no question's gold paragraphs or answer are used. Reinforcement learning then sees rewards only. With
--control it is the control: more of the same training, no reinforcement learning.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from agent import MAX_CALLS, QUESTION, SEARCHER, SearchContext, named, span_of, spanned
from data import Question, heldout_rows, load, read_own, span_questions, training_rows
from names import BLANK, MAX_NAMES, OTHER, SPANS, Names
from scoring import answer_reward, retrieval_reward
from transformers import PreTrainedTokenizerFast

from agentlightning.demo import tiny_model
from agentlightning.demo.imitation import Imitation, Row, encode, imitate
from agentlightning.demo.tiny_model import END
from agentlightning.engines.local.decoder import open_decoder
from agentlightning.records import JSON

SEARCH = "<search>"
LLAMA = {"intermediate_size": 176, "initializer_range": 0.04, "scaled": True}
PROTOCOL = ["done", "none", OTHER, "D", "N", BLANK, *(f"E{i}" for i in range(MAX_NAMES))]
SPAN_PROTOCOL = [
    *("answer", QUESTION, "none", BLANK, *SPANS),
    *(f"{letter}{i}" for letter, most in SPANS.items() for i in range(most)),
]
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    <|{{ message.role }}|>{{ message.content or '' }}
    {%- for call in message.tool_calls or [] -%}
        <search> {{ call.function.arguments.query }}
    {%- endfor -%}
    <|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
RESPONSE_TEMPLATE = {
    "start_anchor": "<|assistant|>",
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {"close": END},
        "tool_calls": {
            "open": SEARCH,
            "close": END,
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "search", "arguments": {"query": "{content}"}}},
        },
    },
}
"""How transformers reads a tool call out of sampled text: the other direction of the chat template."""

BATCH = 32
ENDS_AT_RANDOM = 0.12
"""Before each search of a demonstration."""
BLANKED = 0.1


@dataclass(frozen=True)
class Slice:
    """The recipe of the model of one slice of the task."""

    questions: Callable[[], tuple[list[Question], list[Question]]]
    """Training, held out."""
    read: Callable[[dict[str, Any]], tuple[Names, SearchContext]]
    """Task -> how the model sees it."""
    end: Callable[[Names, list[str], list[str], random.Random], str]
    """Names, those of the question, those of the last paragraph -> the last words of a demonstration."""
    queries: tuple[str, ...]
    """Possible besides names."""
    reward: Callable[[dict[str, Any], Names, SearchContext, str], float]
    """Task, names, searches, last words ("" where there are none)."""
    protocol: list[str]
    words_seen: int
    """Times that a word must occur among the training questions and their paragraphs; the rest is unknown."""
    context: int
    epochs: int
    control_epochs: int


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make and warm-start the model of the retrieval example.")
    parser.add_argument("--to", type=Path, required=True, help="folder for the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slice", choices=tuple(SLICES), default=next(iter(SLICES)), help="which part of the task")
    parser.add_argument("--data", type=Path, help="JSONL of your own questions (README.md says what a row holds)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=int, help="how often each question is seen")
    length.add_argument("--control", action="store_true", help="twice as often, in place of training on reward")
    arguments = parser.parse_args(given)
    chosen = SLICES[arguments.slice]
    epochs = arguments.epochs or (chosen.control_epochs if arguments.control else chosen.epochs)
    torch.set_num_threads(1)
    rng = random.Random(arguments.seed)
    try:
        if arguments.data is None:
            questions, others = chosen.questions()
        else:
            arguments.to.mkdir(parents=True, exist_ok=True)
            questions, others = read_own(arguments.data, arguments.to / "corpus.jsonl")
    except FileNotFoundError as cause:
        raise SystemExit(str(cause)) from cause
    held_out = heldout_rows(others)
    if not questions or not held_out:
        raise SystemExit(
            f"{arguments.data}: {len(questions) + len(held_out)} questions; expected enough to hold out a fifth"
        )
    tokenizer = make_tokenizer(list(_texts(questions, chosen)), chosen.protocol, chosen.words_seen)
    tiny_model.write(arguments.to, tokenizer, hidden=64, context=chosen.context, seed=arguments.seed, layers=2, **LLAMA)
    warm_start(arguments.to, tokenizer, questions, epochs, rng, chosen)
    report = {
        "model": str(arguments.to),
        "seed": arguments.seed,
        "epochs": epochs,
        "labelled": 0,
        "held_out": len(held_out),
        "held_out_greedy": round(greedy_reward(arguments.to, tokenizer, held_out, chosen), 4),
    }
    if arguments.data is not None:
        for name, rows in (("train", training_rows(questions, arguments.seed)), ("heldout", held_out)):
            path = arguments.to / f"{name}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            report[name] = str(path)
    sys.stdout.write(json.dumps(report) + "\n")


def make_tokenizer(
    texts: list[str], protocol: Sequence[str] = PROTOCOL, words_seen: int = 15
) -> PreTrainedTokenizerFast:
    """Whole words, those that occur often in `texts`; the rest is unknown. A search is three tokens."""
    tokenizer = tiny_model.word_tokenizer(texts, protocol, min_times_seen=words_seen, tags=(SEARCH,), split=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def warm_start(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    questions: list[Question],
    epochs: int,
    rng: random.Random,
    chosen: Slice,
) -> None:
    """Supervised training on demonstrations, in place."""
    seed = rng.randrange(2**31)

    def rows() -> Iterator[list[Row]]:
        while True:
            tasks = [rng.choice(questions).row(rng.randrange(2**31), BLANKED) for _ in range(BATCH)]
            yield [encode(tokenizer, demonstration(task, rng, chosen)) for task in tasks]

    updates = epochs * len(questions) // BATCH
    imitate(folder, rows(), Imitation(steps=updates, linear=True, weight_decay=0.05, seed=seed))


def demonstration(task: dict[str, Any], rng: random.Random, chosen: Slice) -> list[JSON]:
    """A conversation that searches for names at random; how many is at random, too.

    Each has habits of its own: how often it takes a name of the question, one of the last paragraph, any, or the last
    again. So the model learns to tell them apart, and not which of them is worth anything.
    """
    names, context = chosen.read(task)
    messages: list[JSON] = [{"role": "user", "content": names.question()}]
    asked, last, searched = names.shown, names.shown, list[str]()
    habits = [rng.expovariate(1) for _ in range(4 + len(chosen.queries))]
    for _ in range(MAX_CALLS - 1):
        if not (names.shown or chosen.queries) or rng.random() < ENDS_AT_RANDOM:
            break
        places = [_without(asked, searched), _without(last, searched), names.shown, searched[-1:]]
        places += [[query] for query in chosen.queries]
        possible = [(place, weight) for place, weight in zip(places, habits, strict=True) if place]
        (place,) = rng.choices([place for place, _ in possible], [weight for _, weight in possible])
        searched.append(rng.choice(place))
        reply = context.search(searched[-1])
        last = [word for word in dict.fromkeys(reply.split()) if word in names.shown]
        function = {"name": "search", "arguments": {"query": searched[-1]}}
        messages += [
            {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": reply},
        ]
    return [*messages, {"role": "assistant", "content": chosen.end(names, asked, last, rng)}]


def any_span(names: Names, asked: list[str], last: list[str], rng: random.Random) -> str:
    """Any name that was shown, of the last paragraph or not, seldom one of the question."""
    place = next(filter(None, rng.sample([_without(last, asked), _without(names.shown, asked)], 2)), names.shown)
    return f"answer {rng.choice(place) if place else OTHER}"


def _without(names: list[str], searched: list[str]) -> list[str]:
    return [name for name in names if name not in searched]


def greedy_reward(folder: Path, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, Any]], chosen: Slice) -> float:
    """Mean reward at temperature 0: what the agent would earn, without agent, gateway and processes."""
    decoder = open_decoder(folder)
    most_tokens = SEARCHER.model_settings.max_tokens or 0
    decoder.reserve(len(rows), 2 * chosen.context)
    episodes = [_Episode(row, tokenizer, most_tokens, chosen) for row in rows]
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
    return sum(episode.reward for episode in episodes) / len(rows)


class _Episode:
    """One question being searched for, a token at a time."""

    def __init__(
        self, row: dict[str, Any], tokenizer: PreTrainedTokenizerFast, most_tokens: int, chosen: Slice
    ) -> None:
        names, self._context = chosen.read(row)
        self._row, self._names, self._chosen = row, names, chosen
        self._tokenizer, self._most_tokens = tokenizer, most_tokens
        self._written: list[int] = []
        self._calls = 0
        self.pending = _prompt(names.question(), tokenizer)
        """Tokens to be read before the model writes again."""
        self.done = False
        self.reward = 0.0

    def feed(self, token: int) -> int:
        """The token that the model reads next: a pending one, else the one it chose."""
        if self.pending:
            return self.pending.pop(0)
        if not self.done:
            self._written.append(token)
            if token == self._tokenizer.eos_token_id or len(self._written) == self._most_tokens:
                self._end_message()
        return token

    def _end_message(self) -> None:
        message = self._tokenizer.parse_response(self._written, prefix="")
        self._written = []
        self._calls += 1
        calls = message.get("tool_calls", [])
        self.done = not calls or self._calls == MAX_CALLS
        for call in calls:  # a tool call of the last message is executed, too
            reply = self._context.search(call["function"]["arguments"]["query"])
            self.pending += self._tokenizer.encode(f"<|tool|>{reply}{END}", add_special_tokens=False)
        self.pending += [self._tokenizer.convert_tokens_to_ids("<|assistant|>")]
        words = "" if calls else message.get("content", "")
        self.reward = self._chosen.reward(self._row, self._names, self._context, words)


def _prompt(question: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    return ids


def _texts(questions: list[Question], chosen: Slice) -> Iterator[str]:
    """The questions, and what three searches for them show."""
    for question in questions:
        names, context = chosen.read(question.row())
        yield names.question()
        for _ in range(3):
            if (paragraph := context.session.search(question.question)) is not None:
                yield names.paragraph(paragraph.title, paragraph.text)


SLICES = {
    "2wiki": Slice(
        questions=lambda: (load("2wiki", "train"), load("2wiki", "dev")),
        read=named,
        end=lambda *_: "done",
        queries=(),
        reward=lambda row, _, context, words: retrieval_reward(
            context.session.found, row["supporting"], words == "done"
        ),
        protocol=PROTOCOL,
        words_seen=15,
        context=320,
        epochs=50,
        control_epochs=100,
    ),
    "musique": Slice(
        questions=lambda: (span_questions(), load("musique", "dev")),
        read=spanned,
        end=any_span,
        queries=(QUESTION,),
        reward=lambda row, names, _, words: answer_reward(span_of(words, names), [row["answer"], *row["aliases"]]),
        protocol=SPAN_PROTOCOL,
        words_seen=6,
        context=448,
        epochs=30,
        control_epochs=60,
    ),
}


if __name__ == "__main__":
    main()
