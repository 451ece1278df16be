"""A recorded run in a store, and an engine that also remembers preferences, for tests of learning from the record."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loop_doubles import WORKER, RememberingEngine

import build
from agentlightning.algorithms.offline import OfflineAlgorithm
from agentlightning.config.run import Config, parse_config
from agentlightning.records import Finish, NewRollout, Resource
from agentlightning.store.base import LightningStore
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.monitor.metric_logger import MetricLogger
from agentlightning.trainer.offline import OfflineDataset, OfflineLoop
from agentlightning.trainer.progress import Progress, Silent
from agentlightning.trainer.scheduler import RolloutCollector
from agentlightning.training_types import Loss, Preference, PreferenceLoss, TrainingSequence

SOURCE = "source"
TASKS, GROUP, STEPS = 12, 4, 5


class ComparingEngine(RememberingEngine):
    """Its logprobs depend on how often it was updated; those of the reference never do."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[list[Preference], PreferenceLoss, list[Sequence[TrainingSequence]]]] = []
        self.rows: list[list[TrainingSequence]] = []

    async def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Loss, policy: str = "default"
    ) -> dict[str, float]:
        assert loss.name == "sft"
        self.rows.append(list(sequences))
        return await super().forward_backward(sequences, loss, policy)

    async def reference_logprobs(
        self, sequences: Sequence[TrainingSequence], policy: str = "default"
    ) -> list[list[float]]:
        return [[-0.5] * len(row.tokens) for row in sequences]

    async def logprobs(self, sequences: Sequence[TrainingSequence], policy: str = "default") -> list[list[float]]:
        return [[-0.5 + 0.01 * len(self.updates)] * len(row.tokens) for row in sequences]

    async def forward_backward_preferences(
        self,
        examples: Sequence[Preference],
        loss: PreferenceLoss,
        mismatched: Sequence[Sequence[TrainingSequence]] = (),
        policy: str = "default",
    ) -> dict[str, float]:
        self.batches.append((list(examples), loss, list(mismatched)))
        for example in examples:
            shape = [[row.rollout_id for row in rows] for rows in (example.chosen, example.rejected)]
            self.learned.append(json.dumps(shape))
            self._pending.update(json.dumps([shape, example.weight, loss.chosen_weight]).encode())
        self._pending.update(json.dumps([row.tokens for rows in mismatched for row in rows]).encode())
        return {"loss": 0.0, "tokens": 1.0, "examples": float(len(examples))}


async def record(
    store: LightningStore,
    run: str = SOURCE,
    mode: Any = "train",
    tasks: int = TASKS,
    calls: Sequence[dict[str, Any]] = ({},),
) -> list[str]:
    """A finished run in which half of each group is rewarded with 1; ids of its rollouts, which sort alike.

    calls: of each rollout, what differs from a call of the policy.
    """
    if not await store.runs(ids=[run]):
        await store.create_run(run, {}, run)
    new = [
        NewRollout(run_id=run, task={"n": task}, group_id=f"{mode} {task}", replica=replica, mode=mode)
        for task in range(tasks)
        for replica in range(GROUP)
    ]
    queued = await store.enqueue(new)
    claims = await store.claim(replace(WORKER, run_id=run), limit=len(new))
    await store.append_calls(
        [
            build.call(
                claim,
                f"call-{claim.rollout.id}-{number}",
                **{"suffix_ids": [1, claim.rollout.task["n"]], "sampled_ids": [3, 4 + claim.rollout.replica], **call},
            )
            for claim in claims
            for number, call in enumerate(calls)
        ]
    )
    rewards = {
        claim.rollout.id: build.reward(claim, float(claim.rollout.replica % 2), f"reward-{claim.rollout.id}")
        for claim in claims
    }
    await store.finish(
        [Finish(lease=claim.lease, state="succeeded", rewards=(rewards[claim.rollout.id],)) for claim in claims]
    )
    return [rollout.id for rollout in queued]


async def recorded_with(store: LightningStore, tokenizer: Path, run: str = SOURCE) -> None:
    """The run was sampled with this tokenizer."""
    value = {"tokenizer": str(tokenizer)}
    await store.put_resources([Resource(run_id=run, name="default", kind="policy", value=value)])


def config(name: str, *, evaluated: bool = False, **tables: Any) -> Config:
    table: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"from_run": SOURCE},
        "algorithm": {"type": name},
        "trainer": {"steps": STEPS, "tasks_per_step": 4, "learning_rate": 0.01, "checkpoint_every": 2},
        "eval": {"every": 2},
    }
    if evaluated:
        table["agent"] = {"run": "a.py:f"}
        table["data"]["val"] = "v"
    for key, values in tables.items():
        table[key] = {**table.get(key, {}), **values}
    return parse_config(table)


def dataset(
    store: Any, algorithm: OfflineAlgorithm, folder: RunFolder, notes: list[str] | None = None
) -> OfflineDataset:
    return OfflineDataset(
        algorithm=algorithm,
        store=store,
        sources=[SOURCE],
        folder=folder,
        tokenizer=folder.path,
        longest=100,
        note=(notes if notes is not None else []).append,
    )


def loop(
    store: Any,
    engine: Any,
    folder: Path,
    algorithm: OfflineAlgorithm,
    run: str = "run",
    val: Sequence[dict[str, int]] = (),
    progress: Progress | None = None,
) -> OfflineLoop:
    run_folder = RunFolder(folder, run)
    settings = config(algorithm.name, evaluated=bool(val))
    run_folder.create(settings)
    return OfflineLoop(
        config=settings,
        algorithm=algorithm,
        run_id=run,
        folder=run_folder,
        store=store,
        engine=engine,
        collector=RolloutCollector(store, run),
        policy={"model": "m"},
        dataset=dataset(store, algorithm, run_folder),
        val=val,
        progress=progress or Silent(),
        metric_logger=MetricLogger(run_id=run, folder=run_folder, store=store, progress=progress or Silent()),
    )
