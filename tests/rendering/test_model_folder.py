"""Forms of a model's folder: the prompt's ids are those of transformers, and what a folder lacks is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conversations import TOOLS
from toy_templates import CHATML, LLAMA

from agentlightning.engines.folders import copy_tokenizer
from agentlightning.errors import ModelError
from agentlightning.rendering.model_folder import CHAT_TEMPLATES, end_ids, rendering_files
from agentlightning.rendering.renderer import Renderer

Form = Callable[[Path], None]

MESSAGES = [
    {"role": "system", "content": "be <fresh> the"},
    {"role": "user", "content": " what<|extra|>is it?\n"},
    {"role": "assistant", "content": "42 <s>"},
    {"role": "user", "content": "and <|end|>?"},
]
WITH_TOOLS = "{{ '<|begin_of_text|>' + tools | tojson }}" + CHATML
NAMED = "{{ bos_token }}{{ sep_token }}{{ image_token }}{{ eos_token }}{{ pad_token }}" + CHATML


def config(**changes: Any) -> Form:
    """tokenizer_config.json, changed; a value of ... is left out."""
    given = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|begin_of_text|>",
        "chat_template": CHATML,
    }
    settings = {name: value for name, value in {**given, **changes}.items() if value is not ...}
    return lambda folder: write(folder, "tokenizer_config.json", settings)


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def file(name: str, content: Any) -> Form:
    return lambda folder: write(folder, name, content)


def several(*forms: Form) -> Form:
    def make(folder: Path) -> None:
        for form in forms:
            form(folder)

    return make


def token(text: str, **flags: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": text, **plain, **flags}


def declared(folder: Path) -> dict[str, Any]:
    """The tokenizer's own added tokens, as tokenizer_config.json lists them."""
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    return {str(one.pop("id")): one for one in tokens}


def next_id(folder: Path) -> int:
    return len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]) + 4


def with_declared(**changes: Any) -> Form:
    def make(folder: Path) -> None:
        fresh = {str(next_id(folder)): token("<fresh>", **changes)}
        config(added_tokens_decoder={**declared(folder), **fresh})(folder)

    return make


FORMS: dict[str, Form] = {
    "a template in the settings": config(),
    "a template in its own file": several(config(chat_template=LLAMA), file("chat_template.jinja", CHATML)),
    "a list of templates": config(
        chat_template=[
            {"name": "default", "template": LLAMA},
            {"name": "tool_use", "template": WITH_TOOLS},
            {"name": "rag", "template": "x"},
        ]
    ),
    "a list with one template": config(chat_template=[{"name": "default", "template": LLAMA}]),
    "files of templates": several(
        config(),
        file("chat_template.jinja", LLAMA),
        file(f"{CHAT_TEMPLATES}/tool_use.jinja", WITH_TOOLS),
    ),
    "special tokens as objects": config(
        chat_template=LLAMA,
        eos_token={"__type": "AddedToken", **token("<|eot_id|>")},
        bos_token={"__type": "AddedToken", **token("<|endoftext|>")},
    ),
    "special tokens in a file of their own": several(
        config(eos_token=..., bos_token=..., chat_template=LLAMA),
        file("special_tokens_map.json", {"eos_token": "<|eot_id|>", "bos_token": token("<|begin_of_text|>")}),
    ),
    "more special tokens": config(
        chat_template=NAMED, sep_token="<|end|>", image_token="<|user|>", pad_token="<|pad|>"
    ),
    "special tokens with names of their own": config(
        chat_template=NAMED,
        sep_token="<|end|>",
        pad_token=None,
        extra_special_tokens={"image_token": "<|user|>"},
    ),
    "no first token": config(chat_template=LLAMA, bos_token=None),
    "a word of the vocabulary as a special token": config(additional_special_tokens=["the"]),
    "a word of the vocabulary as a named token": config(unk_token="the"),
    "a token that only the settings add": with_declared(),
    "a token that the settings add as a plain one": with_declared(special=False, normalized=True, lstrip=True),
    "a token in the file of older folders": lambda folder: several(
        config(), file("added_tokens.json", {"<fresh>": next_id(folder)})
    )(folder),
}


@pytest.fixture
def folder(tokenizer_file: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(tokenizer_file, folder / "tokenizer.json")
    write(folder, "config.json", {"eos_token_id": 4})
    return folder


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_prompts_have_the_ids_that_transformers_gives_them(form: Form, folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    form(folder)
    reference = AutoTokenizer.from_pretrained(folder)
    copied, flat = tmp_path / "copied", tmp_path / "flat"
    for other in (copied, flat):
        other.mkdir()
    copy_tokenizer(folder, copied)
    shutil.copy(folder / "config.json", copied)
    for name, data in rendering_files(folder).items():
        (flat / name).write_bytes(data)
    for place in (folder, copied, flat):
        renderer = Renderer(place)
        for tools in (None, TOOLS):
            given: dict[str, Any] = {"tools": tools, "add_generation_prompt": True}
            if renderer.tool_text is not None:  # what exports of the model have
                given["chat_template"] = renderer.chat_template
            text = reference.apply_chat_template(MESSAGES, tokenize=False, **given)
            assert renderer.render(MESSAGES, tools, True) == text
            ids = reference.apply_chat_template(MESSAGES, tokenize=True, return_dict=False, **given)
            assert renderer.encode(text) == ids
        assert next(iter(renderer.end_ids)) == (4 if reference.eos_token_id is None else reference.eos_token_id)
        assert list(renderer.end_ids) == end_ids(place)


LACKING: dict[str, tuple[Form, str]] = {
    "a template": (config(chat_template=...), "its tokenizer has no chat template"),
    "a default template": (
        config(chat_template=[{"name": "tool_use", "template": CHATML}, {"name": "rag", "template": CHATML}]),
        "its chat templates are rag, tool_use; expected one named default",
    ),
    "the end token": (config(eos_token="<|gone|>"), "its eos_token '<|gone|>' is no token of its tokenizer"),
    "a token that the template writes": (
        config(chat_template=LLAMA, bos_token="<|gone|>"),
        "its bos_token '<|gone|>', which the chat template writes, is no token",
    ),
    "the name of a token that the template writes": (
        config(chat_template=LLAMA, bos_token=...),
        "its chat template writes bos_token, which tokenizer_config.json does not name",
    ),
    "any end": (
        several(config(eos_token=...), file("config.json", {})),
        "nothing ends a completion; expected eos_token in tokenizer_config.json, or eos_token_id in "
        "generation_config.json or config.json",
    ),
    "the place of a token": (
        config(added_tokens_decoder={"9000": token("<fresh>")}),
        "the token '<fresh>' should have id 9000 and has ",
    ),
}


@pytest.mark.parametrize(("form", "sentence"), LACKING.values(), ids=LACKING.keys())
def test_what_a_folder_lacks_is_an_error_that_names_it(form: Form, sentence: str, folder: Path) -> None:
    form(folder)
    with pytest.raises(ModelError) as lacking:
        Renderer(folder)
    assert str(lacking.value).startswith(f"{folder}: {sentence}")
