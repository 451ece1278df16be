"""A Qwen2 of a few million random parameters with a ChatML tokenizer, made on the spot: enough for vLLM to be vLLM."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "gateway"))  # its tokenizer

import torch
from toy_model import write_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed

VOCABULARY = 512
CONTEXT = 512
END = 2


def write_model(folder: Path, seed: int, ends: Sequence[int] = (END,)) -> Path:
    """A model folder; another seed is another model of the same shape. `ends` end completions; its tokenizer has END."""
    write_tokenizer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|pad|>", "model_max_length": CONTEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    set_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).to(torch.float32)
    model.generation_config.eos_token_id = [*ends]
    model.save_pretrained(folder)
    return folder
