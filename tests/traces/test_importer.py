"""Traces from files as a run in a store, and what learns from it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from trace_samples import otlp

import build
from agentlightning.algorithms.offline import DPO, KTO, RFT, SFT, Distill, OfflineAlgorithm
from agentlightning.demo import tiny_model
from agentlightning.errors import ConfigError, DataError
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.traces.importer import IMPORTED, TraceImport
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.offline import OfflineDataset

ASK = {"role": "user", "content": "Where does Ana live?"}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.fixture
async def store() -> AsyncIterator[LightningStore]:
    async with InMemoryLightningStore() as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_model.train_tokenizer(["Where does Ana live? Oslo Bergen Answer:"] * 3, (), 300).save_pretrained(path)
    return path


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def imported(store: LightningStore, *files: Path, **options: Any) -> TraceImport:
    done = TraceImport(store=store, run_id="traces", **options)
    await done.read(files, "some traces", lambda _: None)
    return done


def dataset(
    store: LightningStore, algorithm: OfflineAlgorithm, folder: Path, tokenizer: Path, notes: list[str]
) -> OfflineDataset:
    made = RunFolder(folder, "run")
    made.make()
    where: dict[str, Any] = {"store": store, "sources": ["traces"], "folder": made, "tokenizer": tokenizer}
    return OfflineDataset(algorithm=algorithm, longest=200, note=notes.append, **where)


PREFERENCE = {"prompt": [ASK], "chosen": [said("Answer: Oslo")], "rejected": [said("Answer: Bergen")]}


async def test_a_file_becomes_a_finished_run_of_training_rollouts(store: LightningStore, tmp_path: Path) -> None:
    conversation = {"messages": [ASK, said("Oslo"), ASK, said("Oslo.")]}
    rows = [
        {**conversation, "reward": 0.5, "rewards": {"f1": 0.25}},
        {**conversation, "rewards": {"reward": 0.5, "f1": 0.25}},  # the final reward among the named ones
    ]
    done = await imported(store, lines(tmp_path / "a.jsonl", *rows))
    [run] = await store.runs(ids=["traces"])
    assert (run.state, run.name, list(run.config)) == ("finished", "some traces", [IMPORTED])
    rollouts = await store.rollouts(RolloutQuery(run_id="traces"))
    assert [(one.state, one.mode, one.reward, one.calls) for one in rollouts] == [("succeeded", "train", 0.5, 2)] * 2
    assert len({one.group_id for one in rollouts}) == 1  # one task, two replicas of it
    assert [one.replica for one in rollouts] == [0, 1]
    calls = await store.calls([rollouts[0].id])
    assert [(one.policy, one.protocol, one.parent_id) for one in calls] == [
        ("", "trace", None),
        ("", "trace", calls[0].id),
    ]
    for one in rollouts:
        rewards = await store.rewards([one.id])
        assert [(reward.name, reward.value) for reward in rewards] == [("f1", 0.25), ("reward", 0.5)]
    assert (done.rollouts, done.calls, done.rewarded) == (2, 4, 2)


async def test_a_trace_without_a_usable_call_stays_and_says_why(store: LightningStore, tmp_path: Path) -> None:
    spans = otlp(7, 1, {"gen_ai.operation.name": "chat"}), otlp(7, 2)  # spans of two traces may have the same ids
    done = await imported(store, lines(tmp_path / "a.jsonl", *spans))
    rollout, other = await store.rollouts(RolloutQuery(run_id="traces"))
    assert (rollout.state, other.warning, other.calls) == ("succeeded", None, 1)
    [span], [call] = await store.spans([other.id]), await store.calls([other.id])
    assert span.id == call.span_id == f"{other.id}.1.{7:016x}"
    assert "none can be learned from: 1 × its prompt was not recorded" in str(rollout.warning)
    assert done.left_out == {"its prompt was not recorded": 1}


async def test_a_rollout_that_failed_before_it_was_exported_has_failed(store: LightningStore, tmp_path: Path) -> None:
    told = {"agl.run_id": "r", "agl.mode": "train", "input.value": "{}"}
    failed = otlp(1, 1, told, status={"code": 2, "message": "the tool broke"})
    spans = [failed, otlp(2, 1, parentSpanId=f"{1:016x}")]
    await imported(store, lines(tmp_path / "a.jsonl", *spans))
    [rollout] = await store.rollouts(RolloutQuery(run_id="traces"))
    assert (rollout.state, rollout.error, rollout.calls) == ("failed", "the tool broke", 1)


async def test_a_broken_file_leaves_a_failed_run_with_what_came_before(store: LightningStore, tmp_path: Path) -> None:
    rows: list[Any] = [{"messages": [ASK, said(str(n))]} for n in range(64)]
    with pytest.raises(DataError, match="line 65"):
        await imported(store, lines(tmp_path / "a.jsonl", *rows, {"messages": 3}))
    [run] = await store.runs(ids=["traces"])
    assert run.state == "failed"
    assert len(await store.rollouts(RolloutQuery(run_id="traces", states=["succeeded"]))) == 64


@pytest.mark.parametrize("algorithm", [SFT(), RFT(), DPO(), KTO(), Distill()])
async def test_every_algorithm_learns_from_imported_text(
    store: LightningStore, tmp_path: Path, tokenizer: Path, algorithm: OfflineAlgorithm
) -> None:
    rows = [{**PREFERENCE, "prompt": [{"role": "user", "content": f"Where does Ana live? {n}"}]} for n in range(4)]
    await imported(store, lines(tmp_path / "a.jsonl", *rows))
    notes: list[str] = []
    found = dataset(store, algorithm, tmp_path, tokenizer, notes)
    examples = await found.examples()
    assert len(examples) == {"sft": 8, "rft": 4, "dpo": 4, "kto": 8, "distill": 8}[algorithm.name]
    assert notes == []
    read = await found.read([str(one.wanted) for one in examples if one.wanted])
    for one in read.values():
        [transition] = one.transitions
        assert transition.prompt_ids
        assert transition.sampled_ids
    if algorithm.name == "dpo":
        assert {str(one.transitions[0].completion["content"]) for one in read.values()} == {"Answer: Oslo"}


async def test_a_reward_of_another_name_can_choose(store: LightningStore, tmp_path: Path, tokenizer: Path) -> None:
    await imported(store, lines(tmp_path / "a.jsonl", PREFERENCE))
    better, worse = await store.rollouts(RolloutQuery(run_id="traces"))
    for rollout, value in ((better, 0.0), (worse, 1.0)):  # the other way round
        strict = build.reward(rollout, value, f"new-{rollout.id}", name="strict", source="rescored")
        await store.record_rewards([strict])
    [own] = await dataset(store, DPO(), tmp_path / "own", tokenizer, []).examples()
    [named] = await dataset(store, DPO(reward="strict"), tmp_path / "named", tokenizer, []).examples()
    assert (own.wanted, named.wanted) == (better.id, worse.id)
    with pytest.raises(ConfigError, match="give no pair"):
        await dataset(store, DPO(reward="unknown"), tmp_path / "unknown", tokenizer, []).examples()
