"""The rewards page says what the debugger computes, runs no code of a run or a request, and reads a bounded part."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from console_scene import ATTACKS, GROUP, Parsed
from console_scene import shown as shown_page
from rewards_scene import GROUPS, RUN, STEPS, earned, fill_rewards, grpo, record

from agentlightning.console.pages.rewards import MAX_READ, VIEWS, check_size
from agentlightning.console.reader import Reader
from agentlightning.errors import InputError, printable
from agentlightning.records import Rollout
from agentlightning.store.base import RolloutQuery
from agentlightning.store.sql.store import InMemoryLightningStore

BEST = f"{grpo([place / (GROUP - 1) for place in range(GROUP)], GROUP - 1):+.4g}"


@asynccontextmanager
async def reading(config: dict[str, Any]) -> AsyncIterator[Reader]:
    """A reader over a store with the hacked run, of this configuration."""
    async with InMemoryLightningStore() as store:
        await fill_rewards(store, config)
        reader = Reader(store)
        yield reader
        reader.close()


async def a_rollout(reader: Reader, replica: int = GROUP - 1, step: int = STEPS) -> Rollout:
    found = await reader.store.rollouts(RolloutQuery(run_id=RUN, step=step))
    return next(one for one in found if one.replica == replica)


async def shown(reader: Reader, **query: str) -> Parsed:
    return await shown_page(reader, "/rewards", run=RUN, **query)


@pytest.mark.parametrize("view", VIEWS)
async def test_a_view_shows_the_names_of_rewards_and_runs_as_text(reader: Reader, view: str) -> None:
    page = await shown(reader, view=view)
    assert printable(ATTACKS[0]) in page.text
    assert "wrong" not in page.values("class")


async def test_each_reward_has_its_distribution_by_step(reader: Reader) -> None:
    page = await shown(reader, step="2")
    assert page.values("class").count("histogram c0") == 2  # two rewards, of the whole rollout
    assert f"{GROUP * GROUPS} rollouts of step 2: the first {MAX_READ} of each step at most" in page.text
    said = [label for label in page.values("aria-label") if label.startswith("20 equal parts from 0 to 1: ")]
    counts = [[int(count) for count in label.partition(": ")[2].split(", ")] for label in said]
    assert [(sum(one), one[0], one[-1]) for one in counts] == [(GROUP * GROUPS, GROUPS, GROUPS)] * 2


async def test_a_hack_that_length_explains_while_the_held_out_reward_falls_is_named(reader: Reader) -> None:
    page = await shown(reader, view="hacks")
    for kind in ("length_explains", "held_out_falls", "other_reward_falls"):
        assert kind in page.text
    longest = {one.id for one in await reader.store.rollouts(RolloutQuery(run_id=RUN)) if one.replica == GROUP - 1}
    named = {href.partition("rollout=")[2] for href in page.values("href") if href.startswith("/replay")}
    assert len(named) == 3
    assert named <= longest


async def test_another_credit_rule_is_tried_on_the_latest_step_without_being_asked(reader: Reader) -> None:
    page = await shown(reader, view="what-if")
    assert f"instead of uniform, 50% of step {STEPS}’s calls" in page.text
    discounted = await shown(reader, view="what-if", credit="discounted", step="2")
    assert "With discounted instead of uniform, 0% of step 2’s calls" in discounted.text


async def test_a_reward_is_explained_beside_what_the_step_recorded(reader: Reader) -> None:
    best = await a_rollout(reader)
    page = await shown(reader, view="explain", rollout=best.id)
    assert "credit uniform: R for each transition\n" in page.text  # and no other rollout's numbers
    assert "advantage grpo: (credit - mean of the rewards) / (standard deviation" in page.text
    assert f"It earned 1.00, and its group of {GROUP} earned .50 on average" in page.text
    assert page.text.count(BEST) == 2 * 3  # of two calls: in words, computed and recorded
    assert sum(f"call_id={best.id}-" in href for href in page.values("href")) == 2


OWN_CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"


@pytest.mark.parametrize("setting", ["credit", "agents"])
async def test_a_run_of_own_code_gets_a_command_and_its_code_is_not_run(tmp_path: Path, setting: str) -> None:
    (tmp_path / "code.py").write_text(OWN_CODE)
    code = f"{tmp_path}/code.py:own"
    given = {setting: ["writer", code] if setting == "agents" else code}
    async with reading({**record(), "algorithm": {"group_size": GROUP, **given}}) as reader:
        best = await a_rollout(reader)
        explained = await shown(reader, view="explain", rollout=best.id)
    assert f"which the console never runs; type: agl rewards explain {best.id}" in explained.text
    assert not (tmp_path / "ran").exists()
    async with reading(record(credit="decisive")) as reader:
        explained = await shown(reader, view="explain", rollout=(await a_rollout(reader)).id)
    assert "credit: 'decisive' reads more than the rewards of one step; type: agl rewards explain" in explained.text


async def test_a_step_of_more_rollouts_than_a_page_computes_gets_a_command(reader: Reader) -> None:
    await check_size(reader, RUN, 1, "agl …", GROUP * GROUPS)
    with pytest.raises(InputError, match="expected one of at most 7 rollouts here, 1 has more; type: agl …"):
        await check_size(reader, RUN, 1, "agl …", GROUP * GROUPS - 1)


async def test_tokens_are_coloured_by_advantage_ratio_and_training(reader: Reader) -> None:
    best, worst = await a_rollout(reader), await a_rollout(reader, 0)

    async def strip(rollout: Rollout, color: str) -> list[str]:
        page = await shown_page(reader, "/replay", rollout=rollout.id, color=color)
        assert "nothing is recorded" not in page.text
        return [value.removeprefix("token").strip() for value in page.values("class") if value.startswith("token")]

    assert await strip(best, "advantage") == ["up v5"] * 4  # 1.16 of 2
    assert await strip(worst, "advantage") == ["down v5"] * 4
    assert await strip(best, "ratio") == ["", "up v4", "down v6", ""]
    assert await strip(best, "trained") == ["even v4"] * 4


async def test_the_credit_of_a_call_stands_beside_it(reader: Reader) -> None:
    best = await a_rollout(reader)
    page = await shown_page(reader, "/replay", rollout=best.id, call_id=f"{best.id}-1")
    for figure in (f"credit{earned(best):.4g}", f"advantage{BEST}", "loss weight0.125", "clip share6.2%"):
        assert figure in page.text
    assert f"trained: step {STEPS} updated the policy by 16 of its 16 sampled tokens" in page.text


async def test_where_no_credit_is_stored_the_replay_says_for_which_steps_it_is(reader: Reader) -> None:
    best = await a_rollout(reader)
    await reader.store.drop_credit(RUN, STEPS + 1)
    dropped = await shown_page(reader, "/replay", rollout=best.id, color="advantage")
    assert "no advantages: the store has that of calls that the run's latest 50 steps learned from" in dropped.text


async def test_credit_that_does_not_fit_its_call_leaves_the_pages_as_they_are(reader: Reader) -> None:
    one = await a_rollout(reader)
    kept = await reader.store.credit([one.id])
    wrong = [replace(each, advantage=1e308, token_advantages=[1.0], token_ratios=[1e308] * 99) for each in kept]
    await reader.store.record_credit(wrong)
    for color in ("advantage", "ratio"):
        assert "sampled tokens" in (await shown_page(reader, "/replay", rollout=one.id, color=color)).text
    assert "+1e+308" in (await shown(reader, view="explain", rollout=one.id)).text
