"""A rollout is continued from its replay, by who may write, where the console may; each form makes its forks once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
from console_scene import Parsed, check_harmless

from agentlightning.console.access import Access, Sessions
from agentlightning.console.forking import fork_page
from agentlightning.console.pages.replay import head, replay_page
from agentlightning.console.reader import Reader
from agentlightning.console.shell import create_app
from agentlightning.records import FINAL_STATES, Fork, Rollout
from agentlightning.store.base import RolloutQuery

HOST = "http://127.0.0.1:7860"
KEY = "0198c2a0-0000-7000-8000-000000000000"


@pytest.fixture
async def writer(reader: Reader) -> AsyncIterator[Reader]:
    writer = Reader(reader.store, clock=lambda: 0.0, forks=True)
    yield writer
    writer.close()


@pytest.fixture
async def client(writer: Reader) -> AsyncIterator[httpx.AsyncClient]:
    access = Access(create_app(writer), None, Sessions(), forks=True)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(access), base_url=HOST, headers={"origin": HOST}
    ) as client:
        yield client


async def finished(reader: Reader, run_id: str = "alpha") -> Rollout:
    found = await reader.store.rollouts(RolloutQuery(run_id=run_id, states=[*FINAL_STATES], limit=1))  # type: ignore[list-item]
    return found[0]


async def forks(reader: Reader) -> list[Rollout]:
    return [one for one in await reader.store.rollouts(RolloutQuery(run_id="alpha")) if one.fork is not None]


async def test_the_replay_offers_it_where_the_console_may_write(reader: Reader, writer: Reader) -> None:
    rollout = await finished(reader)
    query = {"rollout": [rollout.id], "call": ["1"]}
    offered, told = Parsed(await replay_page(writer, query)), Parsed(await replay_page(reader, query))
    hrefs = {f"/fork?rollout={rollout.id}&calls=1", f"/fork?rollout={rollout.id}&calls=1&answer=1"}
    assert hrefs <= set(offered.values("href"))
    assert not hrefs & set(told.values("href"))


async def test_a_form_starts_forks_once_and_leads_to_them(reader: Reader, client: httpx.AsyncClient) -> None:
    rollout = await finished(reader)
    page = await client.get("/fork", params={"rollout": rollout.id, "calls": 1})
    assert "Start" in check_harmless(page.text).text
    form = {"rollout": rollout.id, "calls": "1", "count": "2", "key": KEY}
    sent = [await client.post("/fork", data=form) for _ in range(2)]
    made = await forks(reader)
    assert [one.status_code for one in sent] == [303, 303]
    assert [(one.fork.rollout_id, one.fork.calls) for one in made if one.fork] == [(rollout.id, 1)] * 2
    links = Parsed((await client.get(sent[0].headers["location"])).text).values("href")
    assert {f"/replay?rollout={one.id}" for one in made} <= set(links)


async def test_an_answer_that_was_typed_is_given(reader: Reader, client: httpx.AsyncClient) -> None:
    rollout = await finished(reader)
    page = await client.get("/fork", params={"rollout": rollout.id, "calls": 0, "answer": 1})
    assert "tool_calls" in check_harmless(page.text).text  # what was recorded, to begin with
    form = {"rollout": rollout.id, "calls": "0", "count": "1", "key": KEY, "kind": "text", "text": "Four."}
    await client.post("/fork", data=form)
    [made] = await forks(reader)
    assert made.fork is not None
    assert made.fork.answer == {"role": "assistant", "content": "Four."}


async def test_a_form_that_is_sent_again_with_another_answer_gives_that_one(
    reader: Reader, client: httpx.AsyncClient
) -> None:
    form = {"rollout": (await finished(reader)).id, "calls": "0", "count": "1", "key": KEY, "kind": "text"}
    for text in ("Four.", "Five.", "Five."):  # gone back to, and edited
        await client.post("/fork", data=form | {"text": text})
    given = [one.fork.answer["content"] for one in await forks(reader) if one.fork and one.fork.answer]
    assert sorted(given) == ["Five.", "Four."]


async def test_a_form_that_says_nothing_right_is_answered_with_a_sentence(
    reader: Reader, client: httpx.AsyncClient
) -> None:
    form = {"rollout": (await finished(reader)).id, "calls": "1", "count": "1", "key": KEY}
    for changes in (
        {"calls": "9"},
        {"key": ""},
        {"key": "a:b"},
        {"count": "65"},
        {"kind": "message", "text": "[]"},
        {"kind": "message", "text": "{"},
        {"kind": "text", "text": ""},
    ):
        answered = await client.post("/fork", data=form | changes)
        assert (answered.status_code, 'role="alert"' in answered.text) == (422, True)
    assert not await forks(reader)


async def test_who_may_only_read_sees_the_command(reader: Reader) -> None:
    rollout = await finished(reader)
    page = Parsed(await fork_page(reader, {"rollout": [rollout.id], "calls": ["1"]}, may_fork=False))
    assert f"agl rollouts fork {rollout.id} --calls 1" in page.text
    assert "Start" not in page.text


async def test_the_replay_of_a_fork_says_where_it_ended_and_what_it_continues(reader: Reader, writer: Reader) -> None:
    one = await reader.rollout((await finished(reader)).id)
    fork = Fork(rollout_id="another", attempt=1, calls=2, root_id="another")
    calls = [replace(one.calls[0], replayed_id="x"), *one.calls[1:]]
    page = Parsed(head(replace(one, rollout=replace(one.rollout, fork=fork), calls=calls)))
    assert "of another, after 2 calls" in page.text
    assert "the replay ended after 1 of 2 calls" in page.text
