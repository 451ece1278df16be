"""``agl models promote --share`` and ``rollback``: a version gets a share of the sessions, is shown, and is taken out."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentlightning.records import Resource
from agentlightning.serving.split import Split, put_split
from agentlightning.store.models import ModelVersion
from agentlightning.store.open import open_store
from build import agl


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
            await store.set_alias("support", "staging", 50)
            await put_split(store, "served", Split(stable=40))

    asyncio.run(make())
    return url


def said(url: str, *words: str) -> Any:
    result = agl("models", *words, "--store", url, "--json")
    assert result.exit_code == 0, result.exception
    return json.loads(result.output)


def test_a_version_gets_a_share_is_shown_with_its_evidence_and_is_taken_out(url: str) -> None:
    started = said(url, "promote", "support@staging", "--share", "0.2")
    assert (started["run_id"], started["stable"], started["canary"], started["weight"]) == ("served", 40, 50, 0.2)
    shown = said(url, "show", "support@50")["canary_of"]["served"]
    assert shown["figures"]["reward"]["canary"] == {"sessions": 0, "mean": None}
    text = agl("models", "show", "support@50", "--store", url).output
    assert "served, 20.0% of new sessions" in text
    assert "stable - of 0, canary - of 0; evidence that it is worse 1 of 100" in text
    assert said(url, "rollback", "support")["canary"] == "support@50"
    assert said(url, "show", "support@50")["canary_of"] == {}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["promote", "support@40", "--share", "0.1"], "support@40: is the stable version already"),
        (["promote", "support@60", "--share", "0.1"], "no such model version: support@60"),
        (["rollback", "support"], "no such alias: support@production"),
        (["rollback", "support@40"], "expected an alias, which is what moves"),
    ],
)
def test_a_mistake_is_one_sentence(url: str, words: list[str], sentence: str) -> None:
    result = agl("models", *words, "--store", url)
    assert result.exit_code != 0
    assert sentence in str(result.exception)
