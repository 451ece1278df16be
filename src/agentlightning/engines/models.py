"""Models by folder or hub name, as far as that goes without torch.

The trainer, the CLI and engines find models here before any process that loads them is started. Refuses to know weights.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from agentlightning.errors import ModelError

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
    "processor_config.json",
    "preprocessor_config.json",
)


def find_model(name: str | Path) -> Path:
    """The folder of a model given by folder or hub name; a hub model is downloaded unless it is cached."""
    name = str(name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        check_model(folder)
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"model {name}: there is no such folder")
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"])
    except (OSError, ValueError) as cause:
        raise ModelError(
            f"model {name}: neither a folder here nor a model that the Hugging Face hub serves ({first_line(cause)})"
        ) from cause
    return Path(found)


def check_model(folder: Path) -> None:
    """Raise ModelError, naming the folder, unless it looks like a transformers model with weights."""
    if not folder.is_dir():
        raise ModelError(f"model {folder}: there is no such folder")
    if not (folder / "config.json").is_file():
        raise ModelError(f"model {folder}: not a transformers model folder (it has no config.json)")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"model {folder}: it has no weights (*.safetensors)")


def context_length(config: Any) -> int:
    """Positions the model has, or fewer where some layer sees a window: inside the window all attention is the same."""
    windowed = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    longest = getattr(config, "max_position_embeddings", None) or 2048
    return min(longest, windowed) if windowed else int(longest)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files, so that a saved folder is a model on its own."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def first_line(error: BaseException) -> str:
    """First line of an error, short enough for a sentence."""
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
