"""Reader: what the pages ask a store for, and what they keep of it for a moment.

Driven by the pages; the store may be a server, a database or a file that a run is writing. Reads only. Curves of a run are
kept for all browsers that watch it, and grow by what is new: who watches costs the run the same, one browser or ten.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from agentlightning.analysis import suggestions
from agentlightning.analysis.run_settings import tags_of
from agentlightning.config.run import MonitorConfig
from agentlightning.console.markup import Html
from agentlightning.console.measures import CallUse, call_use
from agentlightning.console.texts import Texts, Tokenizers
from agentlightning.errors import NotFoundError, StoreError
from agentlightning.records import Attempt, Call, Checkpoint, Resource, Reward, Rollout, Run, Span
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.scan import find_run
from agentlightning.store.summaries import SeriesPoint, SummaryPage, SummaryQuery
from agentlightning.tracing.tool_uses import name_calls

MAX_RUNS = 200
"""Runs of the list, and those that its search goes through."""
MAX_POINTS = 500
"""Points of a curve as it is first read."""
MAX_KEPT_POINTS = 2 * MAX_POINTS
"""Points to which it grows until it is read anew."""
MAX_WATCHED = 64
MAX_ANALYSES = 2
"""Views that read many rollouts at a time: each may hold some hundred MB of calls."""
REFRESH_S = 1.0
"""Age from which curves are read again: ticks of several browsers come to one read."""
SUGGESTIONS_TIMEOUT_S = 30.0
REREAD_STEPS = 1
"""Steps before the last known one that are read again: an evaluation is recorded after its step's own metrics."""


@dataclass(slots=True)
class Curves:
    """The curves of a run, by metric."""

    series: dict[str, list[SeriesPoint]] = field(default_factory=dict)
    version: int = 0
    """Grows with every change."""
    drawn: tuple[str, Html] | None = None
    """The state of the run that was drawn last, and the drawing."""
    read_s: float = float("-inf")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def last_step(self) -> int | None:
        """The latest step of any curve."""
        return max((points[-1].step for points in self.series.values() if points), default=None)

    def merge(self, new: Mapping[str, Sequence[SeriesPoint]]) -> bool:
        """Takes new points, which replace those of their steps and later ones. Returns True where anything changed."""
        changed = False
        for name, points in new.items():
            if not points:
                continue
            known = self.series.get(name, [])
            kept = [point for point in known if point.step < points[0].step]
            if [*kept, *points] != known:
                self.series[name], changed = [*kept, *points], True
        self.version += changed
        return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """All that is stored of one rollout."""

    rollout: Rollout
    attempts: list[Attempt]
    calls: list[Call]
    """Of the attempt that is shown, in the order they finished."""
    spans: list[Span]
    rewards: list[Reward]
    attempt: int
    uses: Mapping[str, CallUse] = field(default_factory=dict)
    """By call, of those that were asked for: what training made of it."""


class Reader:
    """Reads an open store."""

    def __init__(
        self,
        store: LightningStore,
        clock: Callable[[], float] = time.monotonic,
        suggestions_timeout_s: float = SUGGESTIONS_TIMEOUT_S,
        forks: bool = False,
    ) -> None:
        self.store = store
        self.forks = forks
        """The replay offers to continue a rollout."""
        self._suggestions_timeout_s = suggestions_timeout_s
        self.analyses = asyncio.Semaphore(MAX_ANALYSES)
        """Held by views that read many rollouts."""
        self._clock = clock
        self._tokenizers = Tokenizers(store)
        self._curves: OrderedDict[str, Curves] = OrderedDict()
        """By run; the one watched last comes last."""
        self._advisor = ThreadPoolExecutor(1, "suggestions")
        """One at a time: they take seconds of a processor, of which the pages have the rest."""

    def close(self) -> None:
        """Removes what it keeps on disk."""
        self._advisor.shutdown(wait=False, cancel_futures=True)
        self._tokenizers.close()

    async def texts(self, call: Call) -> Texts:
        """Texts for the tokens of a call."""
        return await self._tokenizers.texts(call)

    async def runs(self, search: str = "") -> list[Run]:
        """Runs, newest first, whose id, name, state or tags have all the words of `search`."""
        words = search.lower().split()
        found = await self.store.runs(limit=MAX_RUNS)
        return [run for run in found if all(word in _searched(run) for word in words)]

    async def run(self, run_id: str) -> Run:
        """The run of this id. NotFoundError."""
        return await find_run(self.store, run_id)

    async def resources(self, run_id: str, kind: str) -> list[Resource]:
        """All versions of the run's resources of this kind, in order."""
        names = [one.name for one in await self.store.resources(run_id) if one.kind == kind]
        return [each for name in names for each in await self.store.resources(run_id, name, latest=False)]

    async def checkpoints(self, run_id: str) -> list[Checkpoint]:
        """The run's checkpoints by step."""
        return await self.store.checkpoints(run_id)

    async def suggestions(self, run: Run) -> suggestions.Suggestions:
        """Suggestions for the run's configuration. StoreError where they take longer than the reader waits."""
        runs = await self.store.runs(limit=suggestions.MAX_RUNS)
        work = self._advisor.submit(suggestions.suggest_among, run.config, runs)
        try:
            async with asyncio.timeout(self._suggestions_timeout_s):
                return await asyncio.wrap_future(work)
        except TimeoutError:
            why = f"took longer than {self._suggestions_timeout_s:.0f} s over {len(runs)} runs"
            raise StoreError(f"suggestions: {why}; use: agl runs suggest CONFIG") from None

    async def summaries(self, query: SummaryQuery) -> SummaryPage:
        """A page of rollouts. InputError where the filter does not say what it means."""
        return await self.store.summaries(query)

    async def curves(self, run_id: str) -> Curves:
        """The run's curves: what is new since they were read last is added first, at most once in `REFRESH_S`."""
        curves = self._curves.setdefault(run_id, Curves())
        self._curves.move_to_end(run_id)
        while len(self._curves) > MAX_WATCHED:
            self._curves.popitem(last=False)
        async with curves.lock:
            if self._clock() - curves.read_s >= REFRESH_S:
                await self._refresh(run_id, curves)
                curves.read_s = self._clock()
        return curves

    async def _refresh(self, run_id: str, curves: Curves) -> None:
        last = curves.last_step
        if last is None or any(len(points) > MAX_KEPT_POINTS for points in curves.series.values()):
            curves.series.clear()
            curves.merge(await self.store.series(run_id, max_points=MAX_POINTS))
        else:
            after = last - REREAD_STEPS - 1
            curves.merge(await self.store.series(run_id, max_points=MAX_POINTS, after_step=after))

    async def rollout(self, rollout_id: str, attempt: int | None = None) -> Recorded:
        """One rollout with the records of an attempt, by default its latest. NotFoundError."""
        found = await self.store.rollouts(RolloutQuery(ids=[rollout_id]))
        if not found:
            raise NotFoundError(f"{rollout_id}: no such rollout")
        shown = found[0].attempt if attempt is None else attempt
        attempts, calls, spans, rewards = await asyncio.gather(
            self.store.attempts([rollout_id]),
            self.store.calls([rollout_id], shown),
            self.store.spans([rollout_id]),
            self.store.rewards([rollout_id]),
        )
        return Recorded(
            rollout=found[0],
            attempts=attempts,
            calls=name_calls(calls, spans),
            spans=[span for span in spans if span.attempt == shown],
            rewards=[reward for reward in rewards if reward.attempt == shown],
            attempt=shown,
        )

    async def with_uses(self, one: Recorded, calls: Sequence[Call]) -> Recorded:
        """The rollout with what training made of these calls of it: numbers per token are read of these alone."""
        if not calls:
            return one
        run, kept = await asyncio.gather(
            self.run(one.rollout.run_id), self.store.credit([one.rollout.id], [call.id for call in calls])
        )
        credit = {each.call_id: each for each in kept}
        others = [call.id for call in one.calls if call.id not in credit]
        # Calls of an agent that no policy learns from have none, where those of the agents beside it have.
        siblings = bool(credit) or bool(await self.store.credit([one.rollout.id], others))
        missing = _missing_credit(run)
        uses = {call.id: call_use(one.rollout, call, credit.get(call.id), missing, siblings) for call in calls}
        return replace(one, uses=uses)


def _missing_credit(run: Run) -> str:
    monitor = run.config.get("monitor")
    kept = monitor.get("keep_credit") if isinstance(monitor, dict) else None
    default = MonitorConfig().keep_credit
    if kept == 0:
        return f"the run keeps no credit; to keep it: agl train … --set monitor.keep_credit={default}"
    of = kept if isinstance(kept, int) else default
    return f"the store has that of calls that the run's latest {of} steps learned from ([monitor] keep_credit = {of})"


def _searched(run: Run) -> str:
    return " ".join([run.id, run.name, run.state, *tags_of(run)]).lower()
