"""Opponents: policies that are sampled and never trained, with the weights that each step's agents meet.

The RL loop drives it before every step. A frozen one keeps its weights; a snapshot samples those that a trained policy had
at one of the run's latest checkpoints. Which one depends on the step and on the checkpoints that are here, so nothing of it
has to be recorded to resume: steps that are executed again sample nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentlightning.config.policies import PolicyConfig
from agentlightning.engines.base import Engine, Metrics
from agentlightning.engines.saved_folders import LEARNER_STATE
from agentlightning.records import JSON, Resource
from agentlightning.store.base import LightningStore
from agentlightning.trainer.checkpoint import RunFolder, checkpoint_folders
from agentlightning.trainer.checkpoint_files import local_folder


@dataclass(kw_only=True)
class Opponents:
    """The policies of a run that are never trained."""

    settings: Mapping[str, PolicyConfig]
    """By alias: the opponents' alone."""
    values: Mapping[str, JSON]
    """Values of their resources, by alias."""
    trained: Sequence[str]
    """Aliases of the policies that are trained."""
    seed: int
    run_id: str
    folder: RunFolder
    store: LightningStore
    engine: Engine
    _serving: dict[str, int | None] = field(default_factory=dict)
    """By alias: the step of the checkpoint whose weights it samples; None: the weights that it started with."""

    async def serve(self, step: int) -> None:
        """Has each opponent sample the weights that agents meet from `step` on."""
        for alias, own in self.settings.items():
            snapshots = {} if own.snapshot_of is None else await self._snapshots(step, own.snapshot_of, own.window)
            drawn = random.Random(f"{self.seed} {alias} {step}").choice(sorted(snapshots)) if snapshots else None
            if alias in self._serving and drawn in (None, self._serving[alias]):  # None: it goes on with what it has
                continue
            if drawn is not None:
                await self.engine.load(snapshots[drawn], alias)
            value = (
                self.values[alias] if own.snapshot_of is None else self.values[alias] | {"snapshot_step": drawn or 0}
            )
            named = Resource(run_id=self.run_id, name=alias, kind="policy", value=value, step=step)
            [published] = await self.store.put_resources([named])
            if drawn is not None:
                await self.engine.publish(published.version, alias)
            self._serving[alias] = drawn

    def metrics(self) -> Metrics:
        """By path, the step of the checkpoint that each snapshot samples."""
        return {
            f"policies/{alias}/policy/snapshot_step": float(self._serving.get(alias) or 0)
            for alias, own in self.settings.items()
            if own.snapshot_of is not None
        }

    async def _snapshots(self, step: int, policy: str, window: int) -> dict[int, Path]:
        """The policy's folders in the latest checkpoints of earlier steps, by their steps, as far as they are here."""
        found = {}
        for checkpoint in await self.store.checkpoints(self.run_id):
            folder = checkpoint_folders(local_folder(checkpoint, self.folder), self.trained)[policy]
            if 0 < checkpoint.step < step and await asyncio.to_thread((folder / LEARNER_STATE).exists):
                found[checkpoint.step] = folder
        return dict(sorted(found.items())[-window:])
