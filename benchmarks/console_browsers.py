"""The console in Chromium, for benchmarks/console.py: the time until a page is there, and what watching costs a run.

Browsers of a live run stand for machines of other people: they get what CPU time nobody else of this machine wants
(SCHED_IDLE). The console itself runs beside the run, as ``agl train --console`` starts it.

    python benchmarks/console_browsers.py URL COUNT    opens a run's page in so many browsers until it is ended
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from agentlightning.records import Metric
from agentlightning.store.open import existing_store
from agentlightning.store.sql.store import SqlLightningStore

TESTS = Path(__file__).resolve().parent.parent / "tests" / "console"
"""Where the browser of the tests is."""
sys.path.insert(0, str(TESTS))

from browser import CHROMIUM, console, page_at, visitor  # noqa: E402

BROWSERS = 5
VISITS = 5
"""Of each page, each by a new browser with nothing in its cache."""
TICKS = 900
"""Of two seconds on the page's clock: half an hour. Ours runs half as long: the console reads curves once a second."""
SEEN = "step => Number(document.querySelector('.agl .figures dd')?.textContent) >= step"
CURVES = ("train/reward_mean", "train/entropy", "train/kl", "train/loss", "eval/reward_mean")
STEP_S = "time/step_s"


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


def live_run_slowdown(repeats: int) -> float:
    """How much longer a step of the demo takes with `BROWSERS` on its page: medians of the ratios of equal steps, less 1."""
    ratios: list[float] = []
    for number in range(repeats):
        order = (0, BROWSERS) if number % 2 else (BROWSERS, 0)
        steps = {browsers: _demo_steps(browsers) for browsers in order}
        ratios += [watched / alone for watched, alone in zip(steps[BROWSERS], steps[0], strict=True)]
        print(
            f"  demo {number + 1}: {sum(steps[0]):.1f} s alone, {sum(steps[BROWSERS]):.1f} s with {BROWSERS} browsers, "
            f"median of the steps' ratios so far {statistics.median(ratios):.3f}",
            flush=True,
        )
    return round(statistics.median(ratios) - 1.0, 3)


def heap_growth(ticks: int) -> float:
    """The heap of a page after so many ticks of a run that logs a step for each, over its heap after a third of them."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/agl.db"
        run_id = asyncio.run(_new_run(url))  # before the browser keeps this thread's event loop
        with console("--store", url) as address, visitor() as visit:
            visit.page.clock.install()
            visit.open(page_at(address, f"/run?run={run_id}"))
            session = visit.page.context.new_cdp_session(visit.page)
            heaps = []
            for tick in range(1, ticks + 1):
                _log_step(url, run_id, tick)
                while not visit.page.evaluate(SEEN, tick):
                    visit.page.clock.run_for(2000)
                    time.sleep(0.1)
                if tick % (ticks // 9) == 0:
                    session.send("HeapProfiler.collectGarbage")
                    heaps.append(session.send("Runtime.getHeapUsage")["usedSize"] / 2**20)
    print("  heap of a live page, MB: " + " ".join(f"{heap:.1f}" for heap in heaps), flush=True)
    return round(heaps[-1] / heaps[2], 2)


def _demo_steps(browsers: int) -> list[float]:
    """Seconds of each step of the demo."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "agentlightning", "demo", "--task", "lookup", "--console"]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
            assert run.stdout is not None
            said: list[str] = []
            for line in run.stdout:
                said.append(line)
                if "console http://" in line:
                    break
            else:
                sys.exit("the demo ended before it had a console:\n" + "".join(said))
            with _watching(said[-1].split()[-1], browsers):
                said += run.stdout
        if run.returncode:
            sys.exit("the demo failed:\n" + "".join(said[-20:]))
        return asyncio.run(_seconds(f"sqlite:///{folder}/runs/agl.db"))


@contextlib.contextmanager
def _watching(address: str, browsers: int) -> Iterator[None]:
    if not browsers:
        yield
        return
    process = subprocess.Popen([sys.executable, __file__, address, str(browsers)], start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


async def _seconds(url: str) -> list[float]:
    async with existing_store(url) as store:
        [run] = await store.runs()
        return [point.value for point in (await store.series(run.id, [STEP_S]))[STEP_S]]


async def _new_run(url: str) -> str:
    async with SqlLightningStore(url) as store:
        return (await store.create_run("live", {})).id


def _log_step(url: str, run_id: str, step: int) -> None:
    """Logs a step's metrics on an event loop of its own: the browser's keeps this thread's."""

    async def log() -> None:
        async with SqlLightningStore(url) as store:
            await store.log_metrics([Metric(run_id=run_id, step=step, name=name, value=1 / step) for name in CURVES])

    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(log())).result()


def _watch(address: str, count: int) -> None:
    """Opens the newest run in so many browsers until SIGTERM."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(visitor())
        _give_way()
        first.page.set_default_timeout(120_000)
        first.open(address)
        first.page.locator(".agl tbody a").first.click()
        first.page.wait_for_selector(".agl h1")
        for _ in range(count - 1):
            page = first.page.context.browser.new_context().new_page()
            page.set_default_timeout(120_000)
            page.goto(address)  # whose token lets it in
            page.goto(first.page.url)
        while True:
            first.page.wait_for_timeout(1000)


def _give_way() -> None:
    """Takes what is left of the CPU: the kernel shares it among sessions first, and a browser leads some of its own."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):
            Path(f"/proc/{child.pid}/autogroup").write_text("19")


if __name__ == "__main__":
    _watch(sys.argv[1], int(sys.argv[2]))
