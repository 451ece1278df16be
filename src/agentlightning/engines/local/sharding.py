"""Weights in parts: FSDP2 splits every parameter over the ranks of a learner, and a layer is whole only while it computes.

The learner, its adapter and its optimizer drive it. With one rank nothing is split: `whole` and `part` then give what they
got. Refuses to know processes and losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from agentlightning.errors import ModelError


def hidden_states(model: Any, **inputs: Any) -> Tensor:
    """[B, T, X]: the pass through all of a Llama-shaped model but its head; a method of the model, once bound to it."""
    states: Tensor = model.model(**inputs).last_hidden_state
    return states


def shard(model: Any, folder: Path, mesh: DeviceMesh, *, bfloat16: bool) -> None:
    """Split a model's parameters over the mesh and move them to its device, layer by layer: no device ever holds them all.

    bfloat16: a layer's weights are gathered, and their gradients computed, in bfloat16; what is kept, and the sum over
    ranks, is float32. Embedding and head are gathered in float32: the head's gradient is a sum over many pieces of logits.
    Gradients are added over the ranks, not averaged: the loss is a SUM. ModelError where no layers are found.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    found = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not found:
        raise ModelError(f"model {folder}: {type(model).__name__} has no layers to split over engine.learner_processes")
    # Inputs of a layer stay as they are: the residual stream is float32, as autocast leaves it on one device.
    rough = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for layer in found:
        fully_shard(layer, mesh=mesh, mp_policy=rough if bfloat16 else MixedPrecisionPolicy())
    fully_shard(model, mesh=mesh)
    if hasattr(model, "hidden_states"):
        register_fsdp_forward_method(model, "hidden_states")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    # The head has no gradient on a rank without tokens of its own: it then counts as 0 instead of being left out.
    model.set_reduce_scatter_unused_params(True)


def reshard(model: Any) -> None:
    """Drop the whole embedding and head that a pass without a backward one leaves, so that the next gathers new ones."""
    if isinstance(model, FSDPModule):
        model.reshard()


def whole(value: Any, keep: bool = True) -> Any:
    """The union of a tensor's parts, on the CPU; all ranks call it together. Without `keep` this rank forgets it again."""
    if not isinstance(value, DTensor):
        return value
    union = value.full_tensor()
    return union.cpu() if keep else value


def whole_state(model: torch.nn.Module, keep: bool) -> dict[str, Tensor]:
    """All weights of a model by name, as `whole`; tied ones are one tensor."""
    unions: dict[int, Tensor] = {}
    found = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in unions:
            unions[id(value)] = whole(value.detach(), keep)
        found[name] = unions[id(value)]
    return found


def part(value: Any, like: Tensor) -> Any:
    """This rank's part of a whole tensor, split as `like` is; what has another shape, as a count of steps, stays whole."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    # Without a source every rank takes its part of what it read itself: nothing is sent.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def copy_into(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy whole tensors over those of the same names; RuntimeError where names or shapes differ."""
    shapes = [{name: tuple(value.shape) for name, value in state.items()} for state in (targets, values)]
    if shapes[0] != shapes[1]:
        differ = sorted(name for name in {*targets, *values} if shapes[0].get(name) != shapes[1].get(name))
        raise RuntimeError(f"weights differ in name or shape, {differ[0]} first")
    for name, target in targets.items():
        target.copy_(part(values[name], target))
