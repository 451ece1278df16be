"""A bottleneck planted in a real run: the rules name it first, and the command line and the console's page say so in the
same words."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from command_line import Folder
from training import Training

from agentlightning.console.markup import escaped
from agentlightning.console.pages.advice import MEANINGS, bottlenecks_page
from agentlightning.console.reader import Reader
from agentlightning.store.base import RolloutQuery
from agentlightning.store.open import open_store

pytestmark = [pytest.mark.slow, pytest.mark.long]

SLOW_TOOL = """
import asyncio
from agentlightning.demo import lookup


async def solve(task, llm):
    await asyncio.sleep(4.0)  # a tool that takes its time
    return await lookup.solve(task, llm)
"""


async def first_finding(training: Training, *settings: str) -> str:
    shared = ("trainer.steps=2", "eval.every=0", "trainer.learning_rate=1e-6", *settings)
    process = training.start(*(word for one in shared for word in ("--set", one)))
    assert await training.ended(process) == 0, training.output
    told = training.folder.run("runs", "bottlenecks", training.run_id, "--store", training.store, "--json")
    found = orjson.loads(told.stdout)
    assert found["steps"] == 2
    first = found["findings"][0]
    words = training.folder.run("runs", "bottlenecks", training.run_id, "--store", training.store).stdout
    assert first["text"] in words
    assert "phases of a step:" in words
    async with open_store(training.store) as store:
        page = await bottlenecks_page(Reader(store), {"run": [training.run_id]})
    assert escaped(first["text"]) in page
    assert page.index(first["name"]) < min(
        (page.index(one["name"]) for one in found["findings"][1:]), default=len(page)
    )
    assert all(escaped(meaning) in page for meaning in MEANINGS.values())
    return str(first["name"])


async def test_a_slow_tool_is_named_and_the_credit_of_every_call_is_kept(folder: Folder, model: Path) -> None:
    training = Training(folder, model)
    folder.write("agent.py", SLOW_TOOL)
    assert await first_finding(training, "agent.workers=1", "agent.concurrency=24") == "slow_tools"
    async with open_store(training.store) as store:
        rollouts = await store.rollouts(RolloutQuery(run_id=training.run_id, mode="train"))
        ids = [rollout.id for rollout in rollouts if rollout.outcome in ("trained", "zero_variance")]
        calls = {call.id: call for call in await store.calls(ids)}
        credits = await store.credit(ids)
    assert {credit.call_id for credit in credits} == set(calls)
    trained = [credit for credit in credits if credit.trained_tokens]
    assert trained
    for credit in trained:
        assert len(credit.token_ratios) == len(credit.token_advantages) == len(calls[credit.call_id].sampled_ids)
        assert credit.token_ratios == pytest.approx([1.0] * len(credit.token_ratios), abs=0.02)  # hardly any learning
        assert len(credit.token_entropies) == len(credit.token_ratios)
        assert min(credit.token_entropies) > 0
        assert credit.clip_share == 0.0
        assert credit.weight > 0
