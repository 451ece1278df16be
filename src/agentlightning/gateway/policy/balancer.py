"""Balancer: which of a policy's engines takes a call, as far as this server sees their load.

Driven by engine_router.py, which tells it how its engines do. Knows nothing of requests and connections.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentlightning.runtime.backoff import Backoff

REMEMBERED = 65_536
"""Attempts whose engine is remembered, the ones used last."""

SLACK = 8
"""An attempt leaves its engine where that has more calls in flight than twice the least busy one's, plus this many: reading
a prefix again costs less than waiting behind so many."""

FIRST_REST_S = 0.5
MAX_REST_S = 15.0


@dataclass(slots=True)
class EngineLoad:
    """One endpoint as this server sees it."""

    url: str
    in_flight: int = 0
    away_until: float = 0.0
    hung: bool = False
    """It answers nothing, not even a health probe, and takes part again once it does."""
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_REST_S, MAX_REST_S, jitter=0.0))


class Balancer:
    """The load of all engines, by their URLs."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._engines: dict[str, EngineLoad] = {}
        self._places: OrderedDict[str, str] = OrderedDict()

    def choose(self, endpoints: Sequence[str], affinity: str) -> EngineLoad:
        """The engine for a call of the attempt that `affinity` names; one that is away only where all are."""
        engines = [self._engines.setdefault(url, EngineLoad(url)) for url in endpoints]
        if len(engines) == 1:
            return engines[0]
        now = self._now()
        awake = [engine for engine in engines if engine.away_until <= now and not engine.hung]
        if awake:
            best = min(awake, key=lambda one: one.in_flight)
        else:
            best = min(engines, key=lambda one: (one.hung, one.away_until))
        known = self._places.get(affinity)
        home = next((engine for engine in awake if engine.url == known), None)
        if home is not None and home.in_flight <= 2 * best.in_flight + SLACK:
            best = home
        self._places[affinity] = best.url
        self._places.move_to_end(affinity)
        if len(self._places) > REMEMBERED:
            self._places.popitem(last=False)
        return best

    def failed(self, engine: EngineLoad) -> None:
        """Note that the engine could not be reached, or refused to serve."""
        engine.away_until = self._now() + (engine.backoff.next_s() or MAX_REST_S)

    def answered(self, engine: EngineLoad) -> None:
        """Note that the engine serves."""
        engine.backoff.reset()
        engine.away_until = 0.0
        engine.hung = False

    def others(self, endpoints: Sequence[str], engine: EngineLoad) -> bool:
        """Returns whether another of these endpoints takes calls now."""
        now = self._now()
        others = [self._engines[url] for url in endpoints if url != engine.url and url in self._engines]
        return any(other.away_until <= now and not other.hung for other in others)

    def knows(self, engine: EngineLoad) -> bool:
        """Returns whether a policy names the engine, or a call is there."""
        return self._engines.get(engine.url) is engine

    def keep(self, endpoints: set[str]) -> None:
        """Forget engines that no policy names and that have nothing in flight."""
        for url in [url for url, engine in self._engines.items() if url not in endpoints and not engine.in_flight]:
            del self._engines[url]

    def states(self) -> list[tuple[str, str, int]]:
        """(url, up, down or hung, calls in flight) of every engine, for the metrics."""
        now = self._now()
        return [(engine.url, _state(engine, now), engine.in_flight) for engine in self._engines.values()]


def _state(engine: EngineLoad, now: float) -> str:
    if engine.hung:
        return "hung"
    return "down" if engine.away_until > now else "up"
