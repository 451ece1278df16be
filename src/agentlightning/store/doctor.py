"""The doctor: looks through a whole store for what must never be, of whatever kind the store is and while it is in use.

Driven by `agl store doctor` and by tests that killed something. It knows the methods and the promises in base.py, nothing of
tables; what exactly is wrong with what was read is in invariants.py. It reads in portions; what changed while it was read is
read again, and judged only once it holds still. It changes nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agentlightning.errors import NotFoundError
from agentlightning.records import FINAL_STATES, Mode, Rollout, RolloutState, Step
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.invariants import (
    RolloutRecord,
    check_alias_target,
    check_record,
    check_step_list,
    check_step_order,
    check_summary,
    check_versions,
    has_overdue_lease,
)
from agentlightning.store.scan import read_calls, read_rollouts, read_steps
from agentlightning.store.summary_types import SummaryQuery

MAX_READS = 5
"""Readings of a portion that changes meanwhile; one that still changes is left unjudged."""

Counts = Mapping[tuple[Mode, RolloutState], int]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that should not be."""

    run_id: str
    sentence: str
    kind: Literal["wrong", "note"] = "wrong"
    """note: the data are right, but somebody should know."""


@dataclass(slots=True)
class DoctorProgress:
    """Numbers of what was looked at so far."""

    runs: int = 0
    rollouts: int = 0
    calls: int = 0
    steps: int = 0


async def examine(
    store: LightningStore,
    run_ids: Sequence[str] | None = None,
    on_progress: Callable[[DoctorProgress], None] = lambda checked: None,
    now_ns: Callable[[], int] = time.time_ns,
) -> AsyncIterator[Finding]:
    """Yields what is wrong with these runs (all, if None). `now_ns` is compared with ends of leases."""
    checked = DoctorProgress()
    for run in await store.runs(run_ids):
        examination = _Examination(store, run.id, checked, on_progress, now_ns)
        try:
            async for finding in examination.findings():
                yield finding
        except NotFoundError:  # deleted meanwhile
            if await store.runs([run.id]):
                raise
        checked.runs += 1
        on_progress(checked)
    if run_ids is None:
        async for finding in _aliases(store):
            yield finding


async def _aliases(store: LightningStore) -> AsyncIterator[Finding]:
    aliases = await store.aliases()  # before the versions: one that is deleted meanwhile had no alias by then
    for alias in aliases:
        versions = {version.number: version for version in await store.models(alias.name)}
        sentences = list(check_alias_target(alias, versions))
        if sentences and alias in await store.aliases(alias.name):
            for sentence in sentences:
                yield Finding(versions[alias.number].run_id if alias.number in versions else "", sentence)


@dataclass(frozen=True, slots=True)
class _Examination:
    """The examination of one run."""

    _store: LightningStore
    _run_id: str
    _checked: DoctorProgress
    _on_progress: Callable[[DoctorProgress], None]
    _now_ns: Callable[[], int]

    async def findings(self) -> AsyncIterator[Finding]:
        for sentence in check_versions(await self._store.resources(self._run_id, latest=False)):
            yield self._wrong(sentence)
        for look in (self._steps, self._checkpoints, self._rollouts, self._places):
            async for finding in look():
                yield finding

    def _wrong(self, sentence: str) -> Finding:
        return Finding(self._run_id, sentence)

    async def _steps(self) -> AsyncIterator[Finding]:
        previous: Step | None = None
        async for steps in read_steps(self._store, self._run_id):
            newest = max((await self._newest()).values(), default=0)
            for step in steps:
                ids = [consumed.rollout_id for consumed in step.consumed]
                found = {rollout.id: rollout for rollout in await self._store.rollouts(RolloutQuery(ids=ids))}
                sentences = [*check_step_order(previous, step, newest), *check_step_list(step, found)]
                if sentences and await self._holds_still(previous, step):
                    for sentence in sentences:
                        yield self._wrong(sentence)
                previous = step
            self._checked.steps += len(steps)
            self._on_progress(self._checked)

    async def _holds_still(self, *steps: Step | None) -> bool:
        """True where these steps are as they were read: a run may go back to a checkpoint at any time."""
        return all(
            [await self._store.steps(self._run_id, step.step - 1, 1) == [step] for step in steps if step is not None]
        )

    async def _newest(self) -> dict[str, int]:
        """The last version of each policy."""
        return {one.name: one.version for one in await self._store.resources(self._run_id) if one.kind == "policy"}

    async def _checkpoints(self) -> AsyncIterator[Finding]:
        for run in await self._store.runs([self._run_id]):
            data = run.config.get("data", {})
            if data.get("from_run") and data.get("train") is None:
                return  # an offline run consumes nothing, and has no steps
        for checkpoint in await self._store.checkpoints(self._run_id):
            if checkpoint.step < 1:
                continue
            found = await self._store.steps(self._run_id, checkpoint.step - 1, 1)
            if not found or found[0].step != checkpoint.step:
                yield self._wrong(f"there is a checkpoint of step {checkpoint.step}, but no such step")

    async def _rollouts(self) -> AsyncIterator[Finding]:
        before = await self._store.count(self._run_id), await self._consumed()
        seen: Counter[tuple[Mode, RolloutState]] = Counter()
        outcomes = alone = 0
        async for portion in read_rollouts(self._store, RolloutQuery(run_id=self._run_id)):
            records = await self._records(portion)
            newest = await self._newest()
            for record in records:
                for sentence in check_record(record, newest):
                    yield self._wrong(sentence)
                alone += has_overdue_lease(record, self._now_ns())
                self._checked.calls += len(record.calls)
            async for finding in self._summaries(portion):
                yield finding
            seen.update((rollout.mode, rollout.state) for rollout in portion)
            outcomes += sum(rollout.outcome is not None for rollout in portion)
            self._checked.rollouts += len(portion)
            self._on_progress(self._checked)
        counts, consumed = await self._store.count(self._run_id), await self._consumed()
        if (counts, consumed) == before:
            if counts != dict(seen):
                yield self._wrong(f"its rollouts are counted as {_said(counts)}, but there are {_said(seen)}")
            if consumed != outcomes:
                yield self._wrong(f"its steps list {consumed} rollouts, but {outcomes} rollouts have an outcome")
        if alone:
            sentence = f"{alone} leases ran out a while ago; the next claim, or a server, gives them up"
            yield Finding(self._run_id, sentence, "note")

    async def _summaries(self, portion: Sequence[Rollout]) -> AsyncIterator[Finding]:
        """Looks whether finished rollouts have summaries, and whether these say the same."""
        finished = [rollout for rollout in portion if rollout.state in FINAL_STATES]
        if not finished:
            return
        ids = ", ".join(f"'{rollout.id}'" for rollout in finished)
        query = SummaryQuery(run_id=self._run_id, where=f"id in ({ids})", limit=len(finished))
        found = {summary.id: summary for summary in (await self._store.summaries(query)).rows}
        missing = [rollout.id for rollout in finished if rollout.id not in found]
        there = {rollout.id for rollout in await self._store.rollouts(RolloutQuery(ids=missing))} if missing else set()
        for rollout in finished:
            if rollout.id not in found and rollout.id not in there:  # deleted meanwhile, with its run
                continue
            for sentence in check_summary(rollout, found.get(rollout.id)):
                yield self._wrong(sentence)

    async def _consumed(self) -> int:
        """Counts the rollouts that the steps list."""
        return sum([len(step.consumed) async for steps in read_steps(self._store, self._run_id) for step in steps])

    async def _records(self, portion: Sequence[Rollout]) -> list[RolloutRecord]:
        """Records whose rollout was the same before and after they were read."""
        records: dict[str, RolloutRecord] = {}
        left = list(portion)
        for _ in range(MAX_READS):
            read = await self._read(left)
            ids = [rollout.id for rollout in left]
            now = {rollout.id: rollout for rollout in await self._store.rollouts(RolloutQuery(ids=ids))}
            records |= {one.rollout.id: one for one in read if one.rollout == now.get(one.rollout.id)}
            left = [rollout for rollout in now.values() if rollout.id not in records]
            if not left:
                break
        return list(records.values())

    async def _read(self, portion: Sequence[Rollout]) -> list[RolloutRecord]:
        ids = [rollout.id for rollout in portion]
        records = {rollout.id: RolloutRecord(rollout) for rollout in portion}
        for reward in await self._store.rewards(ids):
            records[reward.rollout_id].rewards.append(reward)
        for call in await read_calls(self._store, portion):  # after the rewards that name them
            records[call.rollout_id].calls.append(call)
        for span in await self._store.spans(ids):
            records[span.rollout_id].spans.append(span)
        for attempt in await self._store.attempts(ids):
            records[attempt.rollout_id].attempts.append(attempt)
        return list(records.values())

    async def _places(self) -> AsyncIterator[Finding]:
        """Places in the order of finished rollouts: 1, 2, 3, … without a gap or a double."""
        counts = await self._store.count(self._run_id)
        finished = sum(number for (_, state), number in counts.items() if state in FINAL_STATES)
        last = 0
        while page := await self._store.wait(self._run_id, last, 1, 0.0):
            for rollout in page:
                place = rollout.finished_seq or 0
                if place != last + 1:
                    yield self._wrong(f"rollout {rollout.id} finished in place {place}, and the one before in {last}")
                last = place
        if last < finished:
            yield self._wrong(f"{finished} rollouts have finished, but their order ends with place {last}")


def _said(counts: Counts) -> str:
    return ", ".join(f"{number} {mode} {state}" for (mode, state), number in sorted(counts.items())) or "none"
