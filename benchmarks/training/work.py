"""Work for benchmarks/training.py and gpu.py: a model of 5 million parameters, tokenizers, and rows to train on."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agentlightning.training_types import TrainingSequence

VOCABULARY = 2048


def write_model(folder: Path) -> int:
    """A Llama of 4.95 million random parameters and a tokenizer of one word an id; returns the number of parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCABULARY)
    return sum(p.numel() for p in model.parameters())


def write_tokenizer(folder: Path, count: int) -> None:
    """A tokenizer of one word an id, and of an end token behind them."""
    words = {word(i): i for i in range(count)} | {"<end>": count}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=word(1)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token=word(0)).save_pretrained(folder)


def word(token: int) -> str:
    return f"w{token}"


def tokens(count: int, draw: random.Random) -> list[int]:
    return [draw.randrange(2, VOCABULARY) for _ in range(count)]


def row(ids: list[int], calls: list[tuple[int, int]]) -> TrainingSequence:
    """A sequence whose calls are the given [start, end) ranges, with an advantage of 1."""
    mask = [any(start <= at < end for start, end in calls) for at in range(len(ids))]
    ones = [float(sampled) for sampled in mask]
    return TrainingSequence(
        rollout_id="r",
        tokens=ids,
        mask=mask,
        logprobs=[-7.6 * one for one in ones],
        advantages=ones,
        weights=ones,
        segments=calls,
    )


def turns(
    rollouts: int, prompt: int = 200, turn: int = 30, count: int = 3
) -> tuple[list[TrainingSequence], list[TrainingSequence]]:
    """(one sequence a rollout, one a call) of rollouts of `count` turns: nothing stands between an answer and the next."""
    draw = random.Random(1)
    merged, calls = [], []
    for _ in range(rollouts):
        ids = tokens(prompt + count * turn, draw)
        ends = [(prompt + at * turn, prompt + (at + 1) * turn) for at in range(count)]
        merged.append(row(ids, ends))
        calls += [row(ids[:end], [(start, end)]) for start, end in ends]
    return merged, calls


def branches(rollouts: int, prompt: int = 256, part: int = 64) -> list[TrainingSequence]:
    """Rollouts that share a prompt; each answers once and goes on in two ways, which makes two sequences of it.

    The tokens of the first answer are trained once, in the first of the two.
    """
    draw = random.Random(2)
    shared, found = tokens(prompt, draw), []
    for _ in range(rollouts):
        trunk = shared + tokens(part, draw)
        first, second = [(prompt, prompt + part)], [(prompt + part, prompt + 2 * part)]
        found += [row(trunk + tokens(part, draw), first + second), row(trunk + tokens(part, draw), second)]
    return found


def unique(rows: list[TrainingSequence]) -> int:
    """Tokens of the prefix tree of these rows."""
    from agentlightning.engines.local.batches import build_tree

    return len(build_tree([row.tokens for row in rows]).tokens)
