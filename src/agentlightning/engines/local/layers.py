"""Changes to the layers of a model before it is trained: dropout, prefix trees, recomputation.

The learner drives it, once, at start. Each raises ModelError, or EngineError for dropout, where the model cannot have it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from agentlightning.engines.local import tree
from agentlightning.engines.local.llama import LLAMA_SHAPED
from agentlightning.errors import EngineError, ModelError

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


def grow_trees(model: Any, folder: Path, dropout: float) -> None:
    """Let the model's layers attend within prefix trees."""
    config = model.config
    windowed = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    if type(model).__name__ not in LLAMA_SHAPED or windowed:
        what = "its attention has a sliding window" if windowed else f"{type(model).__name__} is not known to"
        raise ModelError(f"model {folder}: packing = 'prefix_tree' does not fit ({what}); expected packing = 'padded'")
    if dropout:
        raise ModelError(
            "packing = 'prefix_tree' gives sequences that share a token the same dropout; expected dropout 0"
        )
    tree.enable(model)


def recompute(model: Any, folder: Path, dropout: float) -> None:
    """Gradient checkpointing: each layer is computed again in the backward pass, and keeps no activations until then."""
    if dropout:
        raise ModelError("gradient_checkpointing would draw other dropout the second time; expected dropout 0")
    from transformers.modeling_layers import GradientCheckpointingLayer

    found = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not found:
        raise ModelError(f"model {folder}: {type(model).__name__} has no layer to recompute")
    for layer in found:
        layer.gradient_checkpointing = layer.training = True  # training of the layer alone: its dropout stays off
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
