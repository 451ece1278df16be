"""The speed of what the console stands on: how long a large store takes to answer it.

A store of 1,000,000 rollouts and 5,000,000 calls is made in minutes, in SQLite and in a PostgreSQL of this machine where its
programs are installed (console_store.py). Then, in the process of the store:

    filter_p95_ms    a page of 50 summaries: many filters (selective, unselective, matching nothing), sorted by each column
                     in both directions, within the large run, a small one, and over all; the first page and the next
    rollout_p95_ms   one rollout of 64 calls with its attempts, calls, rewards and spans

Of the console over that store (console_browsers.py), in Chromium where it is installed:

    first_paint_s        the slowest page, in a new browser
    page_weight_kb       the heaviest page with all that it loads, as sent
    five_browsers_slower the share by which a run's steps are slower while five browsers watch it: they ask for what the page
                         asks for, and leave drawing to other machines
    console_cpu_share    the share of this machine's processors that the console takes meanwhile

Figures are of the slower database; those of each are printed before.

    python benchmarks/console.py [--quick] [--rollouts N] [--stores sqlite postgres]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_args

import console_browsers
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.open import open_store
from agentlightning.store.summaries import Order, SummaryQuery
from console_store import SHARES, Filled, fill

SERVERS = Path(__file__).resolve().parent.parent / "tests" / "store"
"""Where the class is that starts a PostgreSQL."""
ROLLOUTS = 1_000_000
QUICK_ROLLOUTS = 5_000
SETTINGS = ("shared_buffers=512MB", "work_mem=16MB", "max_wal_size=4GB", "checkpoint_timeout=30min")

FILTERS = (
    "",
    "reward > 0.2",
    "turns > 2 and mode = 'train'",
    "agent = 'writer'",
    "reward < 0.2 and step > 50 and agent = 'writer'",
    "step = 17",
    "step in (3, 500, 900) and reward > 0.9",
    "reward < 0.0001 and turns > 30",
    "failure ~ 'KeyError'",
    "state = 'failed' and refused = true",
    "title ~ 'refund invoice' and reward = 1",
    "outcome = 'invalid' and step < 100",
    "sampled_tokens > 3000 and duration_s < 1",
    "not (reward < 0.9 or turns > 1)",
    "task_key = 'of no task'",
    "reward > 2",
    "agent = 'nobody'",
    "title ~ 'words of no task'",
    "reward > 0.5 and turns > 2 and agent = 'nobody' and mode = 'eval'",
    "step > 990 and reward is null and agent = 'planner' and turns > 20",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"a look at whether it runs: {QUICK_ROLLOUTS:,} rollouts")
    parser.add_argument("--rollouts", type=int, default=None, help=f"so many, instead of {ROLLOUTS:,}")
    parser.add_argument("--stores", nargs="+", choices=("sqlite", "postgres"), default=["sqlite", "postgres"])
    given = parser.parse_args()
    count = given.rollouts or (QUICK_ROLLOUTS if given.quick else ROLLOUTS)
    if count < 1000:
        sys.exit("--rollouts: expected at least 1000, so that every run has some")
    worst: dict[str, float] = {}
    for name in given.stores:
        with contextlib.ExitStack() as stack:
            url = _url(name, stack)
            if url is not None:
                for figure, value in asyncio.run(_measure(name, url, count)).items():
                    worst[figure] = max(value, worst.get(figure, 0.0))
    if (reason := console_browsers.missing()) is not None:
        print(f"browsers: left out: {reason}")
    print(json.dumps(worst))


def _url(name: str, stack: contextlib.ExitStack) -> str | None:
    if name == "sqlite":
        return f"sqlite:///{stack.enter_context(tempfile.TemporaryDirectory())}/agl.db"
    sys.path.insert(0, str(SERVERS))
    try:
        from postgres_server import PostgresServer

        return stack.enter_context(PostgresServer(settings=SETTINGS)).url()
    except (ImportError, OSError) as reason:
        print(f"{name}: left out: {reason}")
        return None


async def _measure(name: str, url: str, count: int) -> dict[str, float]:
    async with open_store(url) as store:
        runs = [(await store.create_run(f"run {number}", {})).id for number in range(len(SHARES))]
    began = time.perf_counter()
    filled = await asyncio.to_thread(fill, url, runs, count)
    seconds = time.perf_counter() - began
    print(f"{name}: {count:,} rollouts and {filled.calls:,} calls made in {seconds:,.0f} s", flush=True)
    async with open_store(url) as store:
        figures = {
            "filter_p95_ms": await _filters(name, store, filled),
            "rollout_p95_ms": await _rollouts(name, store, filled),
        }
    return figures | await asyncio.to_thread(console_browsers.measure, url, filled.runs[0], filled.long[0])


async def _filters(name: str, store: LightningStore, filled: Filled) -> float:
    """The time of a page that 95 of 100 stay below."""
    took: dict[tuple[str, str], list[float]] = {}
    scopes = {"large run": filled.runs[0], "small run": filled.runs[-1], "all runs": None}
    orders: tuple[Order, ...] = get_args(Order)
    for (scope, run_id), where, order_by, descending in product(scopes.items(), FILTERS, orders, (True, False)):
        query = SummaryQuery(run_id=run_id, where=where, order_by=order_by, descending=descending)
        times = took.setdefault((scope, where), [])
        for _ in range(2):
            began = time.perf_counter()
            page = await store.summaries(query)
            times.append(time.perf_counter() - began)
            if page.next is None:
                break
            query = replace(query, after=page.next)
    for scope in scopes:
        print(
            f"  {scope}: p95 {_p95([each for key, times in took.items() if key[0] == scope for each in times]):.1f} ms"
        )
    for (scope, where), times in sorted(took.items(), key=lambda item: -_p95(item[1]))[:8]:
        print(f"  {_p95(times):8.1f} ms  {scope:<9}  {where}")
    return _said(name, "a page of a filter", [each for times in took.values() for each in times])


async def _rollouts(name: str, store: LightningStore, filled: Filled) -> float:
    times = []
    for rollout_id in filled.long:
        began = time.perf_counter()
        ids = [rollout_id]
        await store.rollouts(RolloutQuery(ids=ids))
        await store.attempts(ids)
        calls, rewards, spans = await store.calls(ids), await store.rewards(ids), await store.spans(ids)
        times.append(time.perf_counter() - began)
        if (len(calls), len(spans)) != (64, 128) or len(rewards) < 64:
            sys.exit(
                f"{rollout_id}: expected 64 calls, 64 rewards and 128 spans, got {len(calls)}, {len(rewards)}, {len(spans)}"
            )
    return _said(name, "a rollout of 64 calls", times)


def _said(name: str, what: str, times: list[float]) -> float:
    print(
        f"{name}: {what}: p50 {1000 * statistics.median(times):.1f} ms, p95 {_p95(times):.1f} ms, "
        f"most {1000 * max(times):.1f} ms of {len(times)}",
        flush=True,
    )
    return round(_p95(times), 1)


def _p95(times: list[float]) -> float:
    """Milliseconds."""
    return 1000 * sorted(times)[max(0, -(-len(times) * 95 // 100) - 1)]


if __name__ == "__main__":
    main()
