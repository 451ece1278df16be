"""Each page says what the store has, and nothing that was stored becomes markup."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from console_scene import ATTACKS, GROUP, STEPS, Parsed, check_harmless

from agentlightning.analysis.bottlenecks import read_bottlenecks
from agentlightning.console.markup import Html, Query
from agentlightning.console.pages.advice import bottlenecks_page, suggestions_page
from agentlightning.console.pages.compare import compare_page
from agentlightning.console.pages.models import models_page, prompts_page
from agentlightning.console.pages.replay import head, replay_page
from agentlightning.console.pages.rollouts import rollouts_page, side_page
from agentlightning.console.pages.runs import alerts_page, live_part, run_page, runs_page
from agentlightning.console.reader import Reader
from agentlightning.errors import InputError, NotFoundError, StoreError, printable
from agentlightning.records import Fork, Metric, Rollout
from agentlightning.store.base import RolloutQuery
from agentlightning.store.models import ModelVersion


async def a_rollout(reader: Reader, run_id: str, replica: int = 1) -> Rollout:
    found = await reader.store.rollouts(RolloutQuery(run_id=run_id, step=STEPS))
    return next(one for one in found if one.replica == replica)


PAGES: dict[str, tuple[Callable[[Reader, Query], Awaitable[Html]], dict[str, list[str]]]] = {
    "runs": (runs_page, {}),
    "run, live": (live_part, {"run": ["gamma"]}),
    "run": (run_page, {"run": ["gamma"], "with": ["alpha"]}),
    "rollouts": (rollouts_page, {"run": ["gamma"]}),
    "side": (side_page, {"run": ["gamma"], "group": ["1-0"]}),
    "compare": (compare_page, {"run": ["alpha", "gamma"]}),
    "alerts": (alerts_page, {}),
    "bottlenecks": (bottlenecks_page, {"run": ["slow"]}),
    "suggestions": (suggestions_page, {"run": ["slow"]}),
    "models": (models_page, {"run": ["gamma"]}),
    "prompts": (prompts_page, {"run": ["gamma"]}),
}


@pytest.mark.parametrize("name", PAGES)
async def test_a_page_shows_what_attackers_stored_as_text(reader: Reader, name: str) -> None:
    page, query = PAGES[name]
    parsed = check_harmless(await page(reader, query))
    assert printable(ATTACKS[0]) in parsed.text


async def test_a_replay_shows_what_attackers_stored_as_text(reader: Reader) -> None:
    rollout = await a_rollout(reader, "gamma")
    shown = check_harmless(await replay_page(reader, {"rollout": [rollout.id]}))
    assert "the sum is wrong: " in shown.text
    for attack in ATTACKS:
        assert printable(attack) in shown.text


async def test_the_list_of_runs_is_searched_by_all_the_words(reader: Reader) -> None:
    assert [run.id for run in await reader.runs("demo FINISHED")] == ["alpha"]
    assert [run.id for run in await reader.runs("planted")] == ["ahead", "slow"]
    assert "/?search=planted" in Parsed(await runs_page(reader, {})).values("href")
    assert "no run matches" in await runs_page(reader, {"search": ["nothing of this"]})


async def test_a_run_shows_its_figures_its_alarms_and_what_differs_from_another(reader: Reader) -> None:
    text = Parsed(await live_part(reader, {"run": ["alpha"]})).text
    differing = Parsed(await run_page(reader, {"run": ["alpha"], "with": ["gamma"]})).text
    assert "0.700 at step 3" in text
    assert "+0.2000 [+0.2000, +0.2000]" in text
    assert "entropy_gone" in text
    assert "trainer.learning_rate" in differing
    assert "no step has recorded what it cost" in differing
    assert "trainer.seed" not in differing


async def test_what_moves_is_drawn_anew_only_when_something_is_new(reader: Reader) -> None:
    later = Reader(reader.store, clock=itertools.count(0.0, 10.0).__next__)
    before = await live_part(later, {"run": ["beta"]})
    unchanged = await live_part(later, {"run": ["beta"]})
    await reader.store.log_metrics([Metric(run_id="beta", step=STEPS + 1, name="train/reward_mean", value=0.9)])
    after = await live_part(later, {"run": ["beta"]})
    later.close()
    assert before is unchanged
    assert "0.9 at 4" in after


async def test_rollouts_are_filtered_sorted_and_paged(reader: Reader) -> None:
    query = {"run": ["beta"], "where": ["step = 2"], "order": ["reward"], "direction": ["up"]}
    found = Parsed(await rollouts_page(reader, query))
    rewards = [f"{replica / (GROUP - 1):.3f}" for replica in range(GROUP)]
    places = [found.text.index(reward) for reward in rewards]
    assert places == sorted(places)


async def test_a_group_stands_side_by_side_and_so_does_a_task_at_its_first_and_its_last_step(reader: Reader) -> None:
    group = Parsed(await side_page(reader, {"run": ["alpha"], "group": ["2-0"]}))
    assert [f"replica {replica}" in group.text for replica in range(GROUP)] == [True] * GROUP
    table = Parsed(await rollouts_page(reader, {"run": ["alpha"]}))
    href = next(value for value in table.values("href") if "task=" in value)
    task = Parsed(await side_page(reader, {"run": ["alpha"], "task": [href.partition("task=")[2]]}))
    assert "step 1, train" in task.text
    assert f"step {STEPS}, train" in task.text


async def test_a_replay_shows_the_call_of_the_address_with_its_tokens(reader: Reader) -> None:
    rollout = await a_rollout(reader, "alpha")
    parsed = Parsed(await replay_page(reader, {"rollout": [rollout.id], "call": ["1"]}))
    assert "Call 2 of 2" in parsed.text
    tokens = [value for value in parsed.values("class") if value.startswith("token")]
    assert tokens == ["token s0", "token s2 forced", "token s5", "token s8"]
    assert "token 3, id 7, log-probability -9" in parsed.values("title")
    assert parsed.text.count("sampled by the policy in an earlier call") == 0
    assert parsed.names.count("mark") == 1


async def test_the_replay_of_a_fork_says_where_it_ended_and_how_to_continue(reader: Reader) -> None:
    one = await reader.rollout((await a_rollout(reader, "alpha")).id)
    fork = Fork(rollout_id="another", attempt=1, calls=2, root_id="another")
    calls = [replace(one.calls[0], replayed_id="x"), *one.calls[1:]]
    page = Parsed(head(replace(one, rollout=replace(one.rollout, fork=fork), calls=calls)))
    assert "of another, after 2 calls" in page.text
    assert "the replay ended after 1 of 2 calls" in page.text
    shown = Parsed(await replay_page(reader, {"rollout": [one.rollout.id], "call": ["1"]}))
    assert f"agl rollouts fork {one.rollout.id} --calls 1" in shown.text


async def test_a_replay_of_a_call_that_is_not_there_says_so(reader: Reader) -> None:
    rollout = await a_rollout(reader, "alpha")
    with pytest.raises(InputError, match=r"call: expected a number below 2 \(the first call is 0\), got 7"):
        await replay_page(reader, {"rollout": [rollout.id], "call": ["7"]})
    with pytest.raises(NotFoundError):
        await replay_page(reader, {"rollout": ["nobody"]})


async def test_runs_are_compared_with_their_seeds_together(reader: Reader) -> None:
    query = {"run": ["alpha", "beta", "gamma"], "seeds": ["together"]}
    parsed = Parsed(await compare_page(reader, query))
    assert "demo (2 seeds)" in parsed.text
    reward = next(label for label in parsed.values("aria-label") if label.startswith("Training reward"))
    assert "0.205 at step 1" in reward
    assert f"0.605 at {STEPS}" in reward
    assert "trainer.learning_rate" in parsed.text


@pytest.mark.parametrize("name", ["bottlenecks", "suggestions", "models", "prompts"])
async def test_a_page_without_a_run_offers_the_newest_ones(reader: Reader, name: str) -> None:
    parsed = check_harmless(await PAGES[name][0](reader, {}))
    assert parsed.values("href")[:2] == [f"/{name}?run=ahead", f"/{name}?run=slow"]


async def test_a_slow_tool_is_named_first_with_its_arithmetic(reader: Reader) -> None:
    parsed = Parsed(await bottlenecks_page(reader, {"run": ["slow"]}))
    report = await read_bottlenecks(reader.store, "slow")
    first = report.findings[0]
    assert first.name == "slow_tools"
    assert first.text in parsed.text
    assert "80% × 86% = 69%" in parsed.text
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
    with pytest.raises(StoreError, match="suggestions: took longer than 0 s over 6 runs; use: agl runs suggest CONFIG"):
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
