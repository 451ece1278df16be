"""Rescoring: rewards of another reward function for stored rollouts, beside those that they earned.

Driven by ``agl rewards rescore``. Nothing is run again: a reward function sees the same record that it sees as an
attempt ends. What is written stands under a name of its own, settles no rollout, and is read only where it is asked
for by name, so that a training step that is executed again is the same step.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentlightning.adapters.trajectories import named_rewards
from agentlightning.errors import AgentLightningError, NotFoundError
from agentlightning.records import Mode, Reward, Rollout
from agentlightning.runner.failure import at_line
from agentlightning.runner.result import RolloutResult, result_of
from agentlightning.runner.scoring import FINAL, Score, Scorer
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.scan import by_attempt, find_run, read_rollouts

AT_ONCE = 16
"""Rollouts that are scored at a time."""
TOLERANCE = 1e-9
"""Rewards that differ by less are the same."""


@dataclass(frozen=True, slots=True)
class RescoredRollout:
    """One rollout, scored again."""

    rollout: Rollout
    score: Score | None
    """None where the function failed."""
    problem: str = ""
    """The function's failure."""
    stood: bool = False
    """True if it was not scored again, since the store has the reward of an earlier rescoring of this name."""

    @property
    def old(self) -> float | None:
        """The rollout's own reward."""
        return self.rollout.reward

    @property
    def new(self) -> float | None:
        return None if self.score is None else self.score.finals[FINAL]

    @property
    def change(self) -> float | None:
        """New less old; None where either is not known."""
        return None if self.new is None or self.old is None else self.new - self.old


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardComparison:
    """Old and new rewards of a run, in numbers. None where too little is known."""

    rollouts: int
    scored: int
    failed: int
    changed: int
    """Rollouts of both rewards that differ."""
    old_mean: float | None
    new_mean: float | None
    """Both over the rollouts that have both."""
    correlation: float | None
    """Pearson's, of old and new."""
    order_kept: float | None
    """Of the pairs of rollouts of one group whose old rewards differ, the share that the new ones order alike: what an
    advantage within the group sees. Pairs that the new rewards do not tell apart count half."""


@dataclass(kw_only=True)
class Rescoring:
    """One reward function over the rollouts of one run."""

    store: LightningStore
    run_id: str
    scorer: Scorer
    mode: Mode | None = None
    step: int | None = None
    limit: int | None = None
    keep_as: str | None = None
    """Record the new rewards: the final one under this name, others as ``NAME.OTHER``. None: they are only told."""
    progress: Callable[[int], None] = lambda _: None
    found: list[RescoredRollout] = field(default_factory=list)

    async def score(self) -> None:
        """Score every rollout that succeeded. NotFoundError where there is none.

        What is kept is recorded as soon as it is known: a judge is paid by the answer. A rollout that has a reward of the
        name keeps it, so that what was learned from stays what it was.
        """
        await find_run(self.store, self.run_id)
        query = RolloutQuery(run_id=self.run_id, mode=self.mode, step=self.step, states=["succeeded"], limit=self.limit)
        async for part in read_rollouts(self.store, query):
            self.found += await self.scored(part)
            self.progress(len(self.found))
        if not self.found:
            raise NotFoundError(f"{self.run_id}: no rollout that succeeded matches")

    async def scored(self, rollouts: Sequence[Rollout]) -> list[RescoredRollout]:
        """Scores these rollouts, which succeeded, in their order."""
        ids = [rollout.id for rollout in rollouts]
        calls, spans, rewards, attempts = await asyncio.gather(
            self.store.calls(ids), self.store.spans(ids), self.store.rewards(ids), self.store.attempts(ids)
        )
        outputs = {(one.rollout_id, one.attempt): one.output for one in attempts}
        calls_of, spans_of, rewards_of = by_attempt(calls), by_attempt(spans), by_attempt(rewards)
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(rollout: Rollout) -> RescoredRollout:
            key = rollout.id, rollout.attempt
            rewards = rewards_of[key]
            stands = None if self.keep_as is None else _score_that_stands(rollout, rewards, self.keep_as)
            if stands is not None:
                return RescoredRollout(rollout, stands, stood=True)
            result = result_of(calls_of[key], spans_of[key], rewards, rollout.attempt, outputs.get(key))
            async with gate:
                return await self._one(rollout, result)

        return await asyncio.gather(*(one(rollout) for rollout in rollouts))

    async def _one(self, rollout: Rollout, result: RolloutResult) -> RescoredRollout:
        try:
            score = await self.scorer.score(rollout.task, result)
        except AgentLightningError as error:
            return RescoredRollout(rollout, None, str(error) + at_line(error.__cause__))
        except Exception as error:  # the user's own code: whatever it raises is told with its rollout
            return RescoredRollout(rollout, None, f"{type(error).__name__}: {error}")
        if self.keep_as is not None:
            await self.store.record_rewards(_records(rollout, score, self.keep_as))
        return RescoredRollout(rollout, score)


def _score_that_stands(rollout: Rollout, rewards: Sequence[Reward], name: str) -> Score | None:
    """The final reward of that name alone, which is all that is compared; None where there is none."""
    value = named_rewards(rewards, name).get((rollout.id, rollout.attempt))
    return None if value is None else Score(finals={FINAL: value})


def _records(rollout: Rollout, score: Score, name: str) -> list[Reward]:
    named = [(key, value, None) for key, value in score.finals.items()]
    steps = [(key, value, call) for call, said in score.steps.items() for key, value in said.items()]
    now = time.time_ns()
    return [
        Reward(
            id=".".join(filter(None, (rollout.id, str(rollout.attempt), "rescored", name, key, call))),
            run_id=rollout.run_id,
            rollout_id=rollout.id,
            attempt=rollout.attempt,
            value=value,
            name=name if key == FINAL else f"{name}.{key}",
            call_id=call,
            source="rescored",
            created_ns=now,
        )
        for key, value, call in [*steps, *named]
    ]


def compare(found: Sequence[RescoredRollout]) -> RewardComparison:
    """Old against new. Rewards (0, 1, 1) and (0, 1, 0.5): one changed, means 2/3 and 1/2, order kept."""
    both = [(one.old, one.new) for one in found if one.old is not None and one.new is not None]
    old, new = [pair[0] for pair in both], [pair[1] for pair in both]
    return RewardComparison(
        rollouts=len(found),
        scored=sum(one.score is not None for one in found),
        failed=sum(one.score is None for one in found),
        changed=sum(abs(before - after) > TOLERANCE for before, after in both),
        old_mean=statistics.fmean(old) if old else None,
        new_mean=statistics.fmean(new) if new else None,
        correlation=_correlation(old, new),
        order_kept=_order_kept(found),
    )


def _correlation(old: Sequence[float], new: Sequence[float]) -> float | None:
    """None where one of them is the same throughout."""
    if len({*old}) < 2 or len({*new}) < 2:
        return None
    return statistics.correlation(old, new)


def _order_kept(found: Sequence[RescoredRollout]) -> float | None:
    groups: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in found:
        if one.old is not None and one.new is not None:
            groups[one.rollout.group_id].append((one.old, one.new))
    kept, pairs = 0.0, 0
    for group in groups.values():
        for place, (old, new) in enumerate(group):
            for before, after in group[:place]:
                if abs(old - before) > TOLERANCE:
                    pairs += 1
                    same = (old > before) == (new > after)
                    kept += 0.5 if abs(new - after) <= TOLERANCE else float(same)
    return kept / pairs if pairs else None
