"""Leases are given up once their workers had the time of a whole one to renew them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from agentlightning.errors import StoreError
from agentlightning.gateway.attempts import LeaseExpiry

LEASE_S = 30.0


class Machine:
    """A store and a clock; `events` happen at their seconds, and the test ends at `end_s`."""

    def __init__(self, end_s: float, events: dict[float, Callable[[Machine], None]] | None = None) -> None:
        self.now = self.began = 1000.0
        self.end_s = end_s
        self.events = events or {}
        self.away = False
        self.hold_s = 0.0
        self.searches: list[float] = []
        self.expired = 0

    async def runs(self, limit: int) -> list[Any]:
        self.now, self.hold_s = self.now + self.hold_s, 0.0
        if self.away:
            raise StoreError("the store is away")
        return []

    async def expire_leases(self, within_s: float) -> int:
        assert within_s == LEASE_S / 6
        self.searches.append(self.now - self.began)
        return 1

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now - self.began >= self.end_s:
            raise asyncio.CancelledError
        for at_s in sorted(self.events):
            if at_s <= self.now - self.began:
                self.events.pop(at_s)(self)

    def found(self) -> None:
        self.expired += 1

    async def run(self) -> list[float]:
        """Seconds after the start at which it looked for expired leases."""
        expiry = LeaseExpiry(cast(Any, self), self.found, lease_s=LEASE_S, clock=lambda: self.now, sleep=self.sleep)
        with pytest.raises(asyncio.CancelledError):
            await expiry.run()
        assert self.expired == len(self.searches)
        return self.searches


async def test_no_lease_is_given_up_for_one_lease_after_a_start() -> None:
    assert await Machine(29.5).run() == []
    assert await Machine(33.5).run() == [30.0, 31.0, 32.0, 33.0]


def leave(machine: Machine) -> None:
    machine.away = True


def come_back(machine: Machine) -> None:
    machine.away = False


async def test_no_lease_is_given_up_for_one_lease_after_an_outage_of_the_store() -> None:
    searches = await Machine(85.5, {40.0: leave, 50.0: come_back}).run()
    assert [each for each in searches if each > 39] == [79.0, 80.0, 81.0, 82.0, 83.0, 84.0, 85.0]


async def test_an_outage_while_it_waits_begins_the_wait_anew() -> None:
    assert (await Machine(60, {10.0: leave, 20.0: come_back}).run())[0] == 49.0


async def test_a_machine_that_slept_or_a_store_that_hung_begins_the_wait_anew() -> None:
    def sleep(machine: Machine) -> None:
        machine.now += 100

    def hang(machine: Machine) -> None:
        machine.hold_s = 100

    for gap in (sleep, hang):
        searches = await Machine(175, {40.0: gap}).run()
        assert next(each for each in searches if each > 40) == 170.0


async def test_a_search_that_is_a_little_late_is_none_the_worse() -> None:
    def pause(machine: Machine) -> None:
        machine.now += 4.5

    assert 44.5 in await Machine(50, {40.0: pause}).run()
