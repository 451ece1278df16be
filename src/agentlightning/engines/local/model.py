"""The model of a transformers folder, read and written, and the device that it computes on.

Sampler and learner drive it. Refuses to know what a layer computes. A folder is written under a temporary name and renamed,
so that a reader never sees half of one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentlightning.engines.local.sharding import Ranks, whole_state
from agentlightning.engines.models import check_model, first_line
from agentlightning.engines.saved_folders import replace_folder, seal
from agentlightning.errors import ConfigError, EngineError, InputError, ModelError
from agentlightning.runtime.disk import sync

CPU_CACHE_BYTES = 4 * 10**9
GPU_CACHE_SHARE = 0.2
"""The learner's weights, optimizer and activations are in the same memory."""


def torch_has(what: str) -> bool:
    """True where torch has `cuda`, `mps`, or native `bfloat16` on CUDA."""
    match what:
        case "cuda":
            return torch.cuda.is_available()
        case "mps":
            return torch.backends.mps.is_available()
        case _:
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def cuda_memory(device: str) -> int:
    """Bytes of memory that a CUDA device has."""
    return int(torch.cuda.get_device_properties(device).total_memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Device and number format, both settled."""

    device: str
    dtype: str

    def cache_bytes(self, memory: Callable[[str], int] = cuda_memory) -> int:
        """Bound of the sampler's keys and values: a fifth of a CUDA device's memory, 4 GB elsewhere."""
        return int(memory(self.device) * GPU_CACHE_SHARE) if self.device.startswith("cuda") else CPU_CACHE_BYTES


def settle(device: str, dtype: str, has: Callable[[str], bool] = torch_has) -> Hardware:
    """`auto` is the best that `has` says torch has here: cuda, mps, cpu; bfloat16 on CUDA, float32 elsewhere."""
    if device == "auto":
        device = next((kind for kind in ("cuda", "mps") if has(kind)), "cpu")
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") and has("bfloat16") else "float32"
    return Hardware(device=device, dtype=dtype)


def check_device(device: str) -> None:
    """ConfigError where torch cannot use it."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as cause:
        why = str(cause).strip().partition("\n")[0]
        raise ConfigError(f"engine.device: torch cannot use {device!r} on this machine: {why}") from None


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
    """True for a model that is trained with its images: transformers has one that reads images and writes text, and none
    that reads text alone."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING


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
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

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
