"""Forms of a folder's weights: the logits are those of transformers, and what is missing is named, never drawn at random."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agentlightning.engines.folders import check_model
from agentlightning.engines.local.decoder import LlamaDecoder, TransformersDecoder, open_decoder
from agentlightning.engines.local.model import load_model, read_config
from agentlightning.errors import ModelError

Weights = dict[str, torch.Tensor]
Edit = Callable[[Weights], Weights]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IDS = [5, 9, 33, 60, 2, 17]


def without(*names: str) -> Edit:
    return lambda weights: {name: value for name, value in weights.items() if name not in names}


def adding(**more: Callable[[Weights], torch.Tensor]) -> Edit:
    return lambda weights: {**weights, **{name.replace("__", "."): make(weights) for name, make in more.items()}}


def noise(*shape: int) -> Callable[[Weights], torch.Tensor]:
    return lambda _: torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def renamed(weights: Weights) -> Weights:
    return {HEAD if name == EMBEDDING else name: value for name, value in weights.items()}


def based(weights: Weights) -> Weights:
    return {name.removeprefix("model."): value for name, value in weights.items()}


BIAS = adding(**{f"model__layers__{at}__self_attn__{part}_proj__bias": noise(32) for at in (0, 1) for part in "qo"})
UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}

FORMS: dict[str, tuple[str, dict[str, Any], Edit, bool]] = {
    # family, configuration, change of the weights, whether transformers has no place for some of them
    "tied": ("Llama", TIED, dict, False),
    "untied": ("Llama", UNTIED, dict, False),
    "tied, with a head that is the embedding": (
        "Qwen2",
        TIED,
        adding(lm_head__weight=lambda w: w[EMBEDDING] * 1),
        False,
    ),
    "tied, with a head of its own": ("Qwen3", TIED, adding(lm_head__weight=noise(64, 32)), False),
    "tied, with the head alone": ("Llama", TIED, renamed, False),
    "biases": ("Llama", {"attention_bias": True}, dict, False),
    "biases of another model": ("Llama", {}, BIAS, True),
    "biases of another family": ("Mistral", {}, BIAS, True),
    "a layer too many": ("Llama", {}, adding(model__layers__2__mlp__up_proj__weight=noise(48, 32)), True),
    "a second head": ("Qwen2", {}, adding(score__weight=noise(1, 32)), True),
    "buffers of older folders": (
        "Llama",
        {},
        adding(model__layers__0__self_attn__rotary_emb__inv_freq=noise(4)),
        False,
    ),
    "without the model's prefix": ("GPT2", {}, dict, False),
}


def copied(source: Path, folder: Path, edit: Edit) -> Path:
    shutil.copytree(source, folder)
    weights = edit(load_file(folder / "model.safetensors"))
    save_file(
        {name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def logits(decoder: Any) -> torch.Tensor:
    decoder.reserve(1, 8)
    places = torch.arange(len(IDS))[None]
    return decoder.extend(0, torch.tensor([IDS]), torch.tensor([0]), places)[0]


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_transformers(
    form: str, shards: bool, build: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family, changes, edit, warned = FORMS[form]
    folder = copied(build(family, **changes), tmp_path / "model", edit)
    if shards:
        split(folder)
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(folder)(input_ids=torch.tensor([IDS])).logits[0]
    kinds = [TransformersDecoder] if family == "GPT2" else [LlamaDecoder, TransformersDecoder]
    assert type(open_decoder(folder)) is kinds[0]
    for kind in kinds:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "agentlightning"):
            decoder = kind(read_config(folder), folder, torch.float32, "cpu")
        torch.testing.assert_close(logits(decoder), expected, atol=1e-4, rtol=1e-4)
        assert ("in its files and no part of the model" in caplog.text) is warned
    with torch.inference_mode():
        learned = load_model(folder, torch.float32)(input_ids=torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(learned, expected)


def split(folder: Path) -> None:
    """Two files and an index, as large models have them."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-0000{at % 2 + 1}-of-00002.safetensors" for at, name in enumerate(sorted(weights))}
    for file in set(places.values()):
        save_file({name: weights[name] for name in weights if places[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


MISSING: dict[str, tuple[str, dict[str, Any], Edit, str]] = {
    "the head": ("Llama", UNTIED, without(HEAD), HEAD),
    "the embedding and the head": ("Llama", TIED, without(EMBEDDING), EMBEDDING),
    "a matrix": ("Qwen2", {}, without("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight"),
    "a bias": ("Qwen2", {}, without("model.layers.0.self_attn.k_proj.bias"), "model.layers.0.self_attn.k_proj.bias"),
    "a norm": (
        "Qwen3",
        {},
        without("model.layers.0.self_attn.q_norm.weight"),
        "model.layers.0.self_attn.q_norm.weight",
    ),
    "the last norm": ("Mistral", {}, without("model.norm.weight"), "model.norm.weight"),
    "a matrix of another family": (
        "GPT2",
        {},
        without("transformer.h.1.mlp.c_fc.weight"),
        "transformer.h.1.mlp.c_fc.weight",
    ),
    "the prefix": ("Llama", UNTIED, lambda weights: based(without(HEAD)(weights)), HEAD),
}


@pytest.mark.parametrize("form", MISSING)
def test_a_weight_that_is_missing_is_named(form: str, build: Callable[..., Path], tmp_path: Path) -> None:
    family, changes, edit, name = MISSING[form]
    folder = copied(build(family, **changes), tmp_path / "model", edit)
    config = read_config(folder)
    kinds = [TransformersDecoder] if family == "GPT2" or form == "the prefix" else [LlamaDecoder, TransformersDecoder]
    for kind in kinds:
        with pytest.raises(ModelError, match=f"^model {folder}: .*{name}.* missing"):
            kind(config, folder, torch.float32, "cpu")
    with pytest.raises(ModelError, match=f"^model {folder}: .*{name}.* missing in its files"):
        load_model(folder, torch.float32)


def test_a_folder_of_a_classifier_has_no_head_to_sample_with(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_labels=1
    )
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"weight {HEAD} is missing in its files"):
        open_decoder(tmp_path)


@pytest.mark.parametrize("whole", [False, True])
def test_an_adapter_is_not_taken_for_a_model(whole: bool, llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if whole:
        shutil.copytree(llama, folder)
    else:
        folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(llama)}))
    with pytest.raises(ModelError, match=f"^model {folder}: it holds an adapter .*merge_and_unload"):
        check_model(folder)
