"""A request that is sent again is answered as it was."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.gateway.idempotency import OVERHEAD, IdempotencyCache, RpcResponse

FINE = RpcResponse(200, b"fine")


class Work:
    """Something to execute, counted; it lasts until it may end."""

    def __init__(self, *answers: RpcResponse | Exception, at_once: bool = True) -> None:
        self.executed = 0
        self.may_end = asyncio.Event()
        self._answers = list(answers) or [FINE]
        if at_once:
            self.may_end.set()

    async def __call__(self) -> RpcResponse:
        self.executed += 1
        answer = self._answers[min(self.executed, len(self._answers)) - 1]
        await self.may_end.wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_request_that_comes_again_is_executed_once() -> None:
    repeats, work = IdempotencyCache(), Work()
    assert [await repeats.answer("k", work) for _ in range(3)] == [FINE] * 3
    assert work.executed == 1


async def test_requests_of_different_keys_are_different() -> None:
    repeats, work = IdempotencyCache(), Work()
    await repeats.answer("k", work)
    await repeats.answer("l", work)
    assert work.executed == 2


async def test_one_that_comes_while_it_is_executed_joins_it() -> None:
    repeats, work = IdempotencyCache(), Work(at_once=False)
    asked = [asyncio.ensure_future(repeats.answer("k", work)) for _ in range(3)]
    await settle()
    assert work.executed == 1
    work.may_end.set()
    assert await asyncio.gather(*asked) == [FINE] * 3


async def test_where_the_first_hangs_up_the_next_executes_it_once() -> None:
    repeats, work = IdempotencyCache(), Work(at_once=False)
    first, *others = [asyncio.ensure_future(repeats.answer("k", work)) for _ in range(3)]
    await settle()
    first.cancel()
    await settle()
    assert work.executed == 2
    work.may_end.set()
    assert await asyncio.gather(*others) == [FINE] * 2
    assert work.executed == 2


async def test_one_that_joined_may_hang_up() -> None:
    repeats, work = IdempotencyCache(), Work(at_once=False)
    first, second = [asyncio.ensure_future(repeats.answer("k", work)) for _ in range(2)]
    await settle()
    second.cancel()
    work.may_end.set()
    assert await first == FINE
    assert work.executed == 1


async def test_what_a_server_could_not_do_is_tried_again() -> None:
    repeats, work = IdempotencyCache(), Work(RpcResponse(503, b"away"), FINE)
    assert (await repeats.answer("k", work)).status == 503
    assert await repeats.answer("k", work) == FINE


async def test_what_was_refused_stays_refused() -> None:
    repeats, work = IdempotencyCache(), Work(RpcResponse(409, b"no"), FINE)
    assert [(await repeats.answer("k", work)).status for _ in range(2)] == [409, 409]


async def test_a_bug_is_raised_to_its_caller_and_forgotten() -> None:
    repeats, work = IdempotencyCache(), Work(ZeroDivisionError(), FINE)
    with pytest.raises(ZeroDivisionError):
        await repeats.answer("k", work)
    assert await repeats.answer("k", work) == FINE


async def test_answers_are_kept_for_a_time() -> None:
    now = [0.0]
    repeats, work = IdempotencyCache(lambda: now[0], kept_s=10.0), Work()
    await repeats.answer("k", work)
    now[0] = 9.0
    await repeats.answer("k", work)
    assert work.executed == 1
    now[0] = 10.5
    await repeats.answer("another", Work())
    await repeats.answer("k", work)
    assert work.executed == 2


@given(sizes=st.lists(st.integers(0, 300), max_size=40))
def test_the_newest_answers_are_kept_as_far_as_they_fit(sizes: list[int]) -> None:
    most = 2000

    async def played() -> None:
        repeats = IdempotencyCache(most=most)
        for number, size in enumerate(sizes):
            await repeats.answer(str(number), Work(RpcResponse(200, b"x" * size)))
        fits, used = set(), 0
        for number in reversed(range(len(sizes))):
            used += sizes[number] + OVERHEAD
            if used > most:
                break
            fits.add(number)
        for number in sorted(fits):  # asking for what is not kept would displace something
            work = Work()
            assert len((await repeats.answer(str(number), work)).body) == sizes[number]
            assert work.executed == 0

    asyncio.run(played())
