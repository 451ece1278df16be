"""The chat template of a run: tools for a template that has none, one for a model that has none, in what is exported too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from agentlightning.config.run import ModelConfig
from agentlightning.engines.folders import copy_tokenizer, window_note
from agentlightning.errors import ModelError
from agentlightning.rendering.renderer import Renderer
from agentlightning.trainer.processes import with_chat_template

CHATML = "{% for m in messages %}{{ m.role + ':' + m.content + '<end>' }}{% endfor %}"


def folder_of(path: Path, template: str | None) -> Path:
    path.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"<end>": 0, "user": 1}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "<end>"} | ({} if template is None else {"chat_template": template})
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "model.safetensors").write_bytes(b"")
    return path


def test_a_template_without_tools_gets_them_in_a_folder_of_the_run_and_says_so(tmp_path: Path) -> None:
    model = folder_of(tmp_path / "model", CHATML)
    said, made = with_chat_template(model, ModelConfig(path=str(model)), tmp_path / "run" / "model")
    assert said == [
        "tools, if the agent has any, are written into the system message as text (hermes): the chat template has none"
    ]
    assert (made / "model.safetensors").resolve() == model / "model.safetensors"
    exported = tmp_path / "export"
    exported.mkdir()
    copy_tokenizer(made, exported)
    again = Renderer(exported)
    assert (again.tool_text, again.chat_template) == ("hermes", None)
    assert with_chat_template(exported, ModelConfig(path="x"), tmp_path / "other") == (said, exported)


@pytest.mark.parametrize(("window", "note"), [(512, "context: 512 of 2048 tokens"), (4096, None), (None, None)])
def test_a_context_that_is_cut_to_a_sliding_window_is_told(
    window: int | None, note: str | None, tmp_path: Path
) -> None:
    config = {"text_config": {"max_position_embeddings": 2048, "sliding_window": window}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (window_note(tmp_path) or "").startswith(note or "")
    assert (window_note(tmp_path) is None) == (note is None)


def test_a_template_with_tools_is_left_alone_and_a_model_without_one_is_refused_unless_one_is_given(
    tmp_path: Path,
) -> None:
    whole = folder_of(tmp_path / "whole", "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + CHATML)
    assert with_chat_template(whole, ModelConfig(path="x"), tmp_path / "run") == ([], whole)
    model = folder_of(tmp_path / "model", None)
    with pytest.raises(ModelError, match=r"has no chat template.*--chat-template chatml"):
        with_chat_template(model, ModelConfig(path="x"), tmp_path / "run")
    _, made = with_chat_template(model, ModelConfig(path="x", chat_template="chatml"), tmp_path / "run")
    assert "<|im_start|>" in (made / "chat_template.jinja").read_text()
