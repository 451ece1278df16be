"""Collect: enqueue rollouts and wait until all of them are finished.

Driven by the training loop and by evaluation. There is one push-based wait for everything that is outstanding, whatever the
number of rollouts. Enqueueing is idempotent, so a trainer that was killed picks up what its predecessor had enqueued.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from agentlightning.errors import NoCallsError
from agentlightning.store.base import NO_CALLS, LightningStore
from agentlightning.types import FINAL_STATES, NewRollout, Rollout

ENQUEUE_BATCH = 2048
PROGRESS_SHARES = 20
"""The waiter wakes when a twentieth of what is outstanding has finished: often enough to watch, seldom enough to be free."""
WAIT_S = 10.0


class Collector:
    """Waits for rollouts of one run; keeps its place in the order in which they finish."""

    def __init__(self, store: LightningStore, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._seen: int | None = None

    async def collect(
        self, wanted: Sequence[NewRollout], on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> list[Rollout]:
        """Enqueue `wanted` and return its rollouts, finished, in the order given.

        StoreError where nothing finishes because the store cannot be written any more.
        """
        _, rollouts = await self.collect_again(wanted, on_progress)
        return rollouts

    async def collect_again(
        self, wanted: Sequence[NewRollout], on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> tuple[list[Rollout], list[Rollout]]:
        """Like `collect`, with the rollouts of tries that came to nothing before.

        A try of an earlier process that was over and useless ended that process: whoever resumes wants another, which gets
        names of its own.
        """
        if self._seen is None:
            counts = await self._store.count(self._run_id)
            self._seen = sum(number for (_, state), number in counts.items() if state in FINAL_STATES)
        spent: list[Rollout] = []
        for number in itertools.count(1):
            names = wanted if number == 1 else [_try(new, number) for new in wanted]
            rollouts: list[Rollout] = []
            for start in range(0, len(names), ENQUEUE_BATCH):
                rollouts += await self._store.enqueue(names[start : start + ENQUEUE_BATCH])
            over = all(rollout.state in FINAL_STATES for rollout in rollouts)
            if not (rollouts and over and useless(rollouts)):
                break
            spent += rollouts
        return spent, await self._finish(rollouts, on_progress)

    async def _finish(self, rollouts: list[Rollout], on_progress: Callable[[int, int], None]) -> list[Rollout]:
        assert self._seen is not None
        finished = {rollout.id: rollout for rollout in rollouts if rollout.state in FINAL_STATES}
        outstanding = {rollout.id for rollout in rollouts} - set(finished)
        while outstanding:
            on_progress(len(finished), len(rollouts))
            at_least = 1 + len(outstanding) // PROGRESS_SHARES
            news = await self._store.wait(self._run_id, self._seen, at_least, WAIT_S)
            if not news:  # a full disk can still be read: workers would try, and this would wait, for ever
                await self._store.update_run(self._run_id)
            for rollout in news:
                self._seen = max(self._seen, rollout.finished_seq or 0)
                if rollout.id in outstanding:
                    outstanding.discard(rollout.id)
                    finished[rollout.id] = rollout
        on_progress(len(finished), len(rollouts))
        return [finished[rollout.id] for rollout in rollouts]


def _try(new: NewRollout, number: int) -> NewRollout:
    return replace(new, group_id=f"{new.group_id}:try{number}")


def useless(rollouts: Sequence[Rollout]) -> bool:
    """Whether nothing can come of them: all failed, or those that succeeded did so without a model call."""
    return all(rollout.state != "succeeded" or rollout.calls == 0 for rollout in rollouts)


def refuse_silence(rollouts: Sequence[Rollout]) -> str | None:
    """A sentence about rollouts that succeeded without one recorded call; None where every one has calls.

    Raises NoCallsError, with the likely cause, where no rollout at all has a recorded call: there is nothing to learn from.
    """
    succeeded = [rollout for rollout in rollouts if rollout.state == "succeeded"]
    silent = [rollout for rollout in succeeded if rollout.calls == 0]
    if not silent:
        return None
    cause = silent[0].warning or NO_CALLS
    if len(silent) == len(succeeded):
        raise NoCallsError(f"none of the {len(silent)} rollouts that finished has a model call: {cause}")
    return f"{len(silent)} of {len(succeeded)} rollouts finished without a model call: {cause}"
