"""A transformers folder's configuration and weights, read and written.

Sampler and learner drive it. Refuses to know what a layer computes. A folder is written under a
temporary name and renamed, so that a reader never sees half of one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentlightning.engines.local.models import LLAVA
from agentlightning.engines.local.ranks import Ranks
from agentlightning.engines.local.sharding import whole_state
from agentlightning.engines.models import check_model, first_line
from agentlightning.engines.saved_folders import replace_folder, seal
from agentlightning.errors import EngineError, InputError, ModelError
from agentlightning.runtime.disk import sync

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NOT_WRITTEN = (OSError, SafetensorError, RuntimeError)
"""Errors that Python, safetensors and torch.save raise on a full disk."""


def read_config(folder: Path) -> Any:
    """The model's transformers configuration. Raises ModelError, naming the folder, where it does not load."""
    check_model(folder)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise ModelError(f"model {folder}: its config.json does not load ({first_line(cause)})") from cause


def has_sight(config: Any) -> bool:
    """True where the local engine reads the model's images; see LLAVA."""
    return LLAVA in (config.architectures or ())


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
                f"model {folder}: its weights do not load from {file.name} ({first_line(cause)})"
            ) from cause
    return weights


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """The transformers causal LM of a folder, with its vision tower where it has sight, in evaluation mode.

    Raises ModelError where it does not load.
    """
    config = read_config(folder)
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if not (text or has_sight(config)) and getattr(config, "vision_config", None) is not None:
        raise ModelError(
            f"model {folder}: {', '.join(config.architectures or [config.model_type])}; with images the local engine trains "
            f"LLaVA ({LLAVA}) only, see docs/images.md"
        )
    disable_progress_bar()  # its bars would end up in logs and in the display of a demo
    try:
        kind = AutoModelForImageTextToText if has_sight(config) else AutoModelForCausalLM
        model = kind.from_pretrained(folder, dtype=dtype)
    except InputError:
        raise
    except Exception as cause:  # transformers, safetensors and torch all have their own; each means the same here
        raise ModelError(f"model {folder}: its weights do not load ({first_line(cause)})") from cause
    return model.eval()


def write_model(
    model: Any,
    folder: Path,
    complete: Callable[[Path], None] | None = None,
    weights: dict[str, torch.Tensor] | None = None,
    *,
    durable: bool = False,
) -> None:
    """Write a transformers folder (weights, configuration), whole or not at all; an old folder there is replaced.

    weights are written in place of the model's own; complete adds what else belongs into the folder before it takes its
    name. durable: with a manifest, and on the disk before this returns, so that it survives a power cut. Raises OSError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        model.save_pretrained(temporary, state_dict=weights)
        if complete is not None:
            complete(temporary)
        if durable:
            seal(temporary)
        replace_folder(temporary, folder)
        if durable:
            sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def first_writes(
    model: torch.nn.Module, ranks: Ranks, write: Callable[[dict[str, Tensor]], None], problem: str
) -> None:
    """Have the first rank write something of the whole weights; EngineError of all where it cannot."""
    weights = whole_state(model, ranks.rank == 0)
    with ranks.keep_errors():
        if ranks.rank == 0:
            try:
                write(weights)
            except NOT_WRITTEN as cause:
                raise EngineError(f"{problem}: {first_line(cause)}") from cause
    ranks.gather(None)


def narrowed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in bfloat16; tied ones stay one tensor."""
    narrow = {id(value): value.to(torch.bfloat16) for value in weights.values()}
    return {name: narrow[id(value)] for name, value in weights.items()}
