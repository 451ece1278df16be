"""Spans of many attempts go to the store in few requests, and are never worth waiting for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from agentlightning.errors import InputError, StoreError
from agentlightning.records import Span
from agentlightning.runner.span_delivery import MAX_BYTES_PER_REQUEST, MAX_REFUSALS, MAX_SPANS_PER_REQUEST, SpanDelivery
from agentlightning.store.sql.store import InMemoryLightningStore


def a_span(name: str) -> Span:
    return Span(id=name, run_id="run", rollout_id="r", attempt=1, name=name)


class Store(InMemoryLightningStore):
    """Notes what it is given; refuses spans named "bad", is away as often as told, and takes its time."""

    def __init__(self, away: int = 0) -> None:
        super().__init__()
        self.requests: list[list[str]] = []
        self.away = away
        self.asked = 0
        self.busy = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def append_spans(self, spans: Sequence[Span]) -> None:
        self.asked += 1
        self.busy.set()
        await self.go_on.wait()
        if any(span.name == "fault" for span in spans):
            raise KeyError("fault")
        if self.away:
            self.away -= 1
            raise StoreError("away")
        if any(span.name == "bad" for span in spans):
            raise InputError("bad")
        self.requests.append([span.name for span in spans])


async def test_what_comes_while_a_request_is_under_way_goes_into_the_next_one() -> None:
    store = Store()
    store.go_on.clear()
    span_delivery = SpanDelivery(store, give_up_s=1)
    first = asyncio.create_task(span_delivery.deliver([a_span("1")]))
    await store.busy.wait()
    others = [asyncio.create_task(span_delivery.deliver([a_span(name)])) for name in ("2", "3", "4")]
    nothing = asyncio.create_task(span_delivery.deliver([]))
    await asyncio.sleep(0)
    assert not nothing.done(), "it waits for what was given before"
    store.go_on.set()
    assert await asyncio.gather(first, *others, nothing) == [0, 0, 0, 0, 0]
    assert store.requests == [["1"], ["2", "3", "4"]]


async def test_nothing_to_deliver_costs_no_request() -> None:
    store = Store()
    assert await SpanDelivery(store, give_up_s=1).deliver([]) == 0
    assert store.requests == []


async def test_a_store_that_comes_back_in_time_gets_them() -> None:
    store = Store(away=2)
    assert await SpanDelivery(store, give_up_s=30).deliver([a_span("1")]) == 0
    assert store.requests == [["1"]]


async def test_a_store_that_stays_away_costs_the_spans_alone() -> None:
    assert await SpanDelivery(Store(away=10**9), give_up_s=0).deliver([a_span("1"), a_span("2")]) == 2


async def test_a_store_that_stays_away_is_asked_once_however_many_attempts_wait() -> None:
    store = Store(away=10**9)
    store.go_on.clear()
    span_delivery = SpanDelivery(store, give_up_s=0)
    first = asyncio.create_task(span_delivery.deliver([a_span("1")]))
    await store.busy.wait()
    others = [
        asyncio.create_task(span_delivery.deliver([a_span(name)] * MAX_SPANS_PER_REQUEST)) for name in ("2", "3", "4")
    ]
    await asyncio.sleep(0)
    store.go_on.set()
    assert await asyncio.gather(first, *others) == [1, *[MAX_SPANS_PER_REQUEST] * 3]
    assert 10**9 - store.away == 2


async def test_of_refused_spans_only_those_at_fault_are_lost() -> None:
    store = Store()
    names = [str(number) for number in range(8)]
    names[5] = "bad"
    assert await SpanDelivery(store, give_up_s=1).deliver([a_span(name) for name in names]) == 1
    assert [name for request in store.requests for name in request] == ["0", "1", "2", "3", "4", "6", "7"]


async def test_a_store_that_refuses_everything_is_not_asked_for_each_span() -> None:
    store = Store()
    assert await SpanDelivery(store, give_up_s=1).deliver([a_span("bad")] * 1000) == 1000
    assert store.asked <= 2 * MAX_REFUSALS


async def test_spans_of_many_bytes_go_in_parts() -> None:
    store = Store()
    large = [replace(a_span(name), attributes={"text": "x" * (MAX_BYTES_PER_REQUEST // 2)}) for name in ("1", "2", "3")]
    assert await SpanDelivery(store, give_up_s=1).deliver(large) == 0
    assert store.requests == [["1"], ["2"], ["3"]]


async def test_a_fault_of_our_own_ends_no_delivery_but_its_own(caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    store.go_on.clear()
    span_delivery = SpanDelivery(store, give_up_s=1)
    first = asyncio.create_task(span_delivery.deliver([a_span("fault")]))
    await store.busy.wait()
    second = asyncio.create_task(span_delivery.deliver([a_span("2")]))
    await asyncio.sleep(0)
    store.go_on.set()
    assert await asyncio.gather(first, second) == [1, 0]
    assert "could not be delivered" in caplog.text


async def test_one_attempts_refused_spans_do_not_take_others_along() -> None:
    store = Store()
    store.go_on.clear()
    span_delivery = SpanDelivery(store, give_up_s=1)
    first = asyncio.create_task(span_delivery.deliver([a_span("1")]))
    await store.busy.wait()
    good, bad = (asyncio.create_task(span_delivery.deliver([a_span(name)])) for name in ("good", "bad"))
    await asyncio.sleep(0)
    store.go_on.set()
    assert await asyncio.gather(first, good, bad) == [0, 0, 1]
    assert store.requests == [["1"], ["good"]]


async def test_many_spans_go_in_parts() -> None:
    store = Store()
    spans = [a_span(str(number)) for number in range(MAX_SPANS_PER_REQUEST + 1)]
    assert await SpanDelivery(store, give_up_s=1).deliver(spans) == 0
    assert [len(request) for request in store.requests] == [MAX_SPANS_PER_REQUEST, 1]
