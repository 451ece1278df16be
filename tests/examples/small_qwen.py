"""A model that looks like a real one: Qwen2's architecture, special tokens and chat template, a few thousand times smaller.

It is taught to say a few fixed things, tool calls among them, so that what an example does with a real model can be seen
without one. Nothing of it can be learned from; it only has to be run.
"""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from agentlightning.engines.local.learner import Learner
from agentlightning.training_types import Loss, TrainingSequence
from build import learner_setup

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>"]
CONTEXT = 4096
UPDATES, BATCH, RATE = 150, 4, 3e-3

Message = dict[str, Any]


def write_small_qwen(folder: Path, conversations: list[list[Message]], tools: list[Message] | None) -> None:
    """Make it in `folder`, taught the assistant's part of these conversations."""
    template = Path(os.environ["AGL_DATA"], "chat_templates", "qwen2_5.jinja").read_text(encoding="utf-8")
    tokenizer = _tokenizer(template, [json.dumps([conversation, tools]) for conversation in conversations])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    _teach(folder, [_sequence(tokenizer, conversation, tools) for conversation in conversations])


def _tokenizer(template: str, texts: list[str]) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=CONTEXT
    )
    tokenizer.chat_template = template
    return tokenizer


def _sequence(
    tokenizer: PreTrainedTokenizerFast, conversation: list[Message], tools: list[Message] | None
) -> TrainingSequence:
    text = tokenizer.apply_chat_template(conversation, tools=tools, tokenize=False)
    tokens: list[int] = []
    mask: list[bool] = []
    for piece in re.split(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>)", text, flags=re.DOTALL):
        ids = tokenizer.encode(piece, add_special_tokens=False)
        tokens += ids
        mask += [bool(mask) and not piece.startswith("\n<|im_start|>") and piece.endswith("<|im_end|>")] * len(ids)
    return TrainingSequence(
        rollout_id="",
        tokens=tokens,
        mask=mask,
        logprobs=[0.0] * len(tokens),
        advantages=[1.0] * len(tokens),
        weights=[1 / sum(mask) / BATCH * own for own in mask],
        segments=[],
    )


def _teach(folder: Path, rows: list[TrainingSequence]) -> None:
    learner = Learner(folder, learner_setup(optimizer={"type": "muon", "learning_rate": 0.02 / RATE}))
    rng = random.Random(0)
    for update in range(UPDATES):
        learner.forward_backward([rng.choice(rows) for _ in range(BATCH)], Loss(name="sft"))
        learner.optim_step(RATE * (1 - update / UPDATES), 1.0)
    learner.export(folder)
