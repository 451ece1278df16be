"""Stored rollouts as rows for other trainers: conversations, and pairs of which one is preferred. Driven by ``agl
runs export --as``. The rows hold messages in the form of Chat Completions, with the rewards that chose them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from agentlightning.adapters.conversations import conversations, preference_row
from agentlightning.adapters.trajectories import JUDGE, named_rewards
from agentlightning.algorithms.offline import Candidate, by_task, pairs
from agentlightning.errors import NotFoundError
from agentlightning.records import JSON, Call, Rollout
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.scan import find_run, read_rollouts
from agentlightning.trainer.data.tasks import content_key


@dataclass(kw_only=True)
class DatasetExport:
    """The rows of one run's training rollouts that succeeded."""

    store: LightningStore
    run_id: str
    reward: str | None = None
    """Name of the final reward that counts; None: the rollouts' own."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Rollouts, or pairs of them, that make no row, by reason."""

    async def conversations(self, threshold: float | None = None) -> AsyncIterator[JSON]:
        """``{"messages", "tools"?, "reward", "rollout"}`` for each conversation of the rollouts that earned
        `threshold`."""
        async for rollout, calls in self._rollouts():
            if threshold is not None and (rollout.reward is None or rollout.reward < threshold):
                self.left_out["its reward is below the threshold, or not known"] += 1
                continue
            rows = conversations(calls)
            self.left_out["it has no call"] += not rows
            for row in rows:
                yield {**row, "reward": rollout.reward, "rollout": rollout.id}

    async def preferences(self, margin: float = 0.0) -> AsyncIterator[JSON]:
        """``{"prompt", "chosen", "rejected", "tools"?, "rollouts"}``: of the rollouts of each task the best with the
        worst, and
        so on, as algorithm dpo pairs them."""
        candidates: list[Candidate] = []
        async for rollout, calls in self._rollouts():
            task, answer = content_key(rollout.task), content_key([call.completion for call in calls])
            candidates.append(Candidate(rollout_id=rollout.id, task=task, reward=rollout.reward, answer=answer))
        for group in by_task(candidates):
            for better, worse in pairs(group, margin):
                by_rollout = await self._calls([better.rollout_id, worse.rollout_id])
                row = preference_row(by_rollout[better.rollout_id], by_rollout[worse.rollout_id])
                if row is None:
                    self.left_out["the two are not one conversation each that begin alike"] += 1
                else:
                    yield {**row, "rollouts": [better.rollout_id, worse.rollout_id]}

    async def _rollouts(self) -> AsyncIterator[tuple[Rollout, list[Call]]]:
        await find_run(self.store, self.run_id)
        unnamed = self.reward is not None
        query = RolloutQuery(run_id=self.run_id, mode="train", states=["succeeded"])
        async for part in read_rollouts(self.store, query):
            ids = [rollout.id for rollout in part]
            by_rollout = await self._calls(ids)
            named = {} if self.reward is None else named_rewards(await self.store.rewards(ids), self.reward)
            unnamed = unnamed and not named
            for rollout in part:
                if self.reward is not None:
                    rollout = replace(rollout, reward=named.get((rollout.id, rollout.attempt)))
                yield rollout, by_rollout[rollout.id]
        if unnamed:
            raise NotFoundError(f"{self.run_id}: no training rollout has a final reward named {self.reward!r}")

    async def _calls(self, ids: Sequence[str]) -> defaultdict[str, list[Call]]:
        found: defaultdict[str, list[Call]] = defaultdict(list)
        for call in await self.store.calls(ids):
            if call.learnable and call.agent != JUDGE:
                found[call.rollout_id].append(call)
        return found
