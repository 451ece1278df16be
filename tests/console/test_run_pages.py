"""Pages about one run: bottlenecks, suggestions, models and prompts, each from what the store has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from console_scene import ATTACKS, STEPS, Parsed, check_harmless

from agentlightning.analysis.bottlenecks import read_bottlenecks
from agentlightning.console.markup import Html, Query
from agentlightning.console.pages.advice import bottlenecks_page, suggestions_page
from agentlightning.console.pages.models import models_page, prompts_page
from agentlightning.console.pages.runs import run_page
from agentlightning.console.reader import Reader
from agentlightning.errors import InputError, StoreError, printable
from agentlightning.store.models import ModelVersion

PAGES: dict[str, Callable[[Reader, Query], Awaitable[Html]]] = {
    "/bottlenecks": bottlenecks_page,
    "/suggestions": suggestions_page,
    "/models": models_page,
    "/prompts": prompts_page,
}


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_without_a_run_offers_the_newest_ones(reader: Reader, path: str) -> None:
    parsed = check_harmless(await PAGES[path](reader, {}))

    assert parsed.values("href")[:2] == [f"{path}?run=ahead", f"{path}?run=slow"]


@pytest.mark.parametrize(
    ("path", "run"), [("/bottlenecks", "slow"), ("/suggestions", "slow"), ("/models", "gamma"), ("/prompts", "gamma")]
)
async def test_a_page_shows_what_attackers_stored_as_text(reader: Reader, path: str, run: str) -> None:
    parsed = check_harmless(await PAGES[path](reader, {"run": [run]}))

    assert printable(ATTACKS[0]) in parsed.text


async def test_a_slow_tool_is_named_first_with_its_arithmetic(reader: Reader) -> None:
    parsed = Parsed(await bottlenecks_page(reader, {"run": ["slow"]}))
    report = await read_bottlenecks(reader.store, "slow")

    first = report.findings[0]
    assert first.name == "slow_tools"
    assert first.text in parsed.text
    assert "80% × 86% = 69%" in parsed.text


async def test_the_latest_steps_are_read_and_no_more(reader: Reader) -> None:
    assert (await read_bottlenecks(reader.store, "slow", latest=2)).steps == 2
    with pytest.raises(InputError, match="steps: expected 1 to 1000, got 5000"):
        await bottlenecks_page(reader, {"run": ["slow"], "steps": ["5000"]})


async def test_a_run_shows_what_its_steps_cost(reader: Reader) -> None:
    parsed = Parsed(await run_page(reader, {"run": ["slow"]}))

    assert f"agent seconds{448 * STEPS:,}" in parsed.text
    assert f"sampled tokens{900 * STEPS:,}" in parsed.text
    assert "US dollars" not in parsed.text


async def test_suggestions_of_few_runs_are_the_best_and_not_enough_for_settings(reader: Reader) -> None:
    parsed = Parsed(await suggestions_page(reader, {"run": ["slow"]}))

    assert "2 comparable runs, 2 of them finished with a held-out reward" in parsed.text
    assert "not enough runs: 2 comparable ones have finished with a held-out reward, 10 are needed" in parsed.text
    assert "trainer.max_staleness 2" in parsed.text
    assert "/run?run=ahead" in parsed.values("href")


async def test_suggestions_that_take_too_long_say_how_to_get_them(reader: Reader) -> None:
    hurried = Reader(reader.store, suggestions_timeout_s=0.0)

    with pytest.raises(StoreError, match="suggestions: took longer than 0 s over 5 runs; use: agl runs suggest CONFIG"):
        await suggestions_page(hurried, {"run": ["slow"]})
    hurried.close()


async def test_while_an_alarm_is_active_the_page_advises_nothing_else(reader: Reader) -> None:
    await reader.store.update_run("slow", "running", {"alarms": {"reward_falling": ATTACKS[0]}})

    parsed = check_harmless(await suggestions_page(reader, {"run": ["slow"]}))

    assert f"slow has alarm reward_falling: {ATTACKS[0]}" in parsed.text
    assert "Best runs" not in parsed.text
    assert "Settings to try" not in parsed.text


async def test_models_are_the_published_versions_with_their_checkpoints(reader: Reader) -> None:
    parsed = Parsed(await models_page(reader, {"run": ["alpha"]}))

    assert "of step 2" in parsed.text
    assert "version 1" in parsed.text
    assert "/runs/be brief" in parsed.text


async def test_registered_versions_are_shown_with_their_aliases(reader: Reader) -> None:
    assert "no model version was registered" in await models_page(reader, {"run": ["alpha"]})
    version = ModelVersion(
        name="support",
        number=0,
        run_id="alpha",
        policy="default",
        step=2,
        resource_version=2,
        parent=None,
        base_model="base",
        weights={"kind": "full", "url": "file:///runs/alpha"},
        metrics={"eval/greedy/reward": {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 300}},
        licence=ATTACKS[0],
    )
    await reader.store.register_model(version)
    await reader.store.set_alias("support", "production", 2, {})

    parsed = check_harmless(await models_page(reader, {"run": ["alpha"]}))

    assert "support@2" in parsed.text
    assert "@production" in parsed.text
    assert "0.500 [0.400, 0.600]" in parsed.text


async def test_a_prompt_is_shown_with_its_difference_from_its_parent(reader: Reader) -> None:
    newest = Parsed(await prompts_page(reader, {"run": ["alpha"]}))
    first = Parsed(await prompts_page(reader, {"run": ["alpha"], "name": ["writer be brief"], "version": ["1"]}))

    assert "writer be brief, version 2" in newest.text
    assert "+be briefbe brief" in newest.text
    assert (newest.names.count("ins"), newest.names.count("del")) == (1, 1)
    assert "writer be brief, version 1" in first.text
    assert "Difference" not in first.text
    with pytest.raises(InputError, match="version: expected one of a prompt of this run"):
        await prompts_page(reader, {"run": ["alpha"], "version": ["9"]})
