"""LoRA and DoRA: a model whose own weights stay as they are, and a small adapter beside them that is trained.

The learner drives it; peft computes it. The reference model of a KL term is the same model with its adapter switched off.
Sampler and checkpoints get whole weights, adapter and base in one, so that nothing else has to know of adapters. Refuses to
know losses and optimizers.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentlightning.engines.local.options import Lora
from agentlightning.engines.local.sharding import copy_into
from agentlightning.engines.models import first_line
from agentlightning.engines.saved_folders import replace_folder, seal
from agentlightning.errors import MissingExtraError, ModelError

FOLDER = "adapter"
"""Folder of a checkpoint with the adapter alone, as peft writes it."""
BASE = ".base_layer"


class Adapter:
    """An adapter put into a model, all of whose other parameters are frozen by that.

    Hu et al. (2021), LoRA: Low-Rank Adaptation of Large Language Models, equation 3: W + (alpha / rank) B A, with B = 0 at
    first; Liu et al. (2024), DoRA: Weight-Decomposed Low-Rank Adaptation, equation 5. A is drawn from `seed`. Raises
    ModelError where the model has no such layers, MissingExtraError without peft.
    """

    def __init__(self, model: Any, folder: Path, lora: Lora, seed: int) -> None:
        try:
            import peft
        except ImportError as cause:
            raise MissingExtraError("peft", "lora") from cause
        from transformers.pytorch_utils import Conv1D

        self._peft = peft
        self._model = model
        self._config = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            use_dora=lora.dora,
            fan_in_fan_out=any(isinstance(one, Conv1D) for one in model.modules()),
            target_modules=list(lora.targets) or "all-linear",
            base_model_name_or_path=str(folder),
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                peft.inject_adapter_in_model(self._config, model)
            except ValueError as cause:
                raise ModelError(f"model {folder}: engine.lora does not fit it ({first_line(cause)})") from cause
        self._layers = {name: one for name, one in model.named_modules() if isinstance(one, peft.tuners.lora.LoraLayer)}
        if not self._layers:
            raise ModelError(f"model {folder}: engine.lora found no layer to adapt among {list(lora.targets)}")

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
