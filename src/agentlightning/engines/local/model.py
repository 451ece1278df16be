"""The model of a transformers folder, read, changed and written, and the device that it computes on.

Sampler and learner drive it; the learner changes a model's layers (low-rank adapters, dropout, prefix trees, recomputation)
once, at start, with a ModelError if the model cannot have it. Refuses to know losses. A folder is written under a temporary
name and renamed, so that a reader never sees half of one.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentlightning.engines.folders import check_model, first_line, model_size, replace_folder, seal
from agentlightning.engines.local.batches import attend_in_trees
from agentlightning.engines.local.sharding import Ranks, copy_into, whole_state
from agentlightning.engines.machine import ACTIVATION_NUMBERS, CPU_SHARE, microbatch_tokens
from agentlightning.errors import ConfigError, EngineError, InputError, MissingExtraError, ModelError
from agentlightning.runtime.disk import sync

log = logging.getLogger(__name__)

LLAMA_SHAPED = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"})
LLAMA_TYPES = frozenset({"llama", "qwen2", "qwen3", "mistral"})
"""The same as the language model inside of another one."""
CPU_CACHE_BYTES = 4 * 10**9
GPU_CACHE_SHARE = 0.2
"""The learner's weights, optimizer and activations are in the same memory."""


def torch_has(what: str) -> bool:
    """True where torch has `cuda`, `mps`, or products in bfloat16 that are native on CUDA (`bfloat16`) or the CPU
    (`cpu_bfloat16`: AMX or AVX512-BF16)."""
    if what == "bfloat16":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if what == "cpu_bfloat16":
        return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
    return torch.cuda.is_available() if what == "cuda" else torch.backends.mps.is_available()


def device_memory(device: str) -> int:
    """Bytes of memory of a CUDA device, else those that are free on this machine."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.startswith("cuda") else free_memory()


def free_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes for new processes, on the machine and in the container."""
    found = int(psutil.virtual_memory().available)
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()).isdecimal():
        found = min(found, max(0, int(most) - int(used.read_text()) + _file_cache(cgroup)))
    return found


def _file_cache(cgroup: Path) -> int:
    """Bytes of files that the kernel gives back when they are needed; they count as used."""
    stat = cgroup / "memory.stat"
    lines = stat.read_text().splitlines() if stat.is_file() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Device and number format, both settled."""

    device: str
    dtype: str

    def cache_bytes(self, memory: Callable[[str], int] = device_memory) -> int:
        """Bound of the sampler's keys and values: a fifth of a CUDA device's memory; elsewhere a 24th of what is free, at
        most 4 GB."""
        if self.device.startswith("cuda"):
            return int(memory(self.device) * GPU_CACHE_SHARE)
        return min(CPU_CACHE_BYTES, memory(self.device) // CPU_SHARE)

    def microbatch_tokens(self, most: int, config: Any, memory: Callable[[str], int] = device_memory) -> int:
        """Tokens of one backward pass of a model of this text configuration: on a CPU as many as free memory allows."""
        if self.device != "cpu":
            return most
        number = 2 if self.dtype == "bfloat16" else 4
        token = ACTIVATION_NUMBERS * config.num_hidden_layers * config.hidden_size * number
        return microbatch_tokens(most, token, memory(self.device))


def settle(device: str, dtype: str, has: Callable[[str], bool] = torch_has, *, tiny: bool = False) -> Hardware:
    """`auto` is the best that `has` says torch has here: cuda, mps, cpu; bfloat16 where products in it are native, but on a
    CPU not for a tiny model."""
    if device == "auto":
        device = next((kind for kind in ("cuda", "mps") if has(kind)), "cpu")
    if dtype == "auto":
        native = has("bfloat16") if device.startswith("cuda") else device == "cpu" and not tiny and has("cpu_bfloat16")
        dtype = "bfloat16" if native else "float32"
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
    """True for a model that transformers has as one that reads images and writes text, and not as one of text alone."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the folder's safetensors files by name. ModelError if they are missing or damaged."""
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


def is_tiny(folder: Path) -> bool:
    """True for a model of fewer than ten million parameters. Raises ModelError as read_config does."""
    read_config(folder)
    return model_size(folder).tiny


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """The causal LM of a folder, with its vision tower if it has one, in evaluation mode. ModelError if it does not load."""
    config = read_config(folder)
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # its bars would end up in logs and in the display of a demo
    try:
        kind = AutoModelForImageTextToText if has_sight(config) else AutoModelForCausalLM
        model, loaded = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except InputError:
        raise
    except Exception as cause:  # transformers, safetensors and torch all have their own; each means the same here
        raise ModelError(f"model {folder}: its weights do not load ({first_line(cause)})") from cause
    if missing := sorted(loaded["missing_keys"]):  # transformers would draw them at random
        raise ModelError(f"model {folder}: {several('weight', missing)} missing in its files")
    warn_of_unused(folder, loaded["unexpected_keys"])
    return model.eval()


def several(what: str, names: Sequence[str]) -> str:
    """The first names and the number of the others, as the subject of a sentence."""
    shown = ", ".join(names[:3])
    return (
        f"{what} {shown} is"
        if len(names) == 1
        else f"{what}s {shown}{f' and {len(names) - 3} more' * (len(names) > 3)} are"
    )


def warn_of_unused(folder: Path, names: Iterable[str]) -> None:
    """Log the weights in the files that the model has no place for."""
    if unused := sorted(name for name in names if not name.endswith("rotary_emb.inv_freq")):
        log.warning("model %s: %s in its files and no part of the model", folder, several("weight", unused))


def write_model(
    model: Any,
    folder: Path,
    complete: Callable[[Path], None] | None = None,
    weights: dict[str, torch.Tensor] | None = None,
    *,
    durable: bool = False,
) -> None:
    """Write a transformers folder, whole or not at all; an old folder there is replaced.

    weights: in place of the model's own; complete adds what else belongs into the folder before it takes its name. durable:
    with a manifest, and on the disk before this returns. Raises OSError.
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


FOLDER = "adapter"
"""Folder of a checkpoint with the adapter alone, as peft writes it."""
BASE = ".base_layer"


class Adapter:
    """An adapter put into a model, all of whose other parameters are frozen by that.

    Hu et al. (2021), LoRA: Low-Rank Adaptation of Large Language Models, equation 3: W + (alpha / rank) B A, with B = 0 at
    first, and alpha twice the rank, in every linear layer but the head. A is drawn from `seed`. The reference of a KL term
    is the same model with its adapter off. Samplers and checkpoints get whole weights. ModelError where the model has no
    such layers, MissingExtraError without peft.
    """

    def __init__(self, model: Any, folder: Path, rank: int, seed: int) -> None:
        try:
            import peft
        except ImportError as cause:
            raise MissingExtraError("peft", "lora") from cause
        from transformers.pytorch_utils import Conv1D

        self._peft = peft
        self._model = model
        self._config = peft.LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            fan_in_fan_out=any(isinstance(one, Conv1D) for one in model.modules()),
            target_modules="all-linear",
            base_model_name_or_path=str(folder),
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                peft.inject_adapter_in_model(self._config, model)
            except ValueError as cause:
                raise ModelError(f"model {folder}: engine.lora_rank does not fit it ({first_line(cause)})") from cause
        self._layers = {name: one for name, one in model.named_modules() if isinstance(one, peft.tuners.lora.LoraLayer)}
        if not self._layers:
            raise ModelError(f"model {folder}: engine.lora_rank found no linear layer to adapt")

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within, the model is the one without an adapter."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    def merged(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a plain model that computes the same, from the whole weights of this one."""
        whole = {name.replace(f"{BASE}.", "."): value for name, value in state.items() if ".lora_" not in name}
        for name, layer in self._layers.items():
            twin = copy.deepcopy(layer)  # merged and unmerged again, the layer itself would be off by a rounding
            own = {inner: state[f"{name}.{inner}"].clone() for inner in layer.state_dict()}  # it adds up in place
            twin.load_state_dict(own, assign=True)
            twin.merge()
            whole[f"{name}.weight"] = twin.get_base_layer().weight.data
        return whole

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """The adapter alone, for peft and whatever serves its adapters. Raises OSError or SafetensorError."""
        from safetensors.torch import save_file

        folder.mkdir()
        self._config.save_pretrained(str(folder))
        state = {f"base_model.model.{name}": value.contiguous() for name, value in self._state(state).items()}
        save_file(state, folder / "adapter_model.safetensors")

    def load(self, folder: Path) -> None:
        """Loads what `save` wrote, bit for bit; RuntimeError if it belongs to an adapter of another shape."""
        from safetensors.torch import load_file

        state = {
            name.removeprefix("base_model.model."): value
            for name, value in load_file(folder / "adapter_model.safetensors").items()
        }
        copy_into(self._state(self._model.state_dict()), state)

    def _state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of all weights, those of the adapter, by peft's names."""
        found: dict[str, Tensor] = self._peft.get_peft_model_state_dict(self._model, state, save_embedding_layers=False)
        return found


PARTS = ("self_attn", "attn", "attention", "mlp")
"""Names in transformers of the parts of a layer whose outputs are added to the residual."""


def add_dropout(model: Any, dropout: float, noise: torch.Generator, training: Callable[[], bool]) -> None:
    """Residual dropout on embeddings, attention and MLP outputs, from the learner's noise, while `training()`."""
    keep = 1.0 - dropout

    def drop(_: Any, __: Any, output: Any) -> Any:
        if not training():
            return output
        hidden = output[0] if isinstance(output, tuple) else output
        kept = torch.empty_like(hidden).bernoulli_(keep, generator=noise)
        hidden = hidden * kept / keep
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    found = [module for name, module in model.named_modules() if name.split(".")[-1] in PARTS]
    if not found:
        raise EngineError(f"dropout: the layers of {type(model).__name__} have no part named one of {PARTS}")
    for module in (model.get_input_embeddings(), *found):
        module.register_forward_hook(drop)


def grows_trees(model: Any) -> str | None:
    """Returns what keeps the layers of a model from attending within prefix trees; None where nothing does."""
    config = model.config
    if getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None):
        return "its attention has a sliding window"
    return None if type(model).__name__ in LLAMA_SHAPED else f"{type(model).__name__} is not known to"


def grow_trees(model: Any, folder: Path) -> None:
    """Let the model's layers attend within prefix trees."""
    if what := grows_trees(model):
        raise ModelError(f"model {folder}: packing = 'prefix_tree' does not fit ({what}); expected packing = 'padded'")
    attend_in_trees(model)


def recomputable(model: Any) -> list[Any]:
    """The layers that can be computed again in the backward pass; none in models of another build."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def recompute(layers: Iterable[Any], on: bool = True) -> None:
    """Gradient checkpointing: each layer is computed again in the backward pass, and keeps no activations."""
    for layer in layers:
        layer.gradient_checkpointing = layer.training = on  # training of the layer alone: its dropout stays off
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
