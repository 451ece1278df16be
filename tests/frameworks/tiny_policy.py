"""A language model of no sense: random weights, and a template that knows tools. It answers every prompt with noise."""

from __future__ import annotations

from pathlib import Path

import torch
from sdk_house import TEMPLATE
from toy_model import write_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 16384
"""Tokens of a few letters each: the longest first prompt of a framework takes about 7,000."""


def build_policy(folder: Path) -> Path:
    """A folder that every engine loads."""
    write_tokenizer(folder, TEMPLATE)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
