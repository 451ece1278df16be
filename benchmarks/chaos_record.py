"""Checks of a run that chaos ended: counts from its store, and its weights against those of its lists, each executed once.

benchmarks/chaos.py drives it and says what the figures mean. It knows nothing of kills.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from agentlightning.adapters.trajectories import trajectories
from agentlightning.config.engine import LocalSampler
from agentlightning.engines.base import EngineNeeds, make_engine
from agentlightning.errors import AgentLightningError
from agentlightning.records import FINAL_STATES, Metric, Rollout, Step
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.open import open_store
from agentlightning.trainer.checkpoint import LEARNER_STATE, RunFolder
from agentlightning.trainer.checkpoint_files import last_checkpoint
from agentlightning.trainer.data.tasks import load_tasks
from agentlightning.trainer.load_trajectories import fixed_inputs, read_inputs
from agentlightning.trainer.processes import engine_setup
from agentlightning.trainer.schedules import algorithm_of
from agentlightning.trainer.task_sampler import HORIZON, SampledTasks, is_try, learnability

CLOSE = 1e-5
"""Largest difference of a weight that the order of threads could explain; one update moves weights by about 1e-3."""


class Record:
    """Reads the store and the last checkpoint of a run that has ended."""

    def __init__(self, folder: RunFolder, url: str, steps: int, rollouts: int) -> None:
        """steps and rollouts: how many of both there should be, the latter of training."""
        self._folder = folder
        self._url = url
        self._steps = steps
        self._rollouts = rollouts

    async def figures(self) -> dict[str, Any]:
        async with open_store(self._url) as store:
            (run,) = await store.runs(ids=[self._folder.run_id])
            steps = await store.steps(run.id)
            rollouts = await store.rollouts(RolloutQuery(run_id=run.id))
            training = [rollout for rollout in rollouts if rollout.mode == "train"]
            numbers = list(range(1, self._steps + 1))
            closed = [(step.step, step.state) for step in steps] == [(number, "closed") for number in numbers]
            updates, difference = await self._replay(store, steps, training)
            consumed = Counter(each.rollout_id for step in steps for each in step.consumed)
            return {
                "finished": sum(rollout.state in FINAL_STATES for rollout in rollouts),
                "lost": await self._lost(store, rollouts),
                "trained_twice": sum(number - 1 for number in consumed.values()) + updates + (difference > CLOSE),
                "resampled": await self._resampled(store, steps, training),
                "evidence": await self._evidence(store, steps, rollouts),
                "causes": await self._causes(store, rollouts),
                "probes": await self._probes(store),
                "completed": closed and run.state == "finished",
                "failed": sum(rollout.state != "succeeded" for rollout in rollouts),
                "lost_attempts": sum(rollout.lost for rollout in rollouts),
                "executed_again": self._folder_says("executing step"),
                "weights_differ_by": difference,
            }

    async def _lost(self, store: LightningStore, rollouts: list[Rollout]) -> int:
        calls = Counter(call.rollout_id for call in await store.calls([rollout.id for rollout in rollouts]))
        training = [rollout for rollout in rollouts if rollout.mode == "train"]
        return (
            sum(rollout.state not in FINAL_STATES for rollout in rollouts)
            + sum(rollout.state in FINAL_STATES and rollout.outcome is None for rollout in training)
            + sum(calls[rollout.id] != rollout.calls for rollout in rollouts)
            + max(0, self._rollouts - len(training))
        )

    async def _resampled(self, store: LightningStore, steps: list[Step], training: list[Rollout]) -> int:
        written = {each.rollout_id: step.created_ns for step in steps for each in step.consumed}
        attempts = await store.attempts(list(written))
        beside = sum(rollout.id not in written for rollout in training)
        return beside + sum(attempt.started_ns > written[attempt.rollout_id] for attempt in attempts)

    async def _evidence(self, store: LightningStore, steps: list[Step], rollouts: list[Rollout]) -> int:
        """Tries of the last steps that a fresh task sampler does not have, or has twice."""
        config, last = self._folder.config(), self._steps + 1
        assert config.data.train is not None
        tasks = load_tasks(str(self._folder.path.parents[1] / config.data.train), config.trainer.seed)
        sampled = SampledTasks(store=store, run_id=self._folder.run_id, tasks=tasks, sampler=learnability, seed=0)
        known = Counter(made for task in await sampled.records(last) for made, _ in task.tries)
        tries = {rollout.id for rollout in rollouts if is_try(rollout)}
        wanted = Counter(
            step.step
            for step in steps
            if step.step >= last - HORIZON
            for one in step.consumed
            if one.rollout_id in tries
        )
        return sum(abs(known[step] - wanted[step]) for step in known | wanted)

    async def _causes(self, store: LightningStore, rollouts: list[Rollout]) -> int:
        causes = {rollout.id: rollout.cause for rollout in rollouts if rollout.state != "cancelled"}
        attempts = [one for one in await store.attempts(list(causes)) if one.finished_ns is not None]
        last = {one.rollout_id: one.cause for one in sorted(attempts, key=lambda one: one.attempt)}
        return sum(one.cause is None for one in attempts) + sum(causes[key] != cause for key, cause in last.items())

    async def _probes(self, store: LightningStore) -> int:
        found = []
        for name in ("policy/weight_gap", "train/grad_norm"):
            metrics = await store.metrics(self._folder.run_id, name)
            found.append(Counter(metric.step for metric in metrics if not metric.abandoned))
        probes, updates = found
        return sum(abs(probes[step] - (updates[step] > 0)) for step in probes | updates)

    async def _replay(self, store: LightningStore, steps: list[Step], training: list[Rollout]) -> tuple[int, float]:
        """Execute the steps' lists once with a fresh engine: updates that the checkpoint has beyond those, where the engine
        counts them, and the largest difference of a weight."""
        with tempfile.TemporaryDirectory(prefix="agl-replay-") as place:
            replayed = Path(place) / "saved"
            await self._learn(store, steps, training, replayed)
            checkpoint = await last_checkpoint(store, self._folder)
            if checkpoint is None or checkpoint.step != self._steps:
                raise AgentLightningError(f"the last checkpoint is not of step {self._steps}: {checkpoint}")
            (weights, updates), (wanted, wanted_updates) = saved(Path(checkpoint.path)), saved(replayed)
        difference = max(float((weights[name] - wanted[name]).abs().max()) for name in wanted)
        return abs(updates - wanted_updates), difference

    async def _learn(self, store: LightningStore, steps: list[Step], training: list[Rollout], to: Path) -> None:
        config = self._folder.config()
        local = {"sampler": LocalSampler()} if config.engine.name == "local" else {}  # it only has to learn
        config = config.model_copy(update={"engine": config.engine.model_copy(update=local)})
        by_id = {rollout.id: rollout for rollout in training}
        rates = {metric.step: metric.value for metric in await self._rates(store)}
        engine = make_engine(engine_setup(config, EngineNeeds(), work_dir=to.parent))
        await engine.start()
        try:
            for step in steps:
                rollouts = [by_id[each.rollout_id] for each in step.consumed]
                inputs = await read_inputs(store, rollouts, fixed_inputs(step))
                kept, _ = trajectories(rollouts, inputs.calls, inputs.rewards)
                groups = [list(group) for _, group in itertools.groupby(kept, key=lambda each: each.group_id)]
                plan = algorithm_of(config).plan(groups, seed=config.trainer.seed * 1_000_003 + step.step)
                for minibatch in plan.minibatches:
                    await engine.forward_backward(minibatch, plan.loss)
                    await engine.optim_step(rates[step.step], config.trainer.grad_clip)
            await engine.save(to)
        finally:
            await engine.close()

    async def _rates(self, store: LightningStore) -> list[Metric]:
        metrics = await store.metrics(self._folder.run_id, "train/learning_rate")
        return [metric for metric in metrics if not metric.abandoned]

    def _folder_says(self, words: str) -> int:
        output = self._folder.path.parents[1] / "output.txt"
        return output.read_text(errors="replace").count(words)


def saved(folder: Path) -> tuple[dict[str, Any], int]:
    """The weights in a checkpoint's folder, and the number of updates that they have had, 0 where that is not said."""
    import torch
    from safetensors.torch import load_file

    weights = {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}
    return weights, torch.load(folder / LEARNER_STATE, weights_only=True).get("updates", 0)
