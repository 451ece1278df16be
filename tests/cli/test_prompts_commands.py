"""``agl prompts``: versions are listed, shown, compared, added and promoted, and mistakes are one sentence."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from agentlightning.cli.app import app
from agentlightning.records import Finish, NewRollout, Resource, Rollout, WorkerStatus
from agentlightning.store.open import open_store
from agentlightning.store.templates import CandidateRecord, group_id


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Of a store with a run "r"."""
    url = f"sqlite:///{tmp_path}/agl.db"

    async def make() -> None:
        async with open_store(url) as store:
            await store.create_run("r", {}, "r")
            await store.put_resources([Resource(run_id="r", name="default", kind="policy", value={})])

    asyncio.run(make())
    return url


def prompts(url: str, *words: str, text: str | None = None) -> Result:
    return CliRunner().invoke(app, ["prompts", *words, "--store", url], input=text)


def found(url: str, *words: str, text: str | None = None) -> Any:
    result = prompts(url, *words, "--json", text=text)
    assert result.exit_code == 0, result.exception
    return json.loads(result.output)


def claimed(url: str, group: str) -> Rollout:
    async def claim() -> Rollout:
        async with open_store(url) as store:
            await store.enqueue([NewRollout(run_id="r", task={}, group_id=group)])
            worker = WorkerStatus(id="w", run_id="r", host="h", pid=1, running=0, seen_ns=0)
            return (await store.claim(worker))[0].rollout

    return asyncio.run(claim())


def test_a_terminal_obeys_nothing_that_a_text_says(url: str) -> None:
    prompts(url, "add", "r", "system", "-", text="Be brief.")
    prompts(url, "add", "r", "system", "-", text="Be \x1b]0;title\x07brief.")
    assert prompts(url, "show", "r", "system").output == "Be \\x1b]0;title\\x07brief.\n"
    assert "\x1b" not in prompts(url, "show", "r", "system@1", "system@2").output
    assert found(url, "show", "r", "system")["value"]["template"] == "Be \x1b]0;title\x07brief."


def test_versions_are_added_listed_shown_and_compared(url: str, tmp_path: Path) -> None:
    file = tmp_path / "system.txt"
    file.write_text("Answer {question}.\nBe brief.")
    assert prompts(url, "add", "r", "system", str(file)).output == "system@1: new rollouts of r get it\n"
    second = found(
        url, "add", "r", "system", "-", "--format", "jinja", text="Think, then answer {{ question }}.\nBe brief."
    )
    assert (second["version"], second["parent"], second["value"]["placeholders"]) == (2, 1, ["question"])
    listed = prompts(url, "list", "r").output.splitlines()
    assert [line.split()[:3] for line in listed[1:]] == [
        ["system@1", "fstring", "question"],
        ["system@2", "jinja", "question"],
    ]
    assert prompts(url, "show", "r", "system@1").output == "Answer {question}.\nBe brief.\n"
    assert found(url, "show", "r", "system")["version"] == 2
    compared = found(url, "show", "r", "system@1", "system@2")
    assert compared["diff"].splitlines()[3:] == [
        "-Answer {question}.",
        "+Think, then answer {{ question }}.",
        " Be brief.",
    ]
    assert prompts(url, "show", "r", "system", "system@2").output == "the two are the same\n"


def test_a_promoted_version_is_what_new_rollouts_get(url: str) -> None:
    for text in ("one", "two", "three"):
        found(url, "add", "r", "system", "-", text=text)
    before = claimed(url, "a")
    promoted = found(url, "add", "r", "system@1")
    assert (promoted["version"], promoted["parent"]) == (4, 1)
    assert (promoted["value"]["template"], promoted["value"]["parents"]) == ("one", [1])
    assert (before.prompts, claimed(url, "b").prompts) == ({"system": 3}, {"system": 4})
    assert prompts(url, "add", "r", "system@4").output == "system@4 is the newest already\n"


@pytest.mark.parametrize(
    ("words", "text", "sentence"),
    [
        (["show", "r", "other"], None, "other: run r has no prompt template of this name; it has system"),
        (["show", "r", "system@9"], None, "system@9: run r has no such version; the newest is 1"),
        (["show", "r", "system@x"], None, "system@x: expected NAME@VERSION with a number"),
        (["list", "nowhere"], None, "nowhere"),
        (["add", "r", "system"], None, "give NAME and a FILE, or an earlier NAME@VERSION alone"),
        (["add", "r", "system", "-"], "{question} {hint}", "unknown placeholder 'hint'; expected only question"),
        (["add", "r", "system", "-"], "no placeholder", "the placeholder 'question' is lost"),
        (["add", "r", "new", "-"], "{a.b}", "template: expected a name between braces, got {a.b}"),
        (["add", "r", "default", "-"], "x", "default: expected another name, since a resource of kind policy has it"),
        (["add", "r", "a b", "-"], "x", "a b: expected a name of letters"),
        (["add", "r", "few", "-", "--format", "messages"], "{", "-: cannot be read"),
    ],
)
def test_a_mistake_is_one_sentence_and_changes_nothing(
    url: str, words: list[str], text: str | None, sentence: str
) -> None:
    found(url, "add", "r", "system", "-", text="{question}")
    result = prompts(url, *words, text=text)
    assert result.exit_code != 0
    assert sentence in str(result.exception)
    assert "\n" not in str(result.exception)
    assert [(each["name"], each["version"]) for each in found(url, "list", "r")] == [("system", 1)]


def test_candidates_of_a_search_are_listed_with_parents_and_rewards(url: str) -> None:
    assert prompts(url, "list", "r", "--candidates").output == "r: no search for prompts yet; see: agl optimize\n"

    async def search() -> None:
        async with open_store(url) as store:
            await store.put_resources(
                [
                    record.resource("r")
                    for record in (
                        CandidateRecord(number=0, texts={"system": "a"}, versions={"system": 1}, source="seed"),
                        CandidateRecord(
                            number=1, texts={"system": "b"}, versions={"system": 2}, parents=(0,), source="apo edit"
                        ),
                        CandidateRecord(
                            number=None, texts={"system": "{"}, parents=(1,), source="apo edit", refused="no template"
                        ),
                    )
                ]
            )
            await store.enqueue([NewRollout(run_id="r", task={}, group_id=group_id(1, "val", 3), mode="eval")])
            worker = WorkerStatus(id="w", run_id="r", host="h", pid=1, running=0, seen_ns=0)
            [claim] = await store.claim(worker)
            await store.finish([Finish(lease=claim.lease, state="failed", error="boom")])

    asyncio.run(search())
    lines = [line.split() for line in prompts(url, "list", "r", "--candidates").output.splitlines()]
    assert lines[1:] == [
        ["0", "-", "0", "-", "seed", "system@1"],
        ["1", "0.000", "1", "0", "apo", "edit", "system@2"],
        ["-", "-", "0", "1", "apo", "edit", "refused:", "no", "template"],
    ]
    assert [each["rewards"] for each in found(url, "list", "r", "--candidates")] == [{}, {"3": 0.0}, {}]
