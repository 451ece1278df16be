"""A tiny language model made on the spot: a tokenizer trained on a few thousand short texts and a fresh Llama.

It writes an ordinary transformers folder, so everything that loads a real checkpoint loads this one. The tokenizer keeps
words whole and digits single. Every message of its chat template stands between special tokens, so encoding the messages
one by one gives the ids of the whole conversation: a later prompt always begins with the earlier one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROLES = ("user", "assistant", "tool", "system")
ROLE_TOKENS = [f"<|{role}|>" for role in ROLES]
PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<unk>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build(
    folder: Path, texts: Iterable[str], *, special_words: Sequence[str] = (), vocabulary: int = 400, **model: Any
) -> int:
    """Writes a tokenizer of `texts` and an untrained model to `folder`; returns the number of parameters.

    `special_words`, such as `<sql>`, become one token each; `vocabulary` is the most tokens before those. Characters that
    are neither ASCII nor in `texts` are dropped when encoding. model: of `write`.
    """
    return write(folder, train_tokenizer(texts, special_words, vocabulary), **model)


def write(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden: int = 64,
    layers: int = 3,
    context: int = 512,
    seed: int = 0,
    scaled: bool = False,
    **config: Any,
) -> int:
    """Writes the tokenizer and a Llama with random weights to `folder`; returns the number of parameters. scaled: additions
    to the residual stream start small, as in GPT-2. config: of LlamaConfig. Torch's own random state stays as it was."""
    table = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": context,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,  # Llama's 0.02 is meant for widths in the thousands and starts this one too flat
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**{**table, **config}))
    if scaled:
        with torch.no_grad():
            for layer in model.model.layers:
                for matrix in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                    matrix /= math.sqrt(2 * layers)
    tokenizer.model_max_length = context
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def train_tokenizer(
    texts: Iterable[str], special_words: Sequence[str], vocabulary: int, min_times_seen: int = 0
) -> PreTrainedTokenizerFast:
    """Trains byte-pair encoding inside whole words; the same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r" ?[A-Za-z]+|[0-9]|[^A-Za-z0-9 ]| ")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=min_times_seen,
        special_tokens=[PAD, END, *ROLE_TOKENS],
        initial_alphabet=["Ġ", "Ċ", *(chr(code) for code in range(33, 127))],  # blank, newline and printable ASCII
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _chat_tokenizer(tokenizer, special_words, extra_special_tokens=ROLE_TOKENS)


def word_tokenizer(
    texts: Iterable[str], protocol: Iterable[str], *, min_times_seen: int, tags: Sequence[str] = (), split: bool = True
) -> PreTrainedTokenizerFast:
    """Makes a tokenizer of whole words: those of the protocol, and those that `texts` have often enough. split: at
    punctuation, too, not at blanks alone."""
    special = [UNKNOWN, PAD, END, *ROLE_TOKENS]
    count = Counter(word for text in texts for word in text.split())
    frequent = (word for word, times in count.most_common() if times >= min_times_seen)
    words = dict.fromkeys([*special, *tags, *protocol, *frequent])
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Whitespace() if split else pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    return _chat_tokenizer(core, tags, unk_token=UNKNOWN)


def _chat_tokenizer(core: Tokenizer, tags: Sequence[str], **options: Any) -> PreTrainedTokenizerFast:
    core.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END, **options)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
