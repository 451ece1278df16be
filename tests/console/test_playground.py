"""The playground completes with the models that the store registered, stores nothing, and lets admins alone promote."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, console, page_at, visitor
from console_scene import ATTACK

import build
from agentlightning.console.playground import NEEDS, Playground, is_installed
from agentlightning.console.reader import Reader
from agentlightning.errors import InputError
from agentlightning.records import Finish, NewRollout, Resource, WorkerStatus
from agentlightning.store.base import LightningStore
from agentlightning.store.models import ModelVersion
from agentlightning.store.sql.store import InMemoryLightningStore, SqlLightningStore
from agentlightning.store.templates import CandidateRecord, group_id


async def register(store: LightningStore, folder: Path, step: int) -> None:
    """A version `support@STEP` whose weights, and those of its base, are in a folder."""
    await store.register_model(
        ModelVersion(
            name="support",
            number=0,
            run_id="r",
            policy="default",
            step=step,
            resource_version=step,
            parent=None,
            base_model=str(folder),
            weights={"kind": "full", "url": str(folder)},
        )
    )


@pytest.fixture
async def playground(tmp_path: Path) -> AsyncIterator[tuple[Playground, list[tuple[Any, ...]]]]:
    """A playground over two versions, and what it asked of models, which say what attacks."""
    asked = list[tuple[Any, ...]]()

    def complete(*given: Any) -> str:
        asked.append(given)
        return ATTACK

    async with InMemoryLightningStore() as store:
        await store.create_run("r", {}, "r")
        for step in (1, 2):
            await register(store, tmp_path, step)
        reader = Reader(store)
        made = Playground(reader, complete)
        yield made, asked
        await made.close()
        reader.close()


async def test_the_newest_versions_are_offered_and_what_they_were_trained_from(
    playground: tuple[Playground, list[Any]],
) -> None:
    assert await playground[0].models() == ["support@2", "support@1", "base of support@1"]


async def test_a_conversation_is_completed_under_its_own_system_prompt(
    playground: tuple[Playground, list[Any]], tmp_path: Path
) -> None:
    said = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert await playground[0].answer("support@2", "be brief", said, 0.5, 9000) == ATTACK
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert playground[1] == [(str(tmp_path), messages, 0.5, 512)]
    assert "expected at most" in await playground[0].answer("support@2", "x" * 20_001, said, 0.0, 16)
    assert "no such" in await playground[0].answer("support@9", "", said, 0.0, 16)
    assert len(playground[1]) == 1


async def test_a_prompt_of_the_address_becomes_the_system_prompt_of_its_side(
    playground: tuple[Playground, list[Any]],
) -> None:
    store = playground[0]._reader.store
    for text in ("one", "two"):
        await store.put_resources([Resource(run_id="r", name="p", kind="prompt_template", value={"template": text})])
    query = {"run": "r", "prompt_a": "p@1", "prompt_b": "p@2"}
    assert [await playground[0].prompt(query, side) for side in "ab"] == ["one", "two"]
    assert await playground[0].prompt({}, "a") == ""


async def test_two_prompts_of_a_search_stand_with_their_paired_rewards(
    playground: tuple[Playground, list[Any]],
) -> None:
    store = playground[0]._reader.store
    candidates = [CandidateRecord(number=each, texts={"p": str(each)}, versions={"p": each + 1}) for each in (0, 1)]
    await store.put_resources([one.resource("r") for one in candidates])
    rewards = {0: [0.0, 0.5, 0.5], 1: [0.5, 1.0, 1.0]}
    groups = {group_id(each, "val", task): value for each in rewards for task, value in enumerate(rewards[each])}
    await store.enqueue([NewRollout(run_id="r", task={}, group_id=group, mode="eval") for group in groups])
    for claim in await store.claim(WorkerStatus(id="w", run_id="r", host="h", pid=1, running=0, seen_ns=0), limit=6):
        reward = build.reward(claim, groups[claim.rollout.group_id], f"{claim.rollout.id}-reward")
        await store.finish([Finish(lease=claim.lease, state="succeeded", rewards=(reward,))])
    told = "Recorded over 3 validation tasks of both: A .83, B .33; A less B +.50 [.50, .50]"
    assert await playground[0].paired({"run": "r", "prompt_a": "p@2", "prompt_b": "p@1"}) == told
    for other in (
        {"run": "r"},
        {"run": "r", "prompt_a": "p@2", "prompt_b": "p@7"},
        {"run": "nobody", "prompt_a": "p@2"},
    ):
        assert await playground[0].paired(other) == ""


async def test_an_admin_promotes_and_a_reader_does_not(playground: tuple[Playground, list[Any]]) -> None:
    with pytest.raises(InputError, match="a reader's token only reads"):
        await playground[0].promote("support@1", "production", "reader")
    assert await playground[0].promote("support@1", "@production", "admin") == (
        "support@production is version 1; before: none"
    )


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None or not is_installed(), reason=f"needs Chromium, {', '.join(NEEDS)}")
def test_two_models_answer_side_by_side_in_a_browser_and_nothing_leaves_the_host(tmp_path: Path) -> None:
    from agentlightning.demo import tiny_model

    tiny_model.build(tmp_path / "model", ["hello"], hidden=16, layers=1)
    url = f"sqlite:///{tmp_path / 'agl.db'}"

    async def fill() -> None:
        async with SqlLightningStore(url) as store:
            await store.create_run("r", {}, "r")
            await register(store, tmp_path / "model", 1)

    asyncio.run(fill())
    with console("--store", url) as address, visitor() as visit:
        visit.page.goto(page_at(address, "/playground"))
        visit.page.wait_for_function("() => document.querySelector('input[aria-label=\"Model A\"]')?.value")
        visit.page.get_by_label("Message to both").fill(ATTACK)
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_function("() => document.querySelectorAll('.message.bot').length == 2")
        assert "<script>window.pwned" in visit.page.inner_text(".message.user")
        assert visit.page.evaluate("() => window.pwned") is None
        assert [one for one in visit.requests if one.endswith("/x")] == []  # no picture of the text was asked for
        visit.page.get_by_role("button", name="Promote", exact=False).first.click()
        visit.page.get_by_role("button", name="Promote A").click()
        visit.page.wait_for_selector("text=support@production is version 1")
        assert visit.elsewhere() == []
