"""A prompt version is promoted from the console: confirmed, once, in the audit log, and only where the console may write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from console_scene import Parsed, check_harmless

from agentlightning.console.access import Access, Sessions
from agentlightning.console.pages.models import prompts_page
from agentlightning.console.reader import Reader
from agentlightning.console.shell import create_app
from agentlightning.prompts.templates import Template
from agentlightning.records import Finish, NewRollout, Reward, WorkerStatus
from agentlightning.store.prompt_candidates import CandidateRecord, group_id
from agentlightning.store.templates import add_version

HOST = "http://127.0.0.1:7860"
ATTACK = "</pre><script>window.pwned = 1</script>"
FORM = {"run": "alpha", "name": "system", "version": "1", "newest": "2"}


@pytest.fixture
async def writer(reader: Reader) -> AsyncIterator[Reader]:
    """A reader whose pages offer to promote, over a run with two versions of a template."""
    for text in ("Be brief.", f"Think first. {ATTACK}"):
        await add_version(reader.store, "alpha", "system", Template.of(text))
    writer = Reader(reader.store, clock=lambda: 0.0, promotes=True)
    yield writer
    writer.close()


@pytest.fixture
async def client(writer: Reader) -> AsyncIterator[httpx.AsyncClient]:
    access = Access(create_app(writer), None, Sessions(), writes=frozenset({"/promote"}))
    headers = {"origin": HOST}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(access), base_url=HOST, headers=headers) as client:
        yield client


async def versions(reader: Reader) -> list[tuple[int, int | None, str]]:
    found = await reader.store.resources("alpha", "system", latest=False)
    return [(one.version, one.parent, one.value["template"]) for one in found]


async def test_a_promoted_version_is_what_new_rollouts_get_at_once(writer: Reader, client: httpx.AsyncClient) -> None:
    page = await client.get("/promote", params={"run": "alpha", "name": "system", "version": 1})
    promoted = await client.post("/promote", data=FORM)

    assert "Promote version 1" in check_harmless(page.text).text
    assert (promoted.status_code, promoted.headers["location"]) == (303, "/prompts?run=alpha&name=system&version=3")
    assert (await versions(writer))[-1] == (3, 1, "Be brief.")
    await writer.store.enqueue([NewRollout(run_id="alpha", task={}, group_id="new")])
    worker = WorkerStatus(id="w", run_id="alpha", host="h", pid=1, running=0, seen_ns=0)
    [claim] = await writer.store.claim(worker)
    assert claim.rollout.prompts["system"] == 3


async def test_a_promotion_is_in_the_audit_log_with_who_asked(writer: Reader, client: httpx.AsyncClient) -> None:
    await client.post("/promote", data=FORM)
    entry = (await writer.store.audit())[-1]
    assert (entry.action, entry.subject, entry.run_id) == ("put_resources", "system", "alpha")
    assert entry.actor == "somebody of this machine, through the console"


async def test_a_form_that_is_sent_twice_promotes_once(writer: Reader, client: httpx.AsyncClient) -> None:
    first = await client.post("/promote", data=FORM)
    second = await client.post("/promote", data=FORM)
    assert (first.status_code, second.status_code) == (303, 409)
    assert "system@3 became the newest meanwhile" in second.text
    assert len(await versions(writer)) == 3


async def test_a_form_that_is_sent_twice_at_once_promotes_once(writer: Reader, client: httpx.AsyncClient) -> None:
    answered = await asyncio.gather(*(client.post("/promote", data=FORM) for _ in range(2)))
    assert sorted(one.status_code for one in answered) == [303, 409]
    assert len(await versions(writer)) == 3


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"version": "9"}, 404),
        ({"name": "nobody"}, 404),
        ({"run": ""}, 422),
        ({"version": "x"}, 422),
        ({"x": "y" * 20_000}, 422),
    ],
)
async def test_a_form_that_names_no_version_is_answered_with_a_sentence(
    writer: Reader, client: httpx.AsyncClient, changes: dict[str, str], status: int
) -> None:
    answered = await client.post("/promote", data=FORM | changes)
    assert answered.status_code == status
    assert 'role="alert"' in answered.text
    assert len(await versions(writer)) == 2


async def test_the_page_offers_it_where_the_console_may_write_and_the_command_elsewhere(
    reader: Reader, writer: Reader
) -> None:
    query = {"run": ["alpha"], "name": ["system"], "version": ["1"]}
    offered, told = Parsed(await prompts_page(writer, query)), Parsed(await prompts_page(reader, query))
    href = "/promote?run=alpha&name=system&version=1"
    assert (href in offered.values("href"), href in told.values("href")) == (True, False)
    assert "agl prompts promote alpha system@1" in told.text
    newest = Parsed(await prompts_page(writer, query | {"version": ["2"]}))
    assert "New rollouts get this version." in newest.text


@pytest.mark.parametrize("step", [0, 7], ids=["of_optimize", "of_a_schedule"])
async def test_the_page_of_a_search_shows_its_candidates_with_parents_and_rewards(reader: Reader, step: int) -> None:
    for place, text in enumerate(("Be brief.", "Think first.")):
        await add_version(reader.store, "alpha", "system", Template.of(text))
        parents = (0,) if place else ()
        record = CandidateRecord(
            number=place,
            texts={"system": text},
            versions={"system": place + 1},
            parents=parents,
            source=f"gepa {ATTACK}",
            step=step,
        )
        await reader.store.put_resources([record.resource("alpha")])
    refused = CandidateRecord(
        number=None, texts={"system": "{x}"}, source="gepa", refused=f"unknown placeholder {ATTACK}", step=step
    )
    await reader.store.put_resources([refused.resource("alpha")])
    group = group_id(1, "val", 0, step=step)
    await reader.store.enqueue([NewRollout(run_id="alpha", task={}, group_id=group, mode="eval")])
    worker = WorkerStatus(id="w", run_id="alpha", host="h", pid=1, running=0, seen_ns=0)
    [claim] = await reader.store.claim(worker)
    reward = Reward(id="v", run_id="alpha", rollout_id=claim.rollout.id, attempt=1, value=0.75)
    await reader.store.finish([Finish(lease=claim.lease, state="succeeded", rewards=(reward,))])

    parsed = check_harmless(await prompts_page(reader, {"run": ["alpha"]}))

    assert "Candidates of the search" in parsed.text
    assert "0.750" in parsed.text
    assert f"refused: unknown placeholder {ATTACK}" in parsed.text
    assert "/prompts?run=alpha&name=system&version=2" in parsed.values("href")
