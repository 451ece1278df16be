"""A tiny language model made on the spot: a tokenizer trained on a few thousand short texts and a fresh Llama.

The warm start of the demo and the calculator example drive it; it knows nothing of tasks or training. What it writes is
an ordinary transformers folder, so everything that loads a real checkpoint loads this one.

The tokenizer keeps words whole and digits single, which halves the length of a conversation against characters and still
lets a small model copy any number. Every message of its chat template stands between special tokens, so encoding the
messages one by one gives the ids of the whole conversation: a later prompt always begins with the earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROLES = ("user", "assistant", "tool", "system")
PAD, END = "<|pad|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build(
    folder: Path,
    texts: Iterable[str],
    *,
    hidden: int = 64,
    layers: int = 3,
    seed: int = 0,
    special_words: Sequence[str] = (),
    vocabulary: int = 400,
    context: int = 512,
) -> int:
    """Write tokenizer and untrained model to `folder`; returns the number of parameters.

    `special_words` are words such as `<sql>` that become one token each and stay visible when decoded. `vocabulary` is
    the most tokens before those. Characters that are neither ASCII nor in `texts` are dropped when encoding.
    """
    tokenizer = train_tokenizer(texts, special_words, vocabulary)
    model = fresh_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, hidden, layers, context, seed)
    tokenizer.model_max_length = context
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def train_tokenizer(texts: Iterable[str], special_words: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-pair encoding inside whole words; the same texts give the same tokenizer."""
    special = [PAD, END, *(f"<|{role}|>" for role in ROLES)]
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
        special_tokens=special,
        initial_alphabet=["Ġ", "Ċ", *(chr(code) for code in range(33, 127))],  # blank, newline and printable ASCII
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in special_words])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, extra_special_tokens=special[2:]
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def fresh_model(tokens: int, eos: int, pad: int, hidden: int, layers: int, context: int, seed: int) -> LlamaForCausalLM:
    """A Llama with random weights from `seed`; leaves torch's own random state as it was."""
    config = LlamaConfig(
        vocab_size=tokens,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        initializer_range=0.05,  # Llama's 0.02 is meant for widths in the thousands and starts this one too flat
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
