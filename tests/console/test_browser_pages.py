"""The pages about one run in a real browser, in both schemes: bottlenecks, suggestions, models and prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import AXE, CHROMIUM, console, visitor
from console_scene import ATTACKS, fill

from agentlightning.prompts.templates import Template
from agentlightning.store.sql.store import SqlLightningStore
from agentlightning.store.templates import add_version

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or not AXE.is_file(),
        reason="needs Chromium and axe-core: `make browser` installs both where it can",
    ),
]
PAGES = {
    "bottlenecks": "/bottlenecks?run=slow",
    "suggestions": "/suggestions?run=slow",
    "models": "/models?run=gamma",
    "prompts": "/prompts?run=gamma",
}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    url = f"sqlite:///{tmp_path_factory.mktemp('pages') / 'agl.db'}"

    async def filled() -> None:
        async with SqlLightningStore(url) as store:
            await fill(store)

    asyncio.run(filled())
    with console("--store", url) as shown:
        yield shown


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_about_a_run_can_be_used_by_anybody_and_runs_no_stored_text(address: str, scheme: str) -> None:
    with visitor(scheme) as visit:
        for name, page in PAGES.items():
            shown = visit.open(address + page)
            assert ATTACKS[0] in shown, name
            assert visit.violations() == [], name
        assert visit.page.evaluate("() => window.pwned") is None
        assert visit.elsewhere() == []
        assert visit.errors == []


def test_the_navigation_leads_to_every_page_and_each_offers_the_runs(address: str) -> None:
    with visitor() as visit:
        visit.open(address)
        for name in ("Bottlenecks", "Suggestions", "Prompts", "Models"):
            visit.page.locator(".agl nav.pages").get_by_role("link", name=name).click()
            visit.page.wait_for_selector(f".agl h1:has-text('{name}')")
            visit.page.get_by_role("link", name="slow", exact=True).click()
            visit.page.wait_for_url(f"**/{name.lower()}?run=slow")
            visit.page.wait_for_selector(f".agl h1:has-text('{name}')")


def test_a_bottleneck_is_read_with_what_its_change_was_worth(address: str) -> None:
    with visitor() as visit:
        shown = visit.open(f"{address}/bottlenecks?run=slow")
        assert "slow_tools" in shown
        visit.page.get_by_role("link", name="run ahead, trainer.max_staleness = 2 (here 0)").first.click()
        visit.page.wait_for_url("**/run?run=ahead")


def test_a_prompt_version_is_promoted_by_a_button_that_anybody_can_use(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/agl.db"

    async def filled() -> None:
        async with SqlLightningStore(url) as store:
            await fill(store)
            for text in ("Be brief.", f"Think first. {ATTACKS[0]}"):
                await add_version(store, "alpha", "system", Template.of(text))

    asyncio.run(filled())
    with console("--store", url, "--allow-promote") as shown, visitor() as visit:
        visit.open(f"{shown}/prompts?run=alpha&name=system&version=1")
        visit.page.get_by_role("link", name="Promote version 1…").click()
        visit.page.wait_for_selector("h1:has-text('Promote system, version 1?')")
        assert visit.violations() == []
        visit.picture("console-promote")
        visit.page.get_by_role("button", name="Promote version 1").click()
        visit.page.wait_for_url("**/prompts?run=alpha&name=system&version=3")
        visit.page.wait_for_selector("text=New rollouts get this version.")
        assert visit.page.evaluate("() => window.pwned") is None
        assert visit.elsewhere() == []
        assert visit.errors == []
