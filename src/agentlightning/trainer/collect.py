"""Collect: enqueue rollouts and wait until they are finished.

Driven by evaluation and by `rl/scheduler.py`, at the same time: there is one push-based wait for everything outstanding,
whatever the number of rollouts and of callers, and what one of them receives for the other is kept for it. Enqueueing is
idempotent, so a trainer that was killed picks up what its predecessor had enqueued.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from agentlightning.errors import NoCallsError
from agentlightning.records import FINAL_STATES, NewRollout, Rollout
from agentlightning.store.base import LightningStore
from agentlightning.store.gateway_events import NO_CALLS

ENQUEUE_BATCH = 2048
PROGRESS_SHARES = 20
"""The waiter wakes when a twentieth of what is outstanding has finished: often enough to watch, seldom enough to be free."""
WAIT_S = 10.0


class RolloutCollector:
    """Waits for rollouts of one run; keeps its place in the order in which they finish."""

    def __init__(self, store: LightningStore, run_id: str) -> None:
        self._store = store
        self.run_id = run_id
        self.waited_s = 0.0
        """Time of all waits so far, whoever waited."""
        self._seen: int | None = None
        self._watched: set[str] = set()
        self._finished: dict[str, Rollout] = {}
        """Finished rollouts that were watched for and not fetched yet: never more than are outstanding."""

    async def collect(
        self, wanted: Sequence[NewRollout], on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> list[Rollout]:
        """Enqueue `wanted` and return its rollouts, finished, in the order given.

        StoreError where nothing finishes because the store cannot be written any more.
        """
        await self.begin()
        rollouts: list[Rollout] = []
        for start in range(0, len(wanted), ENQUEUE_BATCH):
            rollouts += await self._store.enqueue(wanted[start : start + ENQUEUE_BATCH])
        return await self.finished(rollouts, on_progress)

    async def finished(
        self, rollouts: Sequence[Rollout], on_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> list[Rollout]:
        """Return these rollouts, read after `begin`, once all have finished, in the order given. StoreError as `collect`."""
        finished = {rollout.id: rollout for rollout in rollouts if rollout.state in FINAL_STATES}
        outstanding = {rollout.id for rollout in rollouts} - set(finished)
        self.watch(outstanding)
        while outstanding:
            on_progress(len(finished), len(rollouts))
            await self.wait_finished(len(outstanding))
            finished |= self.fetch(outstanding)
            outstanding -= set(finished)
        on_progress(len(finished), len(rollouts))
        return [finished[rollout.id] for rollout in rollouts]

    async def begin(self) -> int:
        """Reads the place in the order of finished rollouts, before what is to be watched is read or enqueued."""
        if self._seen is None:
            counts = await self._store.count(self.run_id)
            self._seen = sum(number for (_, state), number in counts.items() if state in FINAL_STATES)
        return self._seen

    def watch(self, rollout_ids: Iterable[str]) -> None:
        """Keeps these rollouts, once they have finished, until they are fetched."""
        self._watched.update(rollout_ids)

    def forget(self, rollout_ids: Iterable[str]) -> None:
        """Drops rollouts that nobody will fetch."""
        for rollout_id in rollout_ids:
            self._watched.discard(rollout_id)
            self._finished.pop(rollout_id, None)

    def fetch(self, rollout_ids: Iterable[str]) -> dict[str, Rollout]:
        """Those of these rollouts that have finished, by id; they are watched no longer."""
        return {one: self._finished.pop(one) for one in list(rollout_ids) if one in self._finished}

    async def wait_finished(self, outstanding: int, within_s: float = WAIT_S) -> None:
        """Waits until some rollouts have finished, the more the more are `outstanding`, or for `within_s` seconds."""
        assert self._seen is not None, "begin() comes first"
        started = time.perf_counter()
        finished = await self._store.wait(self.run_id, self._seen, 1 + outstanding // PROGRESS_SHARES, within_s)
        self.waited_s += time.perf_counter() - started
        if not finished and within_s >= WAIT_S:
            # A full disk can still be read: workers would try, and this would wait, for ever. A write finds out.
            await self._store.update_run(self.run_id)
        for rollout in finished:
            self._seen = max(self._seen, rollout.finished_seq or 0)
            if rollout.id in self._watched:
                self._watched.discard(rollout.id)
                self._finished[rollout.id] = rollout


def nothing_to_learn(rollouts: Sequence[Rollout]) -> bool:
    """True where nothing can be learned: all failed, or those that succeeded did so without a model call."""
    return all(rollout.state != "succeeded" or rollout.calls == 0 for rollout in rollouts)


def check_calls_recorded(rollouts: Sequence[Rollout]) -> str | None:
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
