"""Balancer: which of a policy's engines takes a call.

Driven by upstreams.py. An attempt stays with the engine that has its prefix in its cache, until that engine is away or has
clearly more to do than the least busy one. Engines that were found away are left alone for a while that doubles. Knows
nothing of HTTP.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

REMEMBERED = 65_536
"""Attempts whose engine is remembered, the ones used last."""

SLACK = 8
"""An attempt leaves its engine where that has more calls in flight than twice the least busy one's, plus this many: reading
a prefix again costs less than waiting behind so many."""

FIRST_REST_S = 0.5
LONGEST_REST_S = 15.0


@dataclass(slots=True)
class Engine:
    """One endpoint as this server sees it."""

    url: str
    in_flight: int = 0
    failures: int = 0
    """In a row."""
    away_until: float = 0.0


class Balancer:
    """The load of all engines, by their URLs."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._engines: dict[str, Engine] = {}
        self._places: OrderedDict[str, str] = OrderedDict()

    def choose(self, endpoints: Sequence[str], affinity: str) -> Engine:
        """The engine for a call of the attempt that `affinity` names; one that is away only where all are."""
        engines = [self._engines.setdefault(url, Engine(url)) for url in endpoints]
        if len(engines) == 1:
            return engines[0]
        now = self._now()
        awake = [engine for engine in engines if engine.away_until <= now]
        best = min(awake, key=_load) if awake else min(engines, key=lambda engine: engine.away_until)
        known = self._places.get(affinity)
        home = next((engine for engine in awake if engine.url == known), None)
        if home is not None and home.in_flight <= 2 * best.in_flight + SLACK:
            best = home
        self._places[affinity] = best.url
        self._places.move_to_end(affinity)
        if len(self._places) > REMEMBERED:
            self._places.popitem(last=False)
        return best

    def failed(self, engine: Engine) -> None:
        """It could not be reached, or said that it cannot serve."""
        rest = min(FIRST_REST_S * 2**engine.failures, LONGEST_REST_S)
        engine.failures += 1
        engine.away_until = self._now() + rest

    def answered(self, engine: Engine) -> None:
        """It serves."""
        engine.failures = 0
        engine.away_until = 0.0

    def keep(self, endpoints: set[str]) -> None:
        """Forget engines that no policy names and that have nothing in flight."""
        for url in [url for url, engine in self._engines.items() if url not in endpoints and not engine.in_flight]:
            del self._engines[url]

    def states(self) -> list[tuple[str, str, int]]:
        """(url, up or down, calls in flight) of every engine, for the metrics."""
        now = self._now()
        return [
            (engine.url, "down" if engine.away_until > now else "up", engine.in_flight)
            for engine in self._engines.values()
        ]


def _load(engine: Engine) -> int:
    return engine.in_flight
