"""The console in browsers, for benchmarks/console.py: the time until a page is there, its weight, what watching costs."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np

from agentlightning.records import Metric
from agentlightning.store.base import LightningStore
from agentlightning.store.open import open_store

TESTS = Path(__file__).resolve().parent.parent / "tests" / "console"
"""Where the browser of the tests is."""
sys.path.insert(0, str(TESTS))

from browser import CHROMIUM, console, page_at, visitor  # noqa: E402

VISITS = 5
"""Of each page, each by a new browser with nothing in its cache."""
BROWSERS = 5
PERIOD_S = 2.0
"""Seconds between two questions of a page that somebody watches."""
WINDOWS = 20
"""Times that the run's speed is measured, in turn with browsers and without."""
WINDOW_S = 4.0
ROWS = 12
"""Metrics of a step."""
SIZE = 1500
"""Of the matrices that a step multiplies on all cores, in a tenth of a second: steps of runs are rarer."""


def missing() -> str | None:
    """The reason why there are no figures of browsers here; None where there are."""
    return None if CHROMIUM else "Chromium is not installed (`make browser`)"


def measure(url: str, run_id: str, rollout_id: str) -> dict[str, float]:
    """The figures of a console over a store; those of a browser where there is one."""
    pages = {
        "runs": "/",
        "run": f"/run?run={run_id}",
        "rollouts": f"/rollouts?run={run_id}&where=reward+%3E+0.2",
        "replay": f"/replay?rollout={rollout_id}",
        "compare": f"/compare?run={run_id}",
    }
    with console("--store", url) as address:
        figures = {"first_paint_s": first_paint(address, pages)} if missing() is None else {}
        return figures | {"page_weight_kb": weight(address, pages)} | watched(url, address)


def first_paint(address: str, pages: dict[str, str]) -> float:
    """Seconds from a new browser's request to the slowest page's first contentful paint, by its own clock; medians of
    `VISITS`."""
    took: dict[str, list[float]] = {name: [] for name in pages}
    for _ in range(VISITS):
        for name, page in pages.items():
            with visitor() as visit:
                visit.open(page_at(address, page))
                painted = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
                visit.page.wait_for_function(f"() => {painted}")
                took[name].append(visit.page.evaluate(painted) / 1000)
    medians = {name: statistics.median(times) for name, times in took.items()}
    print("  first paint: " + ", ".join(f"{name} {value:.2f} s" for name, value in medians.items()), flush=True)
    return round(max(medians.values()), 2)


def weight(address: str, pages: dict[str, str]) -> float:
    """Kilobytes of the heaviest page with the files that all share."""
    base = address.split("/?")[0]
    with httpx.Client(follow_redirects=True, timeout=120) as browser:
        sent = {name: browser.get(page_at(address, page)).num_bytes_downloaded for name, page in pages.items()}
        shared = sum(
            browser.get(f"{base}/static/{name}").num_bytes_downloaded
            for name in ("console.css", "console.js", "icon.svg")
        )
    print("  weight: " + ", ".join(f"{name} {(value + shared) / 1e3:.0f} kB" for name, value in sent.items()))
    return round((max(sent.values()) + shared) / 1e3, 1)


def watched(url: str, address: str) -> dict[str, float]:
    """What five browsers on a run's page cost the run, which computes on all cores and records step after step."""
    now, before = _console_cpu_s(), time.perf_counter()
    pairs, busy = asyncio.run(_windows(url, address))
    used = (_console_cpu_s() - now) / (time.perf_counter() - before)
    ratios = [1 - with_them / without for without, with_them in pairs]
    share = used / busy / (os.cpu_count() or 1)
    print(
        f"  five browsers: a run is slower by {statistics.median(ratios):.1%} (median of {len(ratios)} pairs, "
        f"{min(ratios):.1%} to {max(ratios):.1%}); the console takes {share:.2%} of the processors",
        flush=True,
    )
    return {"five_browsers_slower": round(statistics.median(ratios), 4), "console_cpu_share": round(share, 4)}


async def _windows(url: str, address: str) -> tuple[list[tuple[float, float]], float]:
    """Steps per second without browsers and with them, in pairs of either order; the share of the time with them."""
    pairs = []
    async with open_store(url) as store:
        run_id = (await store.create_run("watched", {})).id
        step = await _steps(store, run_id, 0, WINDOW_S)
        for number in range(WINDOWS // 2):
            rates = dict[bool, float]()
            for seen in (number % 2 == 0, number % 2 == 1):
                with _Browsers(address, run_id, BROWSERS if seen else 0):
                    began, done = time.perf_counter(), step
                    step = await _steps(store, run_id, step, WINDOW_S)
                    rates[seen] = (step - done) / (time.perf_counter() - began)
            pairs.append((rates[False], rates[True]))
    return pairs, 0.5


async def _steps(store: LightningStore, run_id: str, step: int, seconds: float) -> int:
    """Computes and records steps for so long; the last one."""
    end, weights = time.perf_counter() + seconds, np.ones((SIZE, SIZE), np.float32)
    while time.perf_counter() < end:
        step += 1
        weights @ weights
        await store.log_metrics(
            [
                Metric(run_id=run_id, step=step, name=name, value=0.5)
                for name in ("train/reward_mean", *(f"own/{number}" for number in range(ROWS)))
            ]
        )
        await store.update_run(run_id, summary={"step": step})
    return step


class _Browsers:
    """``with`` around a while in which so many browsers watch a run."""

    def __init__(self, address: str, run_id: str, count: int) -> None:
        self._ended = threading.Event()
        self._all = [threading.Thread(target=self._watch, args=(address, run_id)) for _ in range(count)]

    def __enter__(self) -> None:
        for one in self._all:
            one.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for one in self._all:
            one.join()

    def _watch(self, address: str, run_id: str) -> None:
        with httpx.Client(follow_redirects=True, timeout=120) as browser:
            known = browser.get(page_at(address, f"/live?run={run_id}")).headers.get("etag", "")
            while not self._ended.wait(PERIOD_S):
                answer = browser.get(f"{address.split('/?')[0]}/live?run={run_id}", headers={"if-none-match": known})
                known = answer.headers.get("etag", known)


def _console_cpu_s() -> float:
    """Seconds of processors that children of this process took: the console, while no browser runs."""
    ticks = os.sysconf("SC_CLK_TCK")
    own = str(os.getpid())
    spent = 0.0
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = place.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[1] == own:
            spent += (int(fields[11]) + int(fields[12])) / ticks
    return spent
