"""Each page says what the store has, and nothing that was stored becomes markup."""

from __future__ import annotations

import itertools
from dataclasses import replace

import httpx
import pytest
from console_scene import ATTACKS, GROUP, SECOND, STEPS, TEMPLATES, check_harmless, register, shown
from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.analysis.bottlenecks import read_bottlenecks
from agentlightning.analysis.intervals import Interval
from agentlightning.console.app import PATHS, create_app, draw, view
from agentlightning.console.pages.models import _ranked, move_alias
from agentlightning.console.pages.replay import head
from agentlightning.console.pages.runs import live_part
from agentlightning.console.playground import ROLE
from agentlightning.console.reader import Reader
from agentlightning.errors import InputError, NotFoundError, StoreError, printable
from agentlightning.records import Fork, Metric, Rollout
from agentlightning.store.base import RolloutQuery
from agentlightning.store.templates import CandidateRecord
from agentlightning.trainer.run_lease import LEASE


async def a_rollout(reader: Reader, run_id: str, replica: int = 1) -> Rollout:
    found = await reader.store.rollouts(RolloutQuery(run_id=run_id, step=STEPS))
    return next(one for one in found if one.replica == replica)


PAGES: dict[str, dict[str, str | list[str]]] = {
    "/": {},
    "/run": {"run": "gamma", "with": "alpha"},
    "/rollouts": {"run": "gamma"},
    "/side": {"run": "gamma", "group": "1-0"},
    "/compare": {"run": ["alpha", "gamma"]},
    "/alerts": {},
    "/bottlenecks": {"run": "slow"},
    "/suggestions": {"run": "slow"},
    "/models": {"run": "gamma"},
    "/prompts": {"run": "gamma"},
}


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_shows_what_attackers_stored_as_text(reader: Reader, path: str) -> None:
    html, status = await draw(reader, TEMPLATES, path, {
        name: [value] if isinstance(value, str) else value for name, value in PAGES[path].items()
    })  # fmt: skip
    assert status == 200
    assert printable(ATTACKS[0]) in check_harmless(html).text


async def test_a_replay_shows_what_attackers_stored_as_text(reader: Reader) -> None:
    page = await shown(reader, "/replay", rollout=(await a_rollout(reader, "gamma")).id)
    assert "the sum is wrong: " in page.text
    for attack in ATTACKS:
        assert printable(attack) in page.text


@pytest.mark.parametrize("path", PATHS)
async def test_a_page_has_words_and_one_heading_whatever_the_store_has(path: str) -> None:
    from agentlightning.store.sql.store import InMemoryLightningStore

    async with InMemoryLightningStore() as store:
        reader = Reader(store)
        html, status = await draw(reader, TEMPLATES, path, {})
        reader.close()
    page = check_harmless(html)
    assert page.names.count("h1") == 1
    assert status == (422 if path in ("/side", "/replay") else 200)


async def test_a_page_of_nothing_says_so_once_and_keeps_the_way_back(reader: Reader) -> None:
    html, status = await draw(reader, TEMPLATES, "/run", {"run": ["nobody"]})
    assert (status, html.count("nobody")) == (404, 1)
    assert 'href="/"' in html


async def test_the_list_of_runs_is_searched_by_all_the_words(reader: Reader) -> None:
    assert [run.id for run in await reader.runs("demo FINISHED")] == ["alpha"]
    assert [run.id for run in await reader.runs("planted")] == ["ahead", "slow"]
    assert "/?search=planted" in (await shown(reader, "/")).values("href")
    assert "No run matches" in (await shown(reader, "/", search="nothing of this")).text


async def test_runs_are_sorted_by_their_rise_and_those_of_a_check_are_hidden(reader: Reader) -> None:
    await reader.store.create_run("check", {}, "a-check")
    page = await shown(reader, "/", sort="rise")
    links = page.values("href")
    assert links.index("/run?run=alpha") < links.index("/run?run=hacked")  # which falls
    assert "a-check" not in page.text
    assert "Show 1 run of agl check" in page.text
    assert "a-check" in (await shown(reader, "/", checks="1")).text


async def test_a_run_shows_its_figures_its_alarms_and_what_differs_from_another(reader: Reader) -> None:
    page = await shown(reader, "/run", **{"run": "alpha", "with": "gamma"})
    assert ".700 at step 3" in page.text
    assert "+.2000 [.2000, .2000]" in page.text
    assert "entropy_gone" in page.text
    assert "trainer.learning_rate" in page.text
    assert "No step has recorded tokens" in page.text
    assert "trainer.seed" not in page.text.partition("All settings")[0]


async def test_alarms_stand_on_the_curve_and_in_words_after_they_ceased(reader: Reader) -> None:
    begun = [
        {"step": 2, "name": "reward_falling", "text": ATTACKS[0]},
        {"step": 3, "name": "entropy_gone", "text": "low"},
    ]
    await reader.store.update_run("alpha", summary={"alarms_begun": begun})
    page = await shown(reader, "/run", run="alpha")
    reward = next(label for label in page.values("aria-label") if label.startswith("Reward. "))
    assert reward.endswith("; reward_falling at step 2; entropy_gone at step 3")
    text = " ".join(page.text.split())
    assert f"▲ reward_falling, step 2, ceased: {ATTACKS[0]}" in text
    assert "▲ entropy_gone, step 3, holds: low" in text


async def test_a_run_costs_money_by_the_price_of_an_hour_that_the_address_names(reader: Reader) -> None:
    run = await reader.run("slow")
    late = Metric(run_id="slow", step=STEPS, name="own", value=1.0, created_ns=run.created_ns + 5400 * SECOND)
    await reader.store.log_metrics([late])
    assert "money" not in (await shown(reader, "/run", run="slow")).text.partition("Show the")[0]
    assert "money3.75" in (await shown(reader, "/run", run="slow", hour="2.50")).text
    with pytest.raises(InputError, match=r"hour: expected the price of an hour, such as 2.50, got '-1'"):
        await shown(reader, "/run", run="slow", hour="-1")


async def test_a_run_says_first_what_it_learned_with_its_interval(reader: Reader) -> None:
    from agentlightning.analysis.compare import HeldOutChange
    from agentlightning.analysis.intervals import Interval

    for interval, words in (
        (Interval(0.31, 0.24, 0.38, 99), "▲ +.31 [.24, .38], learned"),
        (Interval(-0.31, -0.38, -0.24, 99), "▼ −.31 [−.38, −.24], got worse"),
        (Interval(0.1, -0.1, 0.3, 99), "◆ +.10 [−.10, .30], no change beyond chance"),
        (None, "◆ too few tasks to tell"),
    ):
        curves = await reader.curves("beta")
        curves.progress, curves.drawn = HeldOutChange(first=0.32, last=0.63, difference=interval), None
        text = " ".join((await shown(reader, "/run", run="beta")).text.split())
        assert "held-out .32 → .63" in text
        assert words in text


async def test_a_run_whose_trainer_fell_silent_says_so_and_how_to_resume_it(reader: Reader) -> None:
    await reader.store.update_run("beta", summary={LEASE: {"place": "h:/runs/beta"}})
    fresh = await shown(reader, "/run", run="beta")
    assert "no sign of life" not in fresh.text
    updated_ns = (await reader.run("beta")).updated_ns
    later = Reader(reader.store, now_ns=lambda: updated_ns + 61 * 10**9)
    page = await shown(later, "/run", run="beta")
    later.close()
    assert "agl train --resume beta" in page.text


async def test_what_moves_is_drawn_anew_only_when_something_is_new(reader: Reader) -> None:
    later = Reader(reader.store, clock=itertools.count(0.0, 10.0).__next__)
    run = await reader.run("beta")
    before = await live_part(later, TEMPLATES, run)
    unchanged = await live_part(later, TEMPLATES, run)
    await reader.store.log_metrics([Metric(run_id="beta", step=STEPS + 1, name="train/reward_mean", value=0.9)])
    after = await live_part(later, TEMPLATES, run)
    later.close()
    assert before is unchanged
    assert "0.9 at 4" in after


async def test_rollouts_are_filtered_sorted_and_paged(reader: Reader) -> None:
    page = await shown(reader, "/rollouts", run="beta", where="step = 2", order="reward", direction="up")
    rewards = [f"{replica / (GROUP - 1):.2f}".removeprefix("0") for replica in range(1, GROUP)]
    places = [page.text.index(reward) for reward in rewards]
    assert places == sorted(places)


async def test_rollouts_of_a_task_stand_together_the_failed_ones_first(reader: Reader) -> None:
    page = await shown(reader, "/rollouts", run="gamma", where="step = 2")
    replicas = [page.text.index(f"replica {replica}") for replica in range(GROUP)]
    assert replicas == sorted(replicas)  # the first one failed
    assert page.text.count("mean .67 of 4") == 1
    assert "ValueError" in page.text


async def test_a_group_stands_side_by_side_and_so_does_a_task_at_its_first_and_its_last_step(reader: Reader) -> None:
    group = await shown(reader, "/side", run="alpha", group="2-0")
    assert [f"replica {replica}" in group.text for replica in range(GROUP)] == [True] * GROUP
    href = next(value for value in (await shown(reader, "/rollouts", run="alpha")).values("href") if "task=" in value)
    task = await shown(reader, "/side", run="alpha", task=href.partition("task=")[2])
    assert "step 1, train" in task.text
    assert f"step {STEPS}, train" in task.text


async def test_a_replay_shows_the_whole_conversation_and_the_tokens_of_the_call_of_the_address(reader: Reader) -> None:
    page = await shown(reader, "/replay", rollout=(await a_rollout(reader, "alpha")).id, call="1")
    assert page.text.index("Call 1") < page.text.index("what is 2 + 3 ?", page.text.index("Call 1"))
    assert "Call 2 of 2" in page.text
    tokens = [value for value in page.values("class") if value.startswith("token")]
    assert tokens == ["token", "token even v2 forced", "token even v5", "token even v8"]
    assert "token 3, id 7, log-probability -9" in page.values("title")
    assert page.names.count("mark") == 1


async def test_the_replay_of_a_fork_says_where_it_ended_and_how_to_continue(reader: Reader) -> None:
    one = await reader.rollout((await a_rollout(reader, "alpha")).id)
    fork = Fork(rollout_id="another", attempt=1, calls=2, root_id="another")
    calls = [replace(one.calls[0], replayed_id="x"), *one.calls[1:]]
    found = head(replace(one, rollout=replace(one.rollout, fork=fork), calls=calls))
    assert found["fork"] == "of another, after 2 calls"
    assert "the replay ended after 1 of 2 calls" in str(found["wrong"])
    page = await shown(reader, "/replay", rollout=one.rollout.id, call="1")
    assert f"agl rollouts fork {one.rollout.id} --calls 1" in page.text


async def test_a_replay_of_a_call_that_is_not_there_says_so(reader: Reader) -> None:
    rollout = await a_rollout(reader, "alpha")
    with pytest.raises(InputError, match=r"call: expected a number below 2 \(the first call is 0\), got 7"):
        await shown(reader, "/replay", rollout=rollout.id, call="7")
    with pytest.raises(NotFoundError):
        await shown(reader, "/replay", rollout="nobody")


async def test_runs_are_compared_with_their_seeds_together_and_without_two_they_are_offered(reader: Reader) -> None:
    page = await shown(reader, "/compare", run=["alpha", "beta", "gamma"], seeds="together")
    assert "demo (2 seeds)" in page.text
    reward = next(label for label in page.values("aria-label") if label.startswith("Training reward"))
    assert "0.205 at step 1" in reward
    assert f"0.605 at {STEPS}" in reward
    assert "trainer.learning_rate" in page.text
    assert {"alpha", "beta"} <= set((await shown(reader, "/compare")).values("value"))


@pytest.mark.parametrize("path", ["/bottlenecks", "/suggestions", "/models", "/prompts"])
async def test_a_page_without_a_run_offers_the_newest_ones(reader: Reader, path: str) -> None:
    links = [value for value in (await shown(reader, path)).values("href") if "run=" in value]
    assert links[:2] == [f"{path}?run=ahead", f"{path}?run=slow"]


async def test_a_slow_tool_is_named_first_with_its_arithmetic(reader: Reader) -> None:
    page = await shown(reader, "/bottlenecks", run="slow")
    report = await read_bottlenecks(reader.store, "slow")
    first = report.findings[0]
    assert first.name == "slow_tools"
    assert "slow tools bound it, up to 69%" in page.text
    assert first.text in page.text
    assert "80% × 86% = 69%" in page.text
    with pytest.raises(InputError, match="steps: expected 1 to 1000, got 5000"):
        await shown(reader, "/bottlenecks", run="slow", steps="5000")


async def test_a_run_shows_what_its_steps_cost(reader: Reader) -> None:
    page = await shown(reader, "/run", run="slow")
    assert f"agent seconds{448 * STEPS:,}" in page.text
    assert f"sampled tokens{900 * STEPS:,}" in page.text


async def test_suggestions_of_few_runs_are_the_best_and_not_enough_for_settings(reader: Reader) -> None:
    page = await shown(reader, "/suggestions", run="slow")
    assert "2 comparable runs, 2 of them finished with a held-out reward" in page.text
    assert "not enough runs: 2 comparable ones have finished with a held-out reward, 10 are needed" in page.text
    assert "trainer.max_staleness 2" in page.text
    links = [value for value in page.values("href") if value.startswith("/run?")]
    assert links == ["/run?run=slow", "/run?run=ahead"]  # the breadcrumb, then the others alone


async def test_suggestions_that_take_too_long_say_how_to_get_them(reader: Reader) -> None:
    hurried = Reader(reader.store, suggestions_timeout_s=0.0)
    with pytest.raises(StoreError, match="suggestions: took longer than 0 s over 6 runs; use: agl runs suggest CONFIG"):
        await view(hurried, TEMPLATES, "/suggestions", {"run": ["slow"]})
    hurried.close()


async def test_while_an_alarm_is_active_the_page_advises_nothing_else(reader: Reader) -> None:
    await reader.store.update_run("slow", "running", {"alarms": {"reward_falling": ATTACKS[0]}})
    page = await shown(reader, "/suggestions", run="slow")
    assert f"slow has alarm reward_falling: {ATTACKS[0]}" in page.text
    assert "Best runs" not in page.text
    assert "Settings to try" not in page.text


async def test_models_are_the_kept_versions_with_their_checkpoints(reader: Reader) -> None:
    page = await shown(reader, "/models", run="alpha")
    assert "of step 2" in page.text
    assert "version 1" in page.text
    assert "/runs/be brief" in page.text


async def test_registered_versions_are_shown_with_their_aliases(reader: Reader) -> None:
    assert "No model version was registered" in (await shown(reader, "/models", run="alpha")).text
    await register(reader.store, "alpha", 2)
    await reader.store.set_alias("support", "production", 2)
    page = await shown(reader, "/models", run="alpha")
    assert "support@2 with a held-out reward of .50 [.40, .60]" in page.text
    assert "@production" in page.text
    assert ATTACKS[0] in page.text
    assert "Promote" not in page.text  # somebody who only reads


async def test_a_button_promotes_a_version_and_another_rolls_it_back(reader: Reader) -> None:
    await register(reader.store, "alpha", 2, 3)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(as_admin(create_app(reader, TEMPLATES)))) as client:
        for version in ("support@2", "support@3"):
            form = {"run": "alpha", "alias": "@live", "version": version}
            moved = await client.post("http://console/models", data=form, follow_redirects=True)
        assert "live names support@3, before support@2" in await aliases_of(reader)
        assert 'value="support@2">Roll back to support@2' in moved.text
        await client.post("http://console/models", data={**form, "version": "support@2"})
        assert "live names support@2, before support@3" in await aliases_of(reader)
        gone = await client.post("http://console/models", data={**form, "version": "support@9"})
        wrong = await client.post("http://console/models", data={**form, "alias": "7"})
    assert (gone.status_code, wrong.status_code) == (404, 422)
    assert "alias: expected small letters" in wrong.text
    with pytest.raises(InputError, match="a reader's token only reads"):
        await move_alias(reader, form, "reader")


async def aliases_of(reader: Reader) -> list[str]:
    found = await reader.store.aliases("support")
    return [f"{one.alias} names {one.name}@{one.number}, before {one.name}@{one.previous}" for one in found]


def as_admin(app: ASGIApp) -> ASGIApp:
    """The application for whoever has the server's key."""

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, ROLE: "admin"}, receive, send)

    return asked


def test_candidates_of_a_search_are_paired_with_its_start_over_the_tasks_of_both() -> None:
    found = [CandidateRecord(number=number, texts={"p": str(number)}) for number in (0, 1, None)]
    rewards = {0: {1: 0.0, 2: 0.5, 3: 0.5}, 1: {1: 0.5, 2: 1.0, 9: 0.0}}
    best, start, refused = _ranked(found, rewards)
    assert (best.record.number, best.against_start) == (1, Interval(0.5, 0.5, 0.5, 2))
    assert (start.record.number, start.against_start) == (0, None)
    assert (refused.record.number, refused.rewards) == (None, [])


async def test_a_prompt_is_shown_with_its_difference_from_its_parent(reader: Reader) -> None:
    newest = await shown(reader, "/prompts", run="alpha")
    first = await shown(reader, "/prompts", run="alpha", name="writer be brief", version="1")
    assert "writer be brief, version 2" in newest.text
    assert "+be briefbe brief" in newest.text
    assert (newest.names.count("ins"), newest.names.count("del")) == (1, 1)
    assert "writer be brief, version 1" in first.text
    assert "Difference" not in first.text
    with pytest.raises(InputError, match="version: expected one of a prompt of this run"):
        await shown(reader, "/prompts", run="alpha", version="9")
