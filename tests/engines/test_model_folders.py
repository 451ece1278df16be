"""Forms of a folder's weights: the logits are those of transformers, and what is missing is named, never drawn at random."""

from __future__ import annotations

import codecs
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentlightning.engines.folders import check_model, find_model
from agentlightning.engines.import_model import import_model
from agentlightning.engines.local.decoder import LlamaDecoder, TransformersDecoder, open_decoder
from agentlightning.engines.local.model import load_model, read_config
from agentlightning.errors import ModelError
from agentlightning.rendering.model_folder import end_ids

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it

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
    "a layer too many": ("Llama", {}, adding(model__layers__2__mlp__up_proj__weight=noise(48, 32)), True),
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


@pytest.mark.parametrize(("form", "shards"), [*((form, False) for form in FORMS), ("untied", True), ("biases", True)])
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
    with pytest.raises(ModelError, match=f"^model {folder}: it holds an adapter .*agl models import {folder}"):
        check_model(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_byte_order_mark_is_named_and_an_import_is_without_it(name: str, llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "marked")
    file = tmp_path / "marked" / name
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    with pytest.raises(ModelError, match=f"^model {file.parent}: {name} begins with a byte order mark.*models import"):
        find_model(file.parent)
    import_model(str(file.parent), tmp_path / "plain")
    assert (find_model(tmp_path / "plain") / name).read_bytes() == (llama / name).read_bytes()


ADAPTERS: dict[str, dict[str, Any]] = {
    "attention alone": {"target_modules": ["q_proj", "v_proj"]},
    "every matrix, of another scale": {"target_modules": "all-linear", "use_rslora": True, "lora_alpha": 3},
    "weight-decomposed": {"target_modules": ["q_proj", "up_proj"], "use_dora": True},
    "with a head of its own": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


def adapter_of(base: Path, folder: Path, **settings: Any) -> Path:
    """What peft saves of a model of which it has trained an adapter: every weight of it is drawn."""
    torch.manual_seed(3)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(task_type="CAUSAL_LM", r=4, **settings)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("form", ADAPTERS)
def test_an_imported_adapter_has_the_logits_of_transformers(
    form: str, build: Callable[..., Path], tmp_path: Path
) -> None:
    base = build("Llama", tie_word_embeddings=False)
    adapter = adapter_of(base, tmp_path / "adapter", **ADAPTERS[form])
    with torch.inference_mode():
        if form == "weight-decomposed":  # transformers draws the magnitudes at random, with a warning
            loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
        else:
            loaded = AutoModelForCausalLM.from_pretrained(adapter)
        expected = loaded(input_ids=torch.tensor([IDS])).logits[0]
        plain = AutoModelForCausalLM.from_pretrained(base)(input_ids=torch.tensor([IDS])).logits[0]
    found = import_model(str(adapter), tmp_path / "merged")
    assert found.base == str(base)
    torch.testing.assert_close(logits(open_decoder(tmp_path / "merged")), expected, atol=1e-4, rtol=1e-4)
    assert (expected - plain).abs().max() > 0.1
    assert (tmp_path / "merged" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


def test_an_adapter_with_tokens_of_its_own_brings_their_embeddings(llama: Path, tmp_path: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(llama), AutoTokenizer.from_pretrained(llama)
    tokenizer.add_tokens(["<new>"])
    model.resize_token_embeddings(len(tokenizer))
    grown = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]))
    grown.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    tokenizer.save_pretrained(tmp_path / "adapter")
    import_model(str(tmp_path / "adapter"), tmp_path / "merged")
    with torch.inference_mode():
        expected = grown(input_ids=torch.tensor([[*IDS[:-1], 64]])).logits[0]
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=torch.tensor([[*IDS[:-1], 64]]))
    torch.testing.assert_close(found.logits[0], expected, atol=1e-4, rtol=1e-4)
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    kept = {name: value for name, value in weights.items() if value.shape[0] != 65}
    save_file(kept, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="its tokenizer has 65 tokens and its base model 64; expected all embeddings"):
        import_model(str(tmp_path / "adapter"), tmp_path / "again")


def of_another_model(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({name.replace("layers.1", "layers.9"): value for name, value in load_file(file).items()}, file)


def half(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "lora_B" in name}, file)


def settings(**changes: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        file = folder / "adapter_config.json"
        table = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps(table), encoding="utf-8-sig")

    return write


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (half, r"lora_A.* missing in its files"),
        (of_another_model, r"layers\.1\..* missing in its files"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), r"it has no weights \(adapter_model"),
        (settings(base_model_name_or_path=None), "base_model_name_or_path: expected the folder or hub name"),
        (settings(base_model_name_or_path="./elsewhere"), "model ./elsewhere: there is no such folder"),
        (settings(target_modules=["no_proj"]), "peft cannot merge it into .*no_proj"),
    ],
)
def test_what_an_adapter_lacks_is_named(
    edit: Callable[[Path], None], sentence: str, llama: Path, tmp_path: Path
) -> None:
    adapter = adapter_of(llama, tmp_path / "adapter", target_modules=["q_proj"])
    edit(adapter)
    with pytest.raises(ModelError, match=sentence):
        import_model(str(adapter), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_an_adapter_names_its_model_from_its_own_folder_and_with_a_byte_order_mark(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "base")
    adapter = adapter_of(llama, tmp_path / "adapter", target_modules=["q_proj"])
    settings(base_model_name_or_path="../base")(adapter)
    assert import_model(str(adapter), tmp_path / "merged").base == "../base"


ENDS: dict[str, tuple[Any, Any, list[int]]] = {
    # of config.json, of generation_config.json, and what ends a completion; the tokenizer's own is 1
    "one": (1, 1, [1]),
    "several": (1, [1, 5], [1, 5]),
    "several, the tokenizer's not first": (5, [7, 5, 1], [1, 7, 5]),
    "another than the tokenizer's": (5, 5, [1, 5]),
    "in config.json alone": ([5, 9], None, [1, 5, 9]),
    "nowhere but in the tokenizer": (None, None, [1]),
}


@pytest.mark.parametrize("form", ENDS)
def test_completions_end_where_transformers_ends_them(form: str, build: Callable[..., Path], tmp_path: Path) -> None:
    config, generation, expected = ENDS[form]
    shutil.copytree(build("Llama", eos_token_id=config), folder := tmp_path / "model")
    if generation is None:
        (folder / "generation_config.json").unlink(missing_ok=True)
    else:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    found = AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id
    ids = found if isinstance(found, list) else [found] * (found is not None)
    assert end_ids(folder) == expected  # the tokenizer's own ends one, too, as in vLLM
    assert set(ids) - {1} == set(expected) - {1}
