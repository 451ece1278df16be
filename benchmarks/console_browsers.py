"""The console in Chromium, for benchmarks/console.py: the time until a page is there."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests" / "console"
"""Where the browser of the tests is."""
sys.path.insert(0, str(TESTS))

from browser import CHROMIUM, console, page_at, visitor  # noqa: E402

VISITS = 5
"""Of each page, each by a new browser with nothing in its cache."""


def missing() -> str | None:
    """The reason why there are no figures of browsers here; None where there are."""
    return None if CHROMIUM else "Chromium is not installed (`make browser`)"


def first_paint(url: str, run_id: str, rollout_id: str) -> float:
    """Seconds from a new browser's request to the content of the slowest page; medians of `VISITS`."""
    pages = {
        "runs": "/",
        "run": f"/run?run={run_id}",
        "rollouts": f"/rollouts?run={run_id}&where=reward+%3E+0.2",
        "replay": f"/replay?rollout={rollout_id}",
        "compare": f"/compare?run={run_id}",
    }
    took: dict[str, list[float]] = {name: [] for name in pages}
    with console("--store", url) as address:
        for _ in range(VISITS):
            for name, page in pages.items():
                with visitor() as visit:
                    began = time.perf_counter()
                    visit.open(page_at(address, page))
                    took[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(times) for name, times in took.items()}
    print("  first paint: " + ", ".join(f"{name} {value:.2f} s" for name, value in medians.items()), flush=True)
    return round(max(medians.values()), 2)
