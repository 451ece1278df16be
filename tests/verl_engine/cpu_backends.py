"""FSDP2 over gloo and the rollout server of cpu_rollout.py, in verl's registries; loaded after cpu_platform.py."""

from __future__ import annotations

import verl.utils.distributed
import verl.workers.engine.fsdp.transformer_impl as fsdp
from verl.workers.engine import EngineRegistry
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry


def _one_backend(
    timeout_second=None, backend=None, _initialize=verl.utils.distributed.initialize_global_process_group_ray
):
    """verl names a backend for the CPU and one for the device; torch takes no two for one device."""
    return _initialize(timeout_second, backend or "cpu:gloo")


def _pageable(pin_memory=True, _policy=fsdp.CPUOffloadPolicy):
    """Only a device has memory that can be pinned."""
    return _policy(pin_memory=False)


def _replica():
    from cpu_rollout import CpuReplica

    return CpuReplica


verl.utils.distributed.initialize_global_process_group_ray = _one_backend
fsdp.CPUOffloadPolicy = _pageable
EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device="cpu")(fsdp.FSDPEngineWithLMHead)
RolloutReplicaRegistry.register("cpu", _replica)
_ROLLOUT_REGISTRY[("cpu", "async")] = "cpu_rollout.ServerAdapter"
