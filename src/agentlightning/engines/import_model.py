"""Import a model: a folder that transformers, vLLM and this trainer load, made of a GGUF file, a folder or a hub name.

``agl models import`` runs it. Quantised weights are de-quantised to bfloat16: what llama.cpp or Ollama run can be trained.
A PEFT adapter is merged into its base model.
The folder records where its weights come from, so that a trained model's licence can be looked up.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from agentlightning.engines.folders import (
    check_files,
    check_model,
    copy_text,
    copy_tokenizer,
    first_line,
    locate_model,
    new_folder,
    seal,
)
from agentlightning.errors import AgentLightningError, ConfigError, MissingExtraError, ModelError
from agentlightning.rendering.model_folder import open_tokenizer, read_json, tokenizer_settings
from agentlightning.runtime.disk import file_hash

SOURCE_FILE = "source.json"
"""In an imported folder: its `ModelSource`."""
HUB = "hub:"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WHOLE_TYPES = frozenset({"F32", "F16", "BF16"})
"""Types of GGUF tensors that are not quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """The origin of the weights of an imported folder."""

    source: str
    """The file's name, the folder or the hub's name, as given."""
    sha256: str
    """Of the GGUF file or the file of weights; of several files, of their hashes one after the other."""
    license: str | None
    """As the file or the model card names it; None where neither does."""
    name: str | None = None
    """The model's own name, in a GGUF file."""
    url: str | None = None
    quantization: tuple[str, ...] = ()
    """Types of a GGUF file's quantised tensors: what was lost before the import."""
    base: str | None = None
    """The model that an adapter was merged into."""


def import_model(source: str, to: Path) -> ModelSource:
    """Make the folder `to` of a .gguf file, a folder with a model or an adapter, or ``hub:NAME``. ConfigError where
    `to` exists or the source is none of the three, ModelError where it cannot be read or transformers does not know its
    architecture, MissingExtraError without gguf or peft. Nothing stands at `to` unless all of it does."""
    if not (source.startswith(HUB) or Path(source).suffix.lower() == ".gguf" or Path(source).is_dir()):
        raise ConfigError(f"SOURCE: expected a .gguf file, a folder or {HUB}NAME, got {source!r}")
    with new_folder(to) as folder:
        if Path(source).suffix.lower() == ".gguf" and not source.startswith(HUB):
            found = _import_gguf(Path(source), folder)
        else:
            found = _import_folder(source, folder)
        check_model(folder)
        (folder / SOURCE_FILE).write_bytes(orjson.dumps(asdict(found), option=orjson.OPT_INDENT_2))
        seal(folder)
    return found


def _import_folder(source: str, folder: Path) -> ModelSource:
    name = source.removeprefix(HUB)
    if source.startswith(HUB) and Path(name).is_dir():
        raise ConfigError(f"SOURCE: {name} is a folder here; give it without {HUB!r}")
    found = locate_model(name)
    if (found / ADAPTER_CONFIG).is_file():
        return _merge_adapter(source, found, folder)
    check_files(found)
    return ModelSource(source=source, sha256=_copy_model(found, folder), license=_license_of_card(found))


def _copy_model(found: Path, folder: Path) -> str:
    """Copy the weights, configuration and tokenizer of a model's folder; returns the weights' hash."""
    weights = sorted(found.glob("*.safetensors"))
    for path in weights:
        shutil.copyfile(path, folder / path.name)
    texts = (*found.glob("*.safetensors.index.json"), found / "config.json", found / "generation_config.json")
    for path in (*texts, *found.glob("LICENSE*")):
        if path.is_file():
            copy_text(path, folder / path.name)
    copy_tokenizer(found, folder)
    return _hash(weights)


def _merge_adapter(source: str, adapter: Path, folder: Path) -> ModelSource:
    """The base model that an adapter names, with the adapter in its weights and the adapter's tokenizer if it has one."""
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError("peft", "lora")
    where = f"model {adapter}: {ADAPTER_CONFIG}"
    base = read_json(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(f"{where}: base_model_name_or_path: expected the folder or hub name of the adapter's model")
    beside = adapter / base  # as it is written where both were made, else from here
    found = beside if beside.is_dir() and not Path(base).is_dir() else locate_model(base)
    check_model(found)
    if not (adapter / ADAPTER_WEIGHTS).is_file():
        raise ModelError(f"model {adapter}: it has no weights ({ADAPTER_WEIGHTS})")
    try:
        model = _merged(found, adapter)
    except AgentLightningError:
        raise
    except Exception as cause:  # peft and torch have many: a rank, a module or a shape of another model
        raise ModelError(f"model {adapter}: peft cannot merge it into {base}: {first_line(cause)}") from cause
    model.save_pretrained(folder)
    copy_tokenizer(adapter if (adapter / "tokenizer_config.json").is_file() else found, folder)
    license = _license_of_card(adapter) or _license_of_card(found)
    return ModelSource(source=source, sha256=file_hash(adapter / ADAPTER_WEIGHTS), license=license, base=base)


def _merged(base: Path, adapter: Path) -> Any:
    """The model of one folder with the adapter of another in its weights."""
    import torch
    from peft import PeftConfig, PeftModel, load_peft_weights

    from agentlightning.engines.local.model import load_model, read_config, several

    model = load_model(base, read_config(base).dtype or torch.float32)
    with TemporaryDirectory() as copied:  # peft reads no byte order marks
        copy_text(adapter / ADAPTER_CONFIG, Path(copied, ADAPTER_CONFIG))
        settings = PeftConfig.from_pretrained(copied)
    settings.inference_mode = True
    _make_room(model, adapter, load_peft_weights(str(adapter), device="cpu"))
    merged = PeftModel(model, settings)
    if not hasattr(merged.base_model, "merge_and_unload"):
        raise ModelError(
            f"model {adapter}: an adapter of type {settings.peft_type.value} cannot be merged into weights"
        )
    names = getattr(model, "_checkpoint_conversion_mapping", None)  # of older versions of the same model
    loaded = merged.load_adapter(str(adapter), "default", torch_device="cpu", key_mapping=names)
    if loaded.missing_keys:
        raise ModelError(f"model {adapter}: {several('weight', sorted(loaded.missing_keys))} missing in its files")
    if loaded.unexpected_keys:
        unknown = several("weight", sorted(loaded.unexpected_keys))
        raise ModelError(f"model {adapter}: {unknown} in its files and no part of its base model {base}")
    return merged.merge_and_unload()


def _make_room(model: Any, adapter: Path, weights: Mapping[str, Any]) -> None:
    """Add the rows of tokens that the adapter's tokenizer has and its base model has not. They must be among its weights."""
    if not (adapter / "tokenizer.json").is_file():
        return
    tokens = open_tokenizer(adapter, tokenizer_settings(adapter)).get_vocab_size()
    if tokens <= (rows := model.get_input_embeddings().weight.shape[0]):
        return
    needed = 1 if model.config.get_text_config().tie_word_embeddings else 2
    if sum(each.shape[0] == tokens for each in weights.values()) < needed:
        raise ModelError(
            f"model {adapter}: its tokenizer has {tokens} tokens and its base model {rows}; expected all embeddings in "
            f"{ADAPTER_WEIGHTS}"
        )
    model.resize_token_embeddings(tokens, mean_resizing=False)


def _hash(files: Sequence[Path]) -> str:
    """SHA-256 of one file's content, or of several files' hashes."""
    hashes = [file_hash(file) for file in files]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def _license_of_card(folder: Path) -> str | None:
    """The license that the front matter of a model card names."""
    card = folder / "README.md"
    lines = card.read_text("utf-8-sig", "replace").splitlines() if card.is_file() else []
    for line in lines[1 : lines.index("---", 1) if "---" in lines[1:] else 0]:
        key, _, value = line.partition(":")
        if key.strip() == "license":
            return value.strip() or None
    return None


def _import_gguf(file: Path, folder: Path) -> ModelSource:
    if not file.is_file():
        raise ModelError(f"model {file}: there is no such file")
    for package in ("gguf", "accelerate", "torch"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "gguf")
    found = _source_of_gguf(file)
    try:
        _dequantize(file, folder)
    except (OSError, ValueError, KeyError, NotImplementedError, RuntimeError, AttributeError, ImportError) as cause:
        raise ModelError(f"model {file}: transformers cannot load it: {first_line(cause)}") from cause
    for path in file.parent.glob("LICENSE*"):
        shutil.copyfile(path, folder / path.name)
    return found


def _source_of_gguf(file: Path) -> ModelSource:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except Exception as cause:  # the reader trusts its file: whatever it stumbles over, the file is damaged
        raise ModelError(f"model {file}: not a whole GGUF file ({first_line(cause)})") from cause

    def text(key: str) -> str | None:
        field = reader.get_field(key)
        return None if field is None else str(field.contents())

    return ModelSource(
        source=file.name,
        sha256=file_hash(file),
        license=text("general.license"),
        name=text("general.name"),
        url=text("general.source.url") or text("general.repo_url") or text("general.url"),
        quantization=tuple(sorted({one.tensor_type.name for one in reader.tensors} - WHOLE_TYPES)),
    )


def _dequantize(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    model = AutoModelForCausalLM.from_pretrained(
        **place, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
