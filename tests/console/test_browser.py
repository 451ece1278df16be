"""Every page in a real browser, in both schemes: anybody can use it, and nothing leaves this machine."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from browser import AXE, CHROMIUM, PICTURES, console, first_screen, page_at, visitor
from console_scene import ATTACKS, GROUP, STEPS
from markupsafe import escape
from rewards_scene import RUN

from agentlightning.console.render import STATIC
from agentlightning.records import Metric, Rollout
from agentlightning.store.base import RolloutQuery
from agentlightning.store.sql.store import SqlLightningStore

T = TypeVar("T")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or not AXE.is_file(),
        reason="needs Chromium and axe-core: `make browser` installs both where it can",
    ),
]


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Does work on an event loop of its own: the browser's keeps this thread's."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(work())).result()


@pytest.fixture(scope="module")
def store_url(scene: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("console") / "copy"
    shutil.copytree(scene, folder)
    return f"sqlite:///{folder / 'agl.db'}"


@pytest.fixture(scope="module")
def address(store_url: str) -> Iterator[str]:
    with console("--store", store_url) as url:
        yield url


def rollout_of(store_url: str, run_id: str, replica: int) -> Rollout:
    async def read() -> Rollout:
        async with SqlLightningStore(store_url) as store:
            found = await store.rollouts(RolloutQuery(run_id=run_id, step=STEPS))
            return next(one for one in found if one.replica == replica)

    return run(read)


def log_reward(store_url: str, run_id: str, step: int, value: float) -> None:
    async def log() -> None:
        async with SqlLightningStore(store_url) as store:
            await store.log_metrics([Metric(run_id=run_id, step=step, name="train/reward_mean", value=value)])

    run(log)


def pages(store_url: str) -> dict[str, str]:
    """Addresses of every page, of the run that an attacker filled."""
    rollout, rewarded = rollout_of(store_url, "gamma", 1), rollout_of(store_url, RUN, GROUP - 1)
    rewards = {
        "distribution": "",
        "hacks": "",
        "explain": f"&rollout={rewarded.id}",
        "what-if": "",
    }
    colors = ("ratio", "trained")
    return {
        "runs": "/",
        "choose": "/run",
        "pick": "/compare",
        "run": "/run?run=gamma&with=alpha&hour=2.50",
        "rollouts": "/rollouts?run=gamma",
        "side": "/side?run=gamma&group=1-0",
        "replay": f"/replay?rollout={rollout.id}&call=1",
        "compare": "/compare?run=alpha&run=beta&run=gamma",
        **{f"replay by {one}": f"/replay?rollout={rewarded.id}&call=1&color={one}" for one in colors},
        **{f"rewards, {view}": f"/rewards?run={RUN}&view={view}{more}" for view, more in rewards.items()},
        "alerts": "/alerts",
        **{name: f"/{name}?run=slow" for name in ("bottlenecks", "suggestions")},
        **{name: f"/{name}?run=gamma" for name in ("models", "prompts")},
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_anybody_can_use_every_page_nothing_that_was_stored_runs_and_no_other_host_is_asked(
    address: str, store_url: str, scheme: str, width: int
) -> None:
    with visitor(scheme, width) as visit:
        for name, page in pages(store_url).items():
            shown = visit.open(page_at(address, page))
            assert ATTACKS[0] in shown, name
            assert visit.violations() == [], name
            assert visit.page.evaluate("() => document.documentElement.scrollWidth") <= width, name
            assert width > 390 or visit.small_targets() == [], name
            visit.picture(f"{name.replace(', ', '-')}-{scheme}-{width}")
        assert visit.page.evaluate("() => window.pwned") is None
        assert visit.elsewhere() == []
        assert visit.errors == []


@pytest.mark.parametrize("width", [1280, 390])
def test_every_page_can_be_read_without_javascript(address: str, store_url: str, width: int) -> None:
    with visitor(width=width, java_script_enabled=False) as visit:
        for name, page in pages(store_url).items():
            shown = visit.open(page_at(address, page))
            assert ATTACKS[0] in shown, name
            assert visit.page.locator("main h1").is_visible(), name
        assert visit.elsewhere() == []


def test_a_version_is_promoted_and_rolled_back_by_buttons_that_need_no_javascript(address: str) -> None:
    with visitor(java_script_enabled=False) as visit:
        visit.open(page_at(address, "/models?run=gamma"))
        for alias, version in (("beta", "gamma@1"), ("beta", "gamma@2")):
            visit.page.get_by_label("Alias that “Promote” moves").fill(alias)
            visit.page.get_by_role("button", name=f"Promote {version}").click()
            row = visit.page.locator("tr", has_text="gamma@beta")
            row.get_by_text(version, exact=True).first.wait_for()
        row.get_by_role("button", name="Roll back to gamma@1").click()
        visit.page.locator("tr", has_text="gamma@beta").get_by_role("button", name="Roll back to gamma@2").wait_for()
        assert visit.elsewhere() == []


def test_a_page_weighs_little(address: str, store_url: str) -> None:
    with httpx.Client(follow_redirects=True, timeout=60) as browser:
        for name, page in pages(store_url).items():
            with browser.stream("GET", page_at(address, page)) as answer:
                weight = sum(len(part) for part in answer.iter_raw())
            assert weight < 60_000, name
        shared = [browser.get(f"{address.split('/?')[0]}/static/{name}").num_bytes_downloaded for name in STATIC]
    assert sum(shared) < 40_000


def test_a_run_is_found_compared_and_followed_to_a_token(address: str) -> None:
    with visitor() as visit:
        visit.open(address)
        visit.page.keyboard.press("/")
        visit.page.keyboard.type("alpha")
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_url("**/?search=alpha")
        visit.page.wait_for_selector("text=entropy_gone")
        assert "beta" not in visit.page.inner_text("main table")
        visit.page.locator("td.name a").first.click()
        visit.page.wait_for_selector("text=Configuration")
        visit.page.get_by_role("link", name="Rollouts", exact=True).click()
        visit.page.wait_for_selector("h1:has-text('Rollouts')")
        assert "run=alpha" in visit.page.url
        visit.page.get_by_label("Filter").fill("step = 2")
        visit.page.get_by_role("button", name="Show").click()
        visit.page.wait_for_url("**where=step**")
        assert visit.page.locator("main tbody tr:not(.group)").count() == GROUP
        visit.page.locator("td.name a").first.click()
        visit.page.wait_for_selector("text=Call 1 of 2")
        visit.page.get_by_role("link", name="next").click()
        visit.page.wait_for_selector("text=Call 2 of 2")
        assert "call=1" in visit.page.url
        visit.page.get_by_role("slider", name="call").press("ArrowLeft")
        visit.page.wait_for_selector("text=Call 1 of 2")
        visit.page.keyboard.press("ArrowRight")
        visit.page.wait_for_selector("text=Call 2 of 2")
        visit.page.locator(".picker select").select_option("beta")
        visit.page.wait_for_url("**/rollouts?run=beta")
        assert visit.errors == []


def test_a_chart_tells_its_values_under_the_pointer_and_is_smoothed(address: str) -> None:
    with visitor() as visit:
        visit.open(page_at(address, "/run?run=alpha"))
        chart = visit.page.locator("figure.large > svg")
        box = chart.bounding_box()
        visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        assert visit.page.inner_text(".tip").split() == ["step", "2", "training", "0.4", "held-out,", "greedy", "0.5"]
        line = "() => document.querySelector('figure.large polyline.c0').getAttribute('points')"
        before = visit.page.evaluate(line)
        visit.page.locator(".smooth input").fill("0.9")
        assert visit.page.evaluate(line) != before
        assert visit.errors == []


def test_a_chosen_theme_is_kept_from_page_to_page_whatever_the_system_prefers(address: str) -> None:
    background = "() => getComputedStyle(document.body).backgroundColor"
    with visitor("light") as visit:
        visit.open(page_at(address, "/run?run=alpha"))
        light = visit.page.evaluate(background)
        for name in ("System theme", "Light theme"):
            visit.page.get_by_role("button", name=name).click()
        dark = visit.page.evaluate(background)
        visit.open(page_at(address, "/rollouts?run=alpha"))
        assert dark != light
        assert visit.page.evaluate(background) == dark
        assert visit.page.get_by_role("button", name="Dark theme").is_visible()


def test_a_hack_is_seen_and_a_reward_is_explained_down_to_the_tokens(address: str) -> None:
    with visitor("dark") as visit:
        visit.open(page_at(address, "/rewards"))
        visit.page.locator(f"a[href='/rewards?run={RUN}']").click()
        visit.page.get_by_role("link", name="Signs of hacks").click()
        visit.page.wait_for_selector("text=length_explains")
        visit.page.get_by_role("link", name="One reward step by step").click()
        visit.page.locator("main tbody tr a").first.click()
        visit.page.wait_for_selector("text=As the step recorded it")
        visit.page.locator("main tbody tr a").first.click()
        visit.page.wait_for_selector("text=Sampled tokens by advantage")
        shades = visit.page.eval_on_selector_all(".strip .token", "all => all.map(one => one.className)")
        assert set(shades) in ({"token up v5"}, {"token down v5"})
        ways = "all => all.map(one => getComputedStyle(one).backgroundColor)"
        assert len(set(visit.page.eval_on_selector_all(".strip .token", ways)) - {"rgba(0, 0, 0, 0)"}) == 1
        assert visit.elsewhere() == []
        assert visit.errors == []


def test_a_run_is_live_while_somebody_sees_it_and_a_hidden_page_asks_for_nothing(address: str, store_url: str) -> None:
    hidden = "Object.defineProperty(document, 'hidden', {get: () => window.hiddenNow === true})"
    with visitor() as visit:
        visit.page.add_init_script(hidden)
        visit.page.clock.install()
        visit.open(page_at(address, "/run?run=beta"))
        visit.page.get_by_text("more charts").click()
        log_reward(store_url, "beta", STEPS + 1, 0.987)
        visit.page.clock.run_for(2500)
        visit.page.wait_for_selector("svg[aria-label*='0.987 at 4']")
        assert visit.page.get_attribute("details#charts", "open") is not None
        visit.page.evaluate("() => { window.hiddenNow = true }")
        asked = len(visit.requests)
        visit.page.clock.run_for(60_000)
        assert len(visit.requests) == asked


def test_what_moves_is_sent_to_a_browser_once(address: str) -> None:
    with httpx.Client(follow_redirects=True, timeout=60) as browser:
        first = browser.get(page_at(address, "/live?run=beta"))
        again = browser.get(first.url, headers={"if-none-match": first.headers["etag"]})
        unknown = browser.get(page_at(address, "/live?run=nobody"))
        assert f'data-mark="{escape(first.headers["etag"])}"' in browser.get(page_at(address, "/run?run=beta")).text

    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")
    assert "svg" in first.text
    assert (unknown.status_code, "nobody" in unknown.text) == (404, True)


@pytest.mark.long
def test_a_browser_of_another_host_logs_in_with_the_key(store_url: str) -> None:
    with (
        console("--store", store_url, "--host", "0.0.0.0", AGL_SERVER_KEY="the key of the test") as address,
        visitor() as visit,
    ):
        here = address.replace("0.0.0.0", "127.0.0.1")
        visit.open(f"{here}/run?run=alpha")
        visit.page.get_by_label("Server key").fill("another key")
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_selector("text=this key opens nothing here")
        assert visit.violations() == []
        visit.page.get_by_label("Server key").fill("the key of the test")
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_selector("text=Compare the chosen runs")
        assert visit.elsewhere() == []


def take_pictures(address: str) -> None:
    """Those of the docs, of the only run of a console, which is a demo that has ended."""
    with visitor() as visit:
        visit.open(address)
        visit.page.locator("td.name a").first.click()
        visit.page.wait_for_selector("text=held-out")
        visit.picture("console-run")
        visit.page.get_by_role("link", name="Rollouts", exact=True).click()
        visit.page.wait_for_selector("main tbody tr")
        visit.picture("console-rollouts")
        visit.page.get_by_label("Filter").fill("step = 12 and mode = 'train' and outcome = 'trained' and reward = 1")
        visit.page.get_by_role("button", name="Show").click()
        visit.page.wait_for_url("**outcome**")
        visit.page.locator("td.name a").first.click()
        visit.page.get_by_label("Colour by").select_option("advantage")
        visit.page.wait_for_selector("text=Sampled tokens by advantage")
        card = visit.page.locator("#call").bounding_box()
        visit.picture("console-replay")
        visit.page.get_by_role("link", name="Why it earned that").click()
        visit.page.wait_for_selector("text=As the step recorded it")
        visit.picture("console-rewards")
        assert visit.elsewhere() == []
    if PICTURES and card is not None:
        first_screen(Path(PICTURES), round(card["y"]))


@pytest.mark.long
def test_a_demo_that_ended_is_shown(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "agentlightning", "demo", "--seed", "1"], cwd=tmp_path, check=True)
    with console("--store", f"sqlite:///{tmp_path}/runs/agl.db") as address:
        take_pictures(address)


@pytest.mark.long
def test_a_demo_is_watched_while_it_learns_and_its_console_ends_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentlightning", "demo", "--task", "lookup", "--console"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if "console http://" in line)
        address = line.split()[-1]
        with visitor() as visit:
            visit.open(address)
            visit.page.locator("td.name a").first.click()
            visit.page.wait_for_function("() => Number(document.querySelector('.pace strong')?.textContent) >= 2")
            assert visit.elsewhere() == []
        process.send_signal(signal.SIGINT)
        process.communicate()
        done = subprocess.run(["curl", "--silent", "--max-time", "5", address], capture_output=True)
        assert done.returncode == 7  # nobody listens there any more
    finally:
        process.kill()
        process.wait()
