"""Changes to the layers of a model before it is trained: low-rank adapters, dropout, prefix trees, recomputation.

The learner drives it, once, at start. Each raises ModelError if the model cannot have it. Refuses to know losses.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentlightning.engines.local.batches import attend_in_trees
from agentlightning.engines.local.llama import LLAMA_SHAPED
from agentlightning.engines.local.sharding import copy_into
from agentlightning.engines.models import first_line
from agentlightning.engines.saved_folders import replace_folder, seal
from agentlightning.errors import EngineError, MissingExtraError, ModelError

FOLDER = "adapter"
"""Folder of a checkpoint with the adapter alone, as peft writes it."""
BASE = ".base_layer"


class Adapter:
    """An adapter put into a model, all of whose other parameters are frozen by that.

    Hu et al. (2021), LoRA: Low-Rank Adaptation of Large Language Models, equation 3: W + (alpha / rank) B A, with B = 0 at
    first, and alpha twice the rank, in every linear layer but the head. A is drawn from `seed`. The reference model of a KL
    term is the same model with its adapter switched off. Sampler and checkpoints get whole weights, adapter and base in one.
    Raises ModelError where the model has no such layers, MissingExtraError without peft.
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
        """The adapter alone, for peft and for whatever serves its adapters. Raises OSError or SafetensorError."""
        from safetensors.torch import save_file

        folder.mkdir()
        self._config.save_pretrained(str(folder))
        state = {f"base_model.model.{name}": value.contiguous() for name, value in self._state(state).items()}
        save_file(state, folder / "adapter_model.safetensors")

    def export(self, folder: Path, state: dict[str, Tensor]) -> None:
        """The same as a sealed folder, whole or not at all. Raises as `save` does."""
        temporary = folder.with_name(f".{folder.name}.new")
        shutil.rmtree(temporary, ignore_errors=True)
        self.save(temporary, state)
        seal(temporary)
        replace_folder(temporary, folder)

    def load(self, folder: Path) -> None:
        """Loads what `save` wrote, bit for bit; RuntimeError where it belongs to an adapter of another shape."""
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
    """Residual dropout on embeddings, attention and MLP outputs, from the learner's own noise, while `training()`."""
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


def grow_trees(model: Any, folder: Path) -> None:
    """Let the model's layers attend within prefix trees."""
    config = model.config
    windowed = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    if type(model).__name__ not in LLAMA_SHAPED or windowed:
        what = "its attention has a sliding window" if windowed else f"{type(model).__name__} is not known to"
        raise ModelError(f"model {folder}: packing = 'prefix_tree' does not fit ({what}); expected packing = 'padded'")
    attend_in_trees(model)


def recompute(model: Any, folder: Path) -> None:
    """Gradient checkpointing: each layer is computed again in the backward pass, and keeps no activations until then."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not found:
        raise ModelError(f"model {folder}: {type(model).__name__} has no layer to recompute")
    for layer in found:
        layer.gradient_checkpointing = layer.training = True  # training of the layer alone: its dropout stays off
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
