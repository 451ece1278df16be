"""The pages about one run in a real browser, in both schemes: bottlenecks, suggestions, models and prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from browser import AXE, CHROMIUM, console, visitor
from console_scene import ATTACKS, fill

from agentlightning.store.sql.store import SqlLightningStore

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
