"""Tiny models, built once a session."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)


sys.path.append(str(Path(__file__).parents[1] / "gateway"))  # its toy model


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """build("Qwen3", seed=1, **config) -> folder of a tiny random model with a tokenizer of 64 one-letter words."""

    def make(family: str = "Llama", seed: int = 0, **changes: Any) -> Path:
        import transformers

        torch.manual_seed(seed)
        settings: dict[str, Any] = {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.3,
            "bos_token_id": None,
            "eos_token_id": 1,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
        }
        if family == "Qwen3":
            settings["head_dim"] = 8
        if family == "GPT2":
            settings = {
                "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.3,
                "bos_token_id": None, "eos_token_id": 1,
            }  # fmt: skip
        config = getattr(transformers, f"{family}Config")(**{**settings, **changes})
        model = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:  # biases start at 0 and norms at 1: make them matter
                    parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name else 0.3))
        folder = tmp_path_factory.mktemp(f"{family}-{seed}")
        model.save_pretrained(folder)
        _write_tokenizer(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def llama(build: Callable[..., Path]) -> Path:
    return build("Llama")


@pytest.fixture(scope="session")
def other_llama(build: Callable[..., Path]) -> Path:
    return build("Llama", seed=7)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<end>"] + [chr(ord("!") + i) for i in range(62)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>").save_pretrained(folder)
