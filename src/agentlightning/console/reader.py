"""Reader: what the pages ask a store for, and what they keep of it for a moment. Reads only.

Curves of a run are kept for all browsers that watch it, and grow by what is new: who watches costs the run the same, one
browser or ten. Token ids become text by the policy's tokenizer if this host can load it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cachetools import LRUCache
from markupsafe import Markup

from agentlightning.analysis import suggestions
from agentlightning.analysis.compare import HELD_OUT, TRAIN, HeldOutChange, read_held_out_change
from agentlightning.analysis.run_settings import tags_of
from agentlightning.console.measures import CallUse, call_use
from agentlightning.errors import AgentLightningError, NotFoundError, StoreError
from agentlightning.records import Attempt, Call, Reward, Rollout, Run, Span
from agentlightning.rendering.model_folder import token_bytes
from agentlightning.store.base import CREDIT_STEPS, LightningStore, RolloutQuery
from agentlightning.store.scan import find_run
from agentlightning.store.summaries import SeriesPoint
from agentlightning.tracing.tool_uses import name_calls
from agentlightning.trainer.run_lease import LEASE
from agentlightning.trainer.serving import CHECK

if TYPE_CHECKING:
    from agentlightning.rendering.renderer import Renderer

MAX_RUNS = 200
"""Runs of the list, and those that its search goes through."""
MAX_SPARK_POINTS = 40
SILENT_S = 60.0
"""Age of a running run's last sign of life from which its process counts as gone: a trainer gives one every 10 s."""
MAX_POINTS = 500
"""Points of a curve as it is first read; with twice as many it is read anew."""
MAX_WATCHED = 64
MAX_ANALYSES = 2
"""Views that read many rollouts at a time: each may hold some hundred MB of calls."""
REFRESH_S = 1.0
"""Age from which curves are read again: ticks of several browsers come to one read."""
SUGGESTIONS_TIMEOUT_S = 30.0
TOKENIZER_TIMEOUT_S = 20.0
REREAD_STEPS = 1
"""Steps before the last known one that are read again: an evaluation is recorded after its step's own metrics."""


@dataclass(slots=True)
class Curves:
    """The curves of a run, by metric."""

    series: dict[str, list[SeriesPoint]] = field(default_factory=dict)
    version: int = 0
    """Grows with every change."""
    drawn: tuple[str, Markup] | None = None
    """The state of the run that was drawn last, and the drawing."""
    progress: HeldOutChange | None = None
    evaluated: tuple[int, int] | None = None
    """The steps of the first and the last evaluation that `progress` compares."""
    read_s: float = float("-inf")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def refresh(self, store: LightningStore, run_id: str) -> None:
        """Reads what is new; points replace those of their steps and later ones."""
        last = max((points[-1].step for points in self.series.values() if points), default=None)
        if last is None or any(len(points) > 2 * MAX_POINTS for points in self.series.values()):
            self.series.clear()
            last = None
        after = None if last is None else last - REREAD_STEPS - 1
        for name, points in (await store.series(run_id, max_points=MAX_POINTS, after_step=after)).items():
            known = self.series.get(name, [])
            now = [*(point for point in known if points and point.step < points[0].step), *points]
            if points and now != known:
                self.series[name] = now
                self.version += 1

    async def compare(self, store: LightningStore, run_id: str) -> None:
        """Compares the last evaluation with the first one, once for each new one."""
        points = self.series.get(HELD_OUT, [])
        steps = (points[0].step, points[-1].step) if points else None
        if steps is not None and steps[0] < steps[1] and steps != self.evaluated:
            self.progress, self.evaluated = await read_held_out_change(store, run_id, *steps), steps
            self.version += 1


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


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts of one tokenizer's tokens; their numbers without one."""

    renderer: Renderer | None
    note: str
    """The source of the texts, or the reason why there are none."""

    def token(self, index: int) -> str:
        """The text of one token alone; the bytes of one that is a part of a character: ⟨C3⟩."""
        if self.renderer is None:
            return f"{index} "
        text = self.renderer.token_text(index)
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text
        return "".join(f"⟨{byte:02X}⟩" for byte in token_bytes(text, self.renderer.pieces([index])[0]))

    def decode(self, ids: list[int]) -> str:
        """The text of several, special tokens written out."""
        if self.renderer is None:
            return "".join(f"{index} " for index in ids)
        return self.renderer.decode(ids, special=True)


class Reader:
    """Reads an open store."""

    def __init__(
        self,
        store: LightningStore,
        clock: Callable[[], float] = time.monotonic,
        suggestions_timeout_s: float = SUGGESTIONS_TIMEOUT_S,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        from agentlightning.gateway.policy.engine_router import Renderers

        self.store = store
        self.analyses = asyncio.Semaphore(MAX_ANALYSES)
        """Held by views that read many rollouts."""
        self._suggestions_timeout_s = suggestions_timeout_s
        self._clock, self._now_ns = clock, now_ns
        self._runs: tuple[float, list[Run]] = float("-inf"), []
        self._rewards: LRUCache[tuple[str, int], Mapping[str, list[SeriesPoint]]] = LRUCache(MAX_RUNS)
        self._renderers = Renderers(store)
        self._curves: LRUCache[str, Curves] = LRUCache(MAX_WATCHED)
        self._advisor = ThreadPoolExecutor(1, "suggestions")
        """One at a time: they take seconds of a processor, of which the pages have the rest."""

    def close(self) -> None:
        """Removes what it keeps on disk."""
        self._advisor.shutdown(wait=False, cancel_futures=True)
        self._renderers.close()

    async def runs(self, search: str = "", checks: bool = False) -> list[Run]:
        """Runs, newest first, whose id, name, state or tags have all the words of `search`; those of ``agl check`` only with
        `checks`. Read at most once in `REFRESH_S`: every page offers them."""
        if self._clock() - self._runs[0] >= REFRESH_S:
            self._runs = self._clock(), await self.store.runs(limit=MAX_RUNS)
        words = search.lower().split()
        found = [run for run in self._runs[1] if checks or run.name != CHECK]
        texts = [" ".join([run.id, run.name, run.state, *tags_of(run)]).lower() for run in found]
        return [run for run, text in zip(found, texts, strict=True) if all(word in text for word in words)]

    async def rewards(self, run: Run) -> Mapping[str, list[SeriesPoint]]:
        """The run's training and held-out rewards as a list shows them: few points, kept until the run changes."""
        key = run.id, run.updated_ns
        if key not in self._rewards:
            self._rewards[key] = await self.store.series(run.id, [TRAIN, HELD_OUT], max_points=MAX_SPARK_POINTS)
        return self._rewards[key]

    def state(self, run: Run) -> str:
        """The run's state; "process gone" of one that says it runs and has given no sign of life for a minute."""
        silent = run.summary.get(LEASE) and self._now_ns() - run.updated_ns > SILENT_S * 1e9
        return "process gone" if run.state == "running" and silent else run.state

    async def run(self, run_id: str) -> Run:
        """The run of this id. NotFoundError."""
        return await find_run(self.store, run_id)

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

    async def curves(self, run_id: str) -> Curves:
        """The run's curves: what is new since they were read last is added first, at most once in `REFRESH_S`."""
        curves = self._curves.setdefault(run_id, Curves())
        async with curves.lock:
            if self._clock() - curves.read_s >= REFRESH_S:
                await curves.refresh(self.store, run_id)
                await curves.compare(self.store, run_id)
                curves.read_s = self._clock()
        return curves

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
        credit = {each.call_id: each for each in await self.store.credit([one.rollout.id], [call.id for call in calls])}
        others = [call.id for call in one.calls if call.id not in credit]
        # Calls of an agent that no policy learns from have none, where those of the other agents have.
        siblings = bool(credit) or bool(await self.store.credit([one.rollout.id], others))
        uses = {call.id: call_use(one.rollout, call, credit.get(call.id), MISSING_CREDIT, siblings) for call in calls}
        return replace(one, uses=uses)

    async def advantages(self, rollout_id: str) -> dict[str, float]:
        """The advantage that a training step gave each call of a rollout, by call, where it is stored."""
        return {one.call_id: one.advantage for one in await self.store.credit([rollout_id])}

    async def texts(self, call: Call) -> Texts:
        """Texts for the tokens of a call, by the tokenizer that its policy's resource names."""
        found = await self.store.resources(call.run_id, call.policy or None)
        value = next((one.value for one in found if one.kind == "policy" and one.name == call.policy), None)
        if value is None or not value.get("tokenizer"):
            return Texts(None, "token ids, since the run's record names no tokenizer")
        try:
            async with asyncio.timeout(TOKENIZER_TIMEOUT_S):
                renderer = await self._renderers.find(call.run_id, value["tokenizer"])
        except (AgentLightningError, TimeoutError) as cause:
            why = str(cause) or f"it did not load within {TOKENIZER_TIMEOUT_S:.0f} s"
            return Texts(None, f"token ids, since the policy's tokenizer cannot be loaded here: {why}")
        return Texts(renderer, "texts by the policy's tokenizer")


MISSING_CREDIT = f"the store has that of calls that the run's latest {CREDIT_STEPS} steps learned from"
