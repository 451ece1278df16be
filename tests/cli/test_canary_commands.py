"""``agl models canary``: a version gets its share of the sessions, what became of it is shown, and it is stopped."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agentlightning.cli.app import app
from agentlightning.config.serve import RoutesConfig
from agentlightning.records import Resource
from agentlightning.store.model_versions import ModelVersion
from agentlightning.store.open import open_store
from agentlightning.trainer.canary.controller import put_routes


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Of a store with a run that serves support@40, and has support@50 loaded."""
    url = f"sqlite:///{tmp_path}/agl.db"

    async def make() -> None:
        async with open_store(url) as store:
            await store.create_run("serve support", {"serve": {"model": "support"}}, "served")
            for step in (40, 50):
                weights = {"kind": "full", "url": "file:///w", "manifest_hash": "", "bytes": 1}
                await store.register_model(
                    ModelVersion(
                        name="support",
                        number=0,
                        run_id="served",
                        policy="default",
                        step=step,
                        resource_version=step,
                        parent=None,
                        base_model="tiny",
                        weights=weights,
                    )
                )
                await store.put_resources([Resource(run_id="served", name=f"support-{step}", kind="policy", value={})])
            await store.set_alias("support", "staging", 50, {})
            await put_routes(store, "served", RoutesConfig(stable=40))

    asyncio.run(make())
    return url


def canary(url: str, *words: str) -> Result:
    return CliRunner().invoke(app, ["models", "canary", *words, "--store", url])


def said(url: str, *words: str) -> Any:
    result = canary(url, *words, "--json")
    assert result.exit_code == 0, result.exception
    return json.loads(result.output)


def test_a_canary_is_started_by_its_alias_with_a_rule_shown_and_stopped(url: str, tmp_path: Path) -> None:
    (tmp_path / "rule.toml").write_text("[canary]\nreward_margin = 0.1\nslow_s = 20\n")
    rule = str(tmp_path / "rule.toml")
    started = said(url, "start", "support@staging", "--weight", "0.2", "--header", "X-Beta=1", "--rule", rule)
    assert (started["run_id"], started["stable"], started["canary"], started["weight"]) == ("served", 40, 50, 0.2)
    assert started["header"] == {"name": "x-beta", "value": "1"}
    assert (started["rule"]["reward_margin"], started["rule"]["slow_s"]) == (0.1, 20)
    shown = said(url, "status", "support")
    assert shown["verdict"] is None
    assert shown["figures"]["reward"]["canary"] == {"sessions": 0, "mean": None}
    text = canary(url, "status", "support").output.splitlines()
    assert text[0] == "support@50 gets 20% beside support@40; verdict so far: none"
    assert [line.split()[0] for line in text[1:]] == ["measure", "reward", "error", "slow"]
    assert canary(url, "stop", "support").output == "new sessions get support@40\n"
    assert canary(url, "status", "support").output.splitlines()[:2] == [
        "last decision: stop of support@50",
        "no canary: new sessions get support@40",
    ]


def test_without_a_rule_a_person_decides(url: str) -> None:
    assert said(url, "start", "support@50", "--manual")["rule"] is None
    assert "a person decides" in canary(url, "status", "support").output


def test_a_canary_may_get_copies_of_calls_alone(url: str) -> None:
    assert said(url, "start", "support@50", "--shadow", "0.2")["weight"] == 0
    text = canary(url, "status", "support").output.splitlines()
    assert text[0] == "support@50 gets copies of the calls of 20% of new sessions"
    assert [line.split()[:2] for line in text[1:3]] == [["measure", "served"], ["calls", "0"]]
    assert said(url, "stop", "support")["shadow"]["completed"] == 0
    assert "calls" in canary(url, "status", "support").output


def test_calls_are_not_copied_to_a_version_with_another_tokenizer(url: str) -> None:
    async def change() -> None:
        other = Resource(run_id="served", name="support-50", kind="policy", value={"tokenizer": "elsewhere"})
        async with open_store(url) as store:
            await store.put_resources([other])

    asyncio.run(change())
    result = canary(url, "start", "support@50", "--shadow", "0.2")
    assert "--shadow: support-40 and support-50 have other tokenizers" in str(result.exception)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["start", "support@50", "--shadow", "0.2", "--weight", "0.1"],
            "--shadow: goes without --weight, --header and",
        ),
        (["start", "support@40"], "support@40: is the stable version already"),
        (["start", "support@60"], "NAME@REF: no such model version: support@60"),
        (["start", "support"], "NAME@REF: expected NAME@NUMBER or NAME@ALIAS"),
        (["start", "other@1"], "other: no run serves it; start one with: agl serve --policy other@production"),
        (["start", "support@50", "--header", "beta"], "--header: expected NAME=VALUE, got 'beta'"),
        (["start", "support@50", "--manual", "--rule", "x.toml"], "--manual: goes without --rule"),
        (["stop", "support"], "support: has no canary"),
    ],
)
def test_a_mistake_is_one_sentence(url: str, words: list[str], sentence: str) -> None:
    result = canary(url, *words)
    assert result.exit_code != 0
    assert sentence in str(result.exception)
