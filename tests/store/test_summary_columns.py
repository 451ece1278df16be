"""Filters over more finished rollouts than a chunk has find what plain evaluation finds, on every kind of store."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from sqlalchemy import create_engine, func, select
from store_samples import Clock, a_call, a_reward, a_run, a_worker, ending, some, sql_store

from agentlightning.records import Consumed
from agentlightning.store.base import LightningStore
from agentlightning.store.sql import tables
from agentlightning.store.summaries import first_rows
from agentlightning.store.summary_types import Order, RolloutSummary, SummaryQuery
from agentlightning.store.where import matches, parse

COUNT = tables.ROWS_PER_CHUNK + 152
FILTERS = (
    "reward > 0.5 and step = 17",
    "replica < 1000 and step != 3",
    "replica < 1000 or step = 49",
    "reward is null",
    "agent = 'nobody'",
    "agent = 'writer'",
    "not (agent != 'writer' or replica < 30)",
    "title ~ 'of no task'",
    "title ~ 'number 77'",
    "failure ~ 'Key' or reward = 0.4",
    "outcome = 'trained'",
    "outcome is null and replica in (3, 5, 2000, 2100)",
    "id ~ 'no id'",
    "run_id = 'other' or reward = 0.6",
)


async def many(store: LightningStore, clock: Clock) -> str:
    """A run with more finished rollouts than a chunk has."""
    run_id = await a_run(store)
    new = [
        replace(each, step=each.replica % 50, task={"question": f"number {each.replica % 100}"})
        for each in some(run_id, COUNT)
    ]
    await store.enqueue(new)
    claims = sorted(await store.claim(a_worker(run_id), limit=COUNT), key=lambda claim: claim.rollout.replica)
    await store.append_calls([a_call(claim, agent="writer") for claim in claims[10:40]])
    for start in range(0, COUNT, 100):
        clock.advance(1)
        await store.finish(
            [
                ending(claim, rewards=(a_reward(claim, claim.rollout.replica % 7 / 10),))
                if claim.rollout.replica % 11
                else ending(claim, "failed", error="KeyError: 'total'")
                for claim in claims[start : start + 100]
            ]
        )
    return run_id


async def pages(store: LightningStore, query: SummaryQuery) -> list[RolloutSummary]:
    page = await store.summaries(query)
    found = list(page.rows)
    while page.next is not None:
        page = await store.summaries(replace(query, after=page.next))
        found += page.rows
    return found


@pytest.mark.slow
async def test_a_filter_over_more_rows_than_a_chunk_finds_what_plain_evaluation_finds(
    store: LightningStore, clock: Clock
) -> None:
    run_id = await many(store, clock)
    rows = await pages(store, SummaryQuery(run_id=run_id, limit=1000))
    consumed = [each.id for each in rows if each.mode == "train" and each.replica in (1, 2, 1999, 2150)]
    await store.open_step(run_id, 1, [Consumed(rollout_id=each, outcome="trained") for each in consumed])
    rows = await pages(store, SummaryQuery(run_id=run_id, limit=1000))
    assert len(rows) == COUNT
    orders: tuple[Order, ...] = ("finished", "reward", "turns")
    for number, (where, order_by) in enumerate(product(FILTERS, orders)):
        query = SummaryQuery(run_id=run_id, where=where, order_by=order_by, descending=number % 2 == 0, limit=900)
        mine = [row for row in rows if matches(parse(where), row)]
        assert await pages(store, query) == first_rows(mine, query, COUNT), query


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_run_that_is_deleted_leaves_no_columns(
    kind: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, clock: Clock
) -> None:
    url = (
        f"sqlite:///{tmp_path_factory.mktemp('columns')}/agl.db"
        if kind == "sqlite"
        else str(request.getfixturevalue("postgres_url"))
    )
    async with sql_store(url, clock) as store:
        run_id = await many(store, clock)
        engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        counts = [select(func.count()).select_from(table) for table in (tables.summary_chunks, tables.summary_texts)]
        with engine.connect() as connection:
            assert connection.execute(counts[0]).scalar_one() == len(tables.SUMMARY_NUMBERS + tables.SUMMARY_TEXTS)
        await store.delete_runs([run_id])
        with engine.connect() as connection:
            assert [connection.execute(each).scalar_one() for each in counts] == [0, 0]
        engine.dispose()
