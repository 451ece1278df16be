"""Models in folders: what a transformers folder holds, and how its weights are read and written.

Sampler, learner and engine find models here. Refuses to know what a layer computes. Weights are written to a temporary
name and renamed, so that a reader sees the old file or the new one, never half of one.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from agentlightning.errors import InputError, ModelError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


def find_model(name: str) -> Path:
    """The folder of a model given by folder or hub name; a hub model is downloaded unless it is cached."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"model {name}: there is no such folder")
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"])
    except (OSError, ValueError) as cause:
        raise ModelError(
            f"model {name}: neither a folder here nor a model that the Hugging Face hub serves ({_first_line(cause)})"
        ) from cause
    return Path(found)


def read_config(folder: Path) -> Any:
    """The model's transformers configuration. Raises ModelError, naming the folder, where there is none."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"model {folder}: not a transformers model folder (it has no config.json)")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise ModelError(f"model {folder}: its config.json does not load ({_first_line(cause)})") from cause


def stop_ids(folder: Path, config: Any) -> frozenset[int]:
    """Ids that end an answer: eos_token_id of the generation config, else of the config; either may be a list."""
    found = None
    path = folder / "generation_config.json"
    if path.is_file():
        found = json.loads(path.read_text()).get("eos_token_id")
    if found is None:
        found = config.eos_token_id
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the folder's safetensors files by name. Raises ModelError where they are missing or damaged."""
    files = [folder / WEIGHTS]
    if not files[0].is_file() and (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text())
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                weights.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as cause:
            raise ModelError(
                f"model {folder}: its weights do not load from {file.name} ({_first_line(cause)})"
            ) from cause
    return weights


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """The transformers causal LM of a folder, in evaluation mode. Raises ModelError where it does not load."""
    read_config(folder)
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except InputError:
        raise
    except Exception as cause:  # transformers, safetensors and torch all have their own; each means the same here
        raise ModelError(f"model {folder}: its weights do not load ({_first_line(cause)})") from cause
    return model.eval()


def write_weights(model: Any, folder: Path) -> None:
    """Write the model's weights to folder/model.safetensors, the old file or the new one at every moment.

    Tensors that share memory (tied embeddings) are written once, under the name that the model ties others to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tied = set(model.all_tied_weights_keys)
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    temporary = folder / f".{WEIGHTS}.{os.getpid()}"
    save_file(weights, temporary, metadata={"format": "pt"})
    temporary.replace(folder / WEIGHTS)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files, so that a saved folder is a model on its own."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
