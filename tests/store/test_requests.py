"""A request is executed once: sent again, after a crash and through whatever server, it is answered as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from invariants import violations
from store_samples import a_call, a_credit, a_reward, a_run, a_span, a_worker, claimed, ending, some

from agentlightning.errors import ConflictError
from agentlightning.records import Metric, Resource
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.open import open_store
from agentlightning.store.request import requested

Change = Callable[[LightningStore, str], Awaitable[Any]]


async def a_claim(store: LightningStore, run_id: str) -> Any:
    return await store.claim(a_worker(run_id), limit=2)


async def a_cancel(store: LightningStore, run_id: str) -> Any:
    return await store.cancel([rollout.id for rollout in await store.rollouts(RolloutQuery(run_id=run_id))])


async def a_version(store: LightningStore, run_id: str) -> Any:
    return [
        each.version for each in await store.put_resources([Resource(run_id=run_id, name="p", kind="policy", value={})])
    ]


async def a_metric(store: LightningStore, run_id: str) -> Any:
    await store.log_metrics([Metric(run_id=run_id, step=1, name="loss", value=1.0)])
    return len(await store.metrics(run_id))


async def a_deletion(store: LightningStore, run_id: str) -> Any:
    return await store.delete_runs([run_id])


async def a_token(store: LightningStore, run_id: str) -> Any:
    made = await store.create_token("w", "worker", run_id)
    return made, len(await store.tokens(run_id))


async def a_new_run(store: LightningStore, run_id: str) -> Any:
    return (await store.create_run("again", {})).id, len(await store.runs())


CHANGES: list[Change] = [a_claim, a_cancel, a_version, a_metric, a_deletion, a_token, a_new_run]


@pytest.mark.parametrize("change", CHANGES)
async def test_a_request_that_comes_again_gets_what_it_got_and_changes_nothing(
    store: LightningStore, change: Change
) -> None:
    run_id = await a_run(store)
    await store.enqueue(some(run_id, 5))
    with requested("r", b"body"):
        first = await change(store, run_id)
    with requested("r", b"body"):
        assert await change(store, run_id) == first


@pytest.mark.parametrize("ended", [False, True])
async def test_what_may_be_repeated_changes_nothing_when_its_answer_was_lost(
    store: LightningStore, ended: bool
) -> None:
    """No outcome is remembered of these: they come again at once, or after the attempt has ended, and it is as if not."""
    run_id = await a_run(store)
    new = some(run_id, 3)
    await store.enqueue(new)
    [claim] = await store.claim(a_worker(run_id))
    ids, root = [claim.rollout.id], a_call(claim)
    child = a_call(claim, parent_id=root.id, prompt_tokens=8)
    reward, span, credit = a_reward(claim, 0.5, "emitted"), a_span(claim), a_credit(claim, root.id)

    appends: list[Callable[[], Awaitable[Any]]] = [
        lambda: store.append_calls([root]),
        lambda: store.append_calls([child]),
        lambda: store.append_spans([span]),
        lambda: store.record_rewards([reward]),
        lambda: store.record_credit([credit]),
        lambda: store.enqueue(new),
    ]

    async def append() -> None:
        for number, each in enumerate(appends):
            with requested(f"append {number}", b"body"):
                await each()

    async def state() -> list[Any]:
        return [
            await store.calls(ids),
            await store.spans(ids),
            await store.rewards(ids),
            await store.credit(ids),
            await store.rollouts(RolloutQuery(run_id=run_id)),
        ]

    await append()
    with requested("beat", b"body"):
        assert await store.heartbeat(a_worker(run_id), [claim.lease]) == [True]
    if ended:
        await store.finish([ending(claim, rewards=(a_reward(claim, 1.0),))])
    before = await state()
    assert [len(each) for each in before] == [2, 1, 1 + ended, 1, 3]
    await asyncio.gather(*[append() for _ in range(4)])
    await asyncio.gather(*[each() for each in appends])  # and without a key, as of a client that has none
    with requested("beat", b"body"):
        await store.heartbeat(a_worker(run_id), [claim.lease])
    assert await state() == before
    assert await violations(store) == []


async def test_a_finish_that_comes_again_is_known_to_have_held(store: LightningStore) -> None:
    [claim] = await claimed(store)
    for _ in range(2):
        with requested("finish", b"body"):
            assert await store.finish([ending(claim)]) == [True]
    assert await store.finish([ending(claim)]) == [False]  # a request of its own


async def test_requests_that_come_twice_at_once_are_executed_once(store: LightningStore) -> None:
    run_id = await a_run(store)
    await store.enqueue(some(run_id, 5))

    async def claim() -> Any:
        with requested("twice", b"body"):
            return await store.claim(a_worker(run_id))

    assert len({str(claims) for claims in await asyncio.gather(*[claim() for _ in range(4)])}) == 1
    assert (await store.count(run_id))["train", "running"] == 1


async def test_a_repeat_that_asks_for_something_else_is_refused(store: LightningStore) -> None:
    run_id = await a_run(store)
    await store.enqueue(some(run_id, 5))
    with requested("one", b"this"):
        await store.claim(a_worker(run_id), limit=1)
    with (
        requested("one", b"that"),
        pytest.raises(ConflictError, match="idempotency-key: this key was used for another"),
    ):
        await store.claim(a_worker(run_id), limit=2)
    assert (await store.count(run_id))["train", "running"] == 1


async def test_what_was_not_done_is_not_remembered(store: LightningStore) -> None:
    run_id = await a_run(store)
    with requested("early", b"body"):
        assert await store.claim(a_worker(run_id)) == []
    await store.enqueue(some(run_id, 1))
    with requested("early", b"body"):
        assert len(await store.claim(a_worker(run_id))) == 1


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "redis"])
async def test_another_process_answers_as_the_one_that_was_killed_would_have(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    """The first is never closed: it is gone between its commit and its reply."""
    url = f"sqlite:///{tmp_path}/agl.db" if kind == "sqlite" else request.getfixturevalue(f"{kind}_url")
    first = open_store(url)
    await first.open()
    run_id = await a_run(first)
    await first.enqueue(some(run_id, 5))
    with requested("r", b"body"):
        claims = await first.claim(a_worker(run_id), limit=2)
    async with open_store(url) as second:
        with requested("r", b"body"):
            assert await second.claim(a_worker(run_id), limit=2) == claims
        assert (await second.count(run_id))["train", "running"] == 2
    await first.close()
