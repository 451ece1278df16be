"""Results of a canary's sessions, read from the store in the order in which they came about.

Driven by controller.py. It keeps nothing that the store does not have: a reader that begins anew finds the same results.
Sessions that a header chose say nothing, since their users are others than those of the stable version.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from agentlightning.config.canary import CanaryConfig, Measure
from agentlightning.config.serve import RoutesConfig
from agentlightning.gateway.sessions.routes import chosen_by_weight
from agentlightning.records import FINAL_STATES, Rollout
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.rules import NEVER_FINAL

WAIT_S = 30.0
OVERLAP_MS = 10_000
"""Sessions are looked for again that began so long before the newest: clocks of gateways differ, and ids sort by them."""
MAX_WATCHED = 5000
"""Sessions whose results are waited for; of more the oldest are given up."""
QUIET_S = 0.05
"""Between two reads: a burst of results is read together."""


class SessionResult(NamedTuple):
    """One session in one measure, from 0 to 1 or, of rewards, as it was given."""

    at_ns: int
    canary: bool
    measure: Measure
    value: float


@dataclass(slots=True)
class _Watched:
    """A session some of whose results are not known yet."""

    canary: bool
    measures: set[Measure] = field(default_factory=set)


class SessionResults:
    """The results of the sessions of a run that began at `started_ns` or later with one of the two versions."""

    def __init__(
        self, store: LightningStore, run_id: str, routes: RoutesConfig, rule: CanaryConfig, started_ns: int
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._routes = routes
        self._rule = rule
        self._started_ns = started_ns
        self._newest_ms = started_ns // 1_000_000
        self._known: dict[str, None] = {}
        """Ids of sessions seen, within the overlap."""
        self._watched: dict[str, _Watched] = {}
        self._finished_seq = 0
        self._metric_seq = 0
        self._waits: dict[str, asyncio.Task[bool]] = {}

    async def read(self) -> list[SessionResult]:
        """Returns the results that became known since the last call, oldest first."""
        await self._find_sessions()
        found = [*await self._rewards(), *await self._ends()]
        for rollout_id in [one for one, watched in self._watched.items() if not watched.measures]:
            del self._watched[rollout_id]
        return sorted(found)

    async def wait(self) -> None:
        """Returns when a session of the run has ended or was rewarded, or after `WAIT_S` seconds; pushed, not polled."""
        for name, work in (("finished", self._wait_finished), ("rewarded", self._wait_rewarded)):
            if name not in self._waits:
                self._waits[name] = asyncio.create_task(work())
        await asyncio.wait(self._waits.values(), return_when=asyncio.FIRST_COMPLETED)
        for name in [name for name, task in self._waits.items() if task.done()]:
            self._waits.pop(name).result()
        await asyncio.sleep(QUIET_S)

    async def close(self) -> None:
        """Wait no longer."""
        for task in self._waits.values():
            task.cancel()
        await asyncio.gather(*self._waits.values(), return_exceptions=True)

    async def _find_sessions(self) -> None:
        after = first_id(self._newest_ms - OVERLAP_MS)
        for rollout in await self._store.rollouts(RolloutQuery(run_id=self._run_id, after=after)):
            if rollout.id in self._known:
                continue
            self._known[rollout.id] = None
            self._newest_ms = max(self._newest_ms, uuid.UUID(rollout.id).int >> 80)
            if self._counts(rollout):
                canary = rollout.step == self._routes.canary
                self._watched[rollout.id] = _Watched(canary=canary, measures=set(self._rule.margins))
        oldest = first_id(self._newest_ms - OVERLAP_MS)
        self._known = {one: None for one in self._known if one > oldest}
        for rollout_id in list(self._watched)[:-MAX_WATCHED]:
            del self._watched[rollout_id]

    def _counts(self, rollout: Rollout) -> bool:
        """True for sessions of users that the weight chose, of one of the two versions."""
        began = rollout.kind == "session" and rollout.created_ns >= self._started_ns
        if not began or rollout.mode != "train" or rollout.step not in (self._routes.stable, self._routes.canary):
            return False
        by_weight = chosen_by_weight(str(rollout.task["session"]), self._routes)
        return by_weight or rollout.step == self._routes.stable

    async def _rewards(self) -> list[SessionResult]:
        """The first final reward of each session: what is posted later corrects it, and is not counted again."""
        wanted = [one for one, watched in self._watched.items() if "reward" in watched.measures]
        found = []
        for reward in await self._store.rewards(wanted) if wanted else []:
            watched = self._watched[reward.rollout_id]
            if "reward" not in watched.measures or reward.call_id is not None or reward.source in NEVER_FINAL:
                continue
            watched.measures.discard("reward")
            found.append(SessionResult(reward.created_ns, watched.canary, "reward", reward.value))
        return found

    async def _ends(self) -> list[SessionResult]:
        wanted = [one for one, watched in self._watched.items() if watched.measures & {"error", "slow"}]
        if not wanted:
            return []
        ended = [one for one in await self._store.rollouts(RolloutQuery(ids=wanted)) if one.state in FINAL_STATES]
        slow = await self._slow(one.id for one in ended if "slow" in self._watched[one.id].measures)
        found = []
        for rollout in ended:
            watched = self._watched[rollout.id]
            failed = rollout.state != "succeeded" or rollout.warning is not None
            results: dict[Measure, float] = {"error": float(not failed), "slow": float(rollout.id not in slow)}
            for measure in watched.measures & results.keys():
                found.append(SessionResult(rollout.finished_ns or 0, watched.canary, measure, results[measure]))
                watched.measures.discard(measure)
        return found

    async def _slow(self, rollout_ids: Iterable[str]) -> set[str]:
        """Sessions with a slow call."""
        ids = list(rollout_ids)
        if not ids or self._rule.slow_s is None:
            return set()
        limit_ns = int(self._rule.slow_s * 1e9)
        calls = await self._store.calls(ids)
        return {one.rollout_id for one in calls if one.finished_ns - one.started_ns > limit_ns}

    async def _wait_finished(self) -> bool:
        found = await self._store.wait(self._run_id, self._finished_seq, 1, WAIT_S)
        self._finished_seq = max([self._finished_seq, *(one.finished_seq or 0 for one in found)])
        return bool(found)

    async def _wait_rewarded(self) -> bool:
        found = await self._store.follow_metrics(self._run_id, self._metric_seq, WAIT_S)
        self._metric_seq = max([self._metric_seq, *(one.seq for one in found)])
        return bool(found)


def first_id(ms: int) -> str:
    """An id below all that are made at this time, in milliseconds since the epoch.

    >>> first_id(0)
    '00000000-0000-0000-0000-000000000000'
    """
    return str(uuid.UUID(int=max(0, ms) << 80))
