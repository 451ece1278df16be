"""TrainingWorker: verl's worker of one device, with what its methods do not offer. verl's Ray actors are made of it."""

from __future__ import annotations

import os

import ray
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers_tinker import TinkerActorRolloutRefWorker


class TrainingWorker(TinkerActorRolloutRefWorker):  # type: ignore[misc]
    """One rank of the policy, with its part of the reference and its way to the rollout server."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def clip_at(self, norm: float) -> None:
        """Bound of the gradient's norm from the next update on: verl reads it at each, and takes it at no other place."""
        engine = self.actor.engine
        for config in (engine.optimizer_config, getattr(engine.optimizer, "config", None)):
            if config is not None:
                config.clip_grad = norm

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def process(self) -> tuple[str, int]:
        """The node that this worker is on, and its process id there."""
        return ray.get_runtime_context().get_node_id(), os.getpid()
