"""The tiny model of the engine contract: random weights that differ everywhere, 64 words, heads as wide as vLLM asks for."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

WORDS = ["<pad>", "<end>", *(chr(ord("!") + place) for place in range(62))]
END = 1


def write_contract_model(folder: Path, seed: int = 0, *, tied: bool = True, context: int = 512) -> Path:
    """Writes a Llama of 150,000 parameters and its tokenizer of one-letter words into a folder that is not there yet."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=context,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=0,
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms begin at 1: make them matter
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=WORDS[END], pad_token=WORDS[0]
    ).save_pretrained(folder)
    return folder
