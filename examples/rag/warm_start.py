"""Makes the model that the retrieval example trains: a tokenizer, a fresh Llama (0.1 million parameters), a warm start.

    python examples/rag/warm_start.py --seed 0 --to runs/rag-model

The warm start teaches the protocol and nothing else: its demonstrations search for names at random, so no question's gold
paragraphs are used. Reinforcement learning then sees rewards only. With --control it is the control: more of the same
training, no reinforcement learning.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from agent import MOST_CALLS, SEARCHER, Desk
from data import Question, dev, load
from names import BLANK, MOST_NAMES, OTHER, Names
from retriever import Session, retriever
from scoring import retrieval_reward
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentlightning.demo.warm_start import encode, to_sequences
from agentlightning.engines.local.decoder import open_decoder
from agentlightning.engines.local.learner import Learner
from agentlightning.types import JSON, Loss

UNKNOWN, PAD, END, SEARCH = "<unk>", "<|pad|>", "<|end|>", "<search>"
ROLES = ["<|user|>", "<|assistant|>", "<|tool|>", "<|system|>"]
PROTOCOL = ["done", "none", OTHER, "D", "N", BLANK, *(f"E{i}" for i in range(MOST_NAMES))]
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
EPOCHS, CONTROL_EPOCHS = 50, 100
ENDS_AT_RANDOM = 0.12
"""Before each search of a demonstration."""
WORDS_SEEN = 15
"""Times that a word must occur among the training questions and their paragraphs; the rest is unknown."""
BLANKED = 0.1
LEARNING_RATE, MUON_LEARNING_RATE = 3e-3, 0.02
CONTEXT = 320


def main() -> None:
    parser = argparse.ArgumentParser(description="Make and warm-start the model of the retrieval example.")
    parser.add_argument("--to", type=Path, required=True, help="folder for the model")
    parser.add_argument("--seed", type=int, default=0)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=int, default=EPOCHS)
    length.add_argument(
        "--control", action="store_true", help=f"{CONTROL_EPOCHS} epochs, in place of training on reward"
    )
    arguments = parser.parse_args()
    epochs = CONTROL_EPOCHS if arguments.control else arguments.epochs
    torch.set_num_threads(1)
    rng = random.Random(arguments.seed)
    try:
        questions = load("2wiki", "train")
        held_out = dev("2wiki")
    except FileNotFoundError as cause:
        raise SystemExit(str(cause)) from cause
    tokenizer = make_tokenizer(list(_texts(questions)))
    tokenizer.save_pretrained(arguments.to)
    make_model(tokenizer, arguments.seed).save_pretrained(arguments.to)
    warm_start(arguments.to, tokenizer, questions, epochs, rng)
    report = {
        "model": str(arguments.to),
        "seed": arguments.seed,
        "epochs": epochs,
        "labelled": 0,
        "held_out": len(held_out),
        "held_out_greedy": round(greedy_reward(arguments.to, tokenizer, held_out), 4),
    }
    sys.stdout.write(json.dumps(report) + "\n")


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Whole words, those that occur often in `texts`; the rest is unknown. A search is three tokens."""
    count = Counter(word for text in texts for word in text.split())
    words = [UNKNOWN, PAD, END, *ROLES, SEARCH, *PROTOCOL]
    words += [word for word, times in count.most_common() if times >= WORDS_SEEN and word not in words]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in (UNKNOWN, PAD, END, *ROLES)])
    core.add_tokens([AddedToken(SEARCH, special=False, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token=UNKNOWN, pad_token=PAD, eos_token=END, model_max_length=CONTEXT
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:  # what is added to the residual stream starts small (GPT-2)
            for matrix in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                matrix /= math.sqrt(2 * config.num_hidden_layers)
    return model


def warm_start(
    folder: Path, tokenizer: PreTrainedTokenizerFast, questions: list[Question], epochs: int, rng: random.Random
) -> None:
    """Supervised training on demonstrations, in place: warm-up over 20 updates, then linear decay to a twentieth."""
    learner = Learner(
        folder,
        threads=1,
        optimizer="muon",
        muon_learning_rate_ratio=MUON_LEARNING_RATE / LEARNING_RATE,
        weight_decay=0.05,
        seed=rng.randrange(2**31),
    )
    updates = epochs * len(questions) // BATCH
    for update in range(updates):
        tasks = [rng.choice(questions).row(rng.randrange(2**31), BLANKED) for _ in range(BATCH)]
        batch = to_sequences([encode(tokenizer, demonstration(task, rng)) for task in tasks])
        learner.forward_backward(batch, Loss(name="sft"))
        rate = min(1, (update + 1) / 20) * max(0.05, 1 - update / updates)
        learner.optim_step(LEARNING_RATE * rate, 1.0)
    learner.export(folder)


def demonstration(task: dict[str, Any], rng: random.Random) -> list[JSON]:
    """A conversation that searches for names at random; how many is at random, too.

    Each has habits of its own: how often it takes a name of the question, one of the last paragraph, any, or the last
    again. So the model learns to tell them apart, and not which of them is worth anything.
    """
    names = Names(task["question"], task["draw"], task["blanked"])
    desk = Desk(Session(retriever()), names)
    messages: list[JSON] = [{"role": "user", "content": names.question()}]
    asked, last, searched = names.shown, names.shown, list[str]()
    habits = [rng.expovariate(1) for _ in range(4)]
    for _ in range(MOST_CALLS - 1):
        if not names.shown or rng.random() < ENDS_AT_RANDOM:
            break
        places = [_without(asked, searched), _without(last, searched), names.shown, searched[-1:]]
        possible = [(place, weight) for place, weight in zip(places, habits, strict=True) if place]
        (place,) = rng.choices([place for place, _ in possible], [weight for _, weight in possible])
        searched.append(rng.choice(place))
        reply = desk.search(searched[-1])
        last = [word for word in dict.fromkeys(reply.split()) if word in names.shown]
        function = {"name": "search", "arguments": {"query": searched[-1]}}
        messages += [
            {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": reply},
        ]
    return [*messages, {"role": "assistant", "content": "done"}]


def _without(names: list[str], searched: list[str]) -> list[str]:
    return [name for name in names if name not in searched]


def greedy_reward(folder: Path, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, Any]]) -> float:
    """Mean reward at temperature 0: what the agent would earn, without agent, gateway and processes."""
    decoder = open_decoder(folder)
    most_tokens = SEARCHER.model_settings.max_tokens or 0
    decoder.reserve(len(rows), 2 * CONTEXT)
    episodes = [_Episode(row, tokenizer, most_tokens) for row in rows]
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

    def __init__(self, row: dict[str, Any], tokenizer: PreTrainedTokenizerFast, most_tokens: int) -> None:
        self._names = Names(row["question"], row["draw"], row["blanked"])
        self._desk = Desk(Session(retriever()), self._names)
        self._supporting = row["supporting"]
        self._tokenizer, self._most_tokens = tokenizer, most_tokens
        self._written: list[int] = []
        self._calls = 0
        self.pending = _prompt(self._names.question(), tokenizer)
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
        self.done = not calls or self._calls == MOST_CALLS
        for call in calls:  # a tool call of the last message is executed, too
            reply = self._desk.search(call["function"]["arguments"]["query"])
            self.pending += self._tokenizer.encode(f"<|tool|>{reply}{END}", add_special_tokens=False)
        self.pending += [self._tokenizer.convert_tokens_to_ids("<|assistant|>")]
        ended = not calls and message.get("content") == "done"
        self.reward = retrieval_reward(self._desk.session.found, self._supporting, ended)


def _prompt(question: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    return ids


def _texts(questions: list[Question]) -> Iterator[str]:
    """The questions, and what three searches for them show."""
    for question in questions:
        names = Names(question.question)
        yield names.question()
        session = Session(retriever())
        for _ in range(3):
            if (paragraph := session.search(question.question)) is not None:
                yield names.paragraph(paragraph.title, paragraph.text)


if __name__ == "__main__":
    main()
