"""A request is executed once: sent again, after a crash and through whatever server, it is answered as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from store_samples import a_run, a_worker, claimed, ending, some

from agentlightning.errors import ConflictError
from agentlightning.records import Metric, Resource
from agentlightning.store.audit import requested
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.open import open_store

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
