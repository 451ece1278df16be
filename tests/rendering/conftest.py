"""A tokenizer trained on the spot, and renderers of several chat templates over it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from toy_templates import CHATML, ENDS, HERMES, LLAMA, PLAIN

from agentlightning.rendering.completion_parser import Syntax
from agentlightning.rendering.renderer import Renderer

SPECIAL = [
    "<|pad|>",
    "<|begin_of_text|>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|tool|>",
]
TEXTS = [
    "the weather in Paris and Oslo is sunny, the answer is 42",
    "what do you know about it?\n\nHello there, user\n",
]


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    plain = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    tokenizer.add_tokens([AddedToken(text, special=False) for text in plain])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def make_renderer(tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Renderer]:
    """make_renderer(template, end) -> Renderer of a folder with that template; the rest is the configuration's."""

    def make(
        template: str | None,
        end: str = "<|im_end|>",
        chat_template: str | None = None,
        tool_syntax: Syntax | None = None,
        **settings: object,
    ) -> Renderer:
        folder = tmp_path_factory.mktemp("model")
        (folder / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
        config = {"eos_token": end, "bos_token": "<|begin_of_text|>", "chat_template": template, **settings}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return Renderer(folder, chat_template=chat_template, tool_syntax=tool_syntax)

    return make


@pytest.fixture(scope="session")
def renderers(make_renderer: Callable[..., Renderer]) -> dict[str, Renderer]:
    """Renderers of the toy templates by name."""
    templates = {"plain": PLAIN, "chatml": CHATML, "llama": LLAMA, "hermes": HERMES}
    return {name: make_renderer(text, ENDS.get(name, "<|im_end|>")) for name, text in templates.items()}
