"""Runs as files: nothing is missing, whole prompts can be rebuilt, and a run is deleted only once its files are complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from store_samples import Clock, a_call, a_reward, a_run, a_span, a_worker, claimed, ending

from agentlightning.errors import ConfigError, NotFoundError, StoreError
from agentlightning.records import Checkpoint, Consumed, Metric, Resource
from agentlightning.store.base import LightningStore
from agentlightning.store.export import KINDS, export_run


async def a_full_run(store: LightningStore) -> str:
    claims = await claimed(store, 3)
    run_id = claims[0].rollout.run_id
    await store.append_calls([a_call(claims[0])])
    await store.finish([ending(claims[0], "lost")])
    [again] = await store.claim(a_worker(run_id))
    root = a_call(again, suffix_ids=[1, 2, 3], sampled_ids=[4, 5], finished_ns=10)
    child = a_call(again, parent_id=root.id, suffix_ids=[6], sampled_ids=[7, 8], prompt_tokens=6, finished_ns=20)
    await store.append_calls([root])
    await store.append_calls([child])
    await store.append_spans(
        [a_span(again, attributes={"deep": [1, {"ä": None}]}, events=[{"name": "e", "time_ns": 1}])]
    )
    await store.record_rewards([a_reward(again, 0.5, "emitted", call_id=child.id)])
    await store.finish([ending(claim, rewards=(a_reward(claim, 1.0),)) for claim in (again, *claims[1:])])
    await store.open_step(run_id, 1, [Consumed(rollout_id=again.rollout.id, outcome="trained")])
    await store.put_resources([Resource(run_id=run_id, name="default", kind="policy", value={"a": 1})])
    await store.close_step(run_id, 1, 1)
    await store.log_metrics(
        [
            Metric(run_id=run_id, step=1, name="reward", value=0.25),
            Metric(run_id=run_id, step=1, name="loss", value=float("nan")),
        ]
    )
    await store.put_checkpoint(Checkpoint(run_id=run_id, step=1, path="/there", version=1))
    return run_id


def json_lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{kind}.jsonl").read_text().splitlines()]


def parquet_rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows: list[dict[str, Any]] = parquet.read_table(folder / f"{kind}.parquet").to_pylist()
    return rows


async def test_everything_about_a_run_is_written(store: LightningStore, tmp_path: Path) -> None:
    run_id, other = await a_full_run(store), await a_full_run(store)
    shown: list[tuple[int, int]] = []
    counts = await export_run(store, run_id, tmp_path / "out", on_progress=lambda *now: shown.append(now))
    assert counts == {
        "rollouts": 3,
        "attempts": 4,
        "calls": 3,
        "spans": 1,
        "rewards": 4,
        "metrics": 2,
        "steps": 1,
    }
    assert shown == [(0, 3), (3, 3)]
    for kind in KINDS:
        lines = json_lines(tmp_path / "out", kind)
        assert len(lines) == counts[kind]
        assert all(line.get("run_id", run_id) == run_id for line in lines)
    about = json.loads((tmp_path / "out" / "run.json").read_text())
    assert about["run"]["id"] == run_id
    assert about["records"] == counts
    assert [resource["value"] for resource in about["resources"]] == [{"a": 1}]
    assert about["checkpoints"][0]["path"] == "/there"
    assert [metric["value"] for metric in json_lines(tmp_path / "out", "metrics")] == [0.25, None]
    assert (await store.runs([other]))[0].id == other


async def test_whole_prompts_can_be_rebuilt_from_the_files(store: LightningStore, tmp_path: Path) -> None:
    await export_run(store, await a_full_run(store), tmp_path / "out")
    prompts: dict[str, list[int]] = {}
    sampled: dict[str, list[int]] = {}
    for call in json_lines(tmp_path / "out", "calls"):  # a parent comes before its children
        parent = call["parent_id"]
        before = [] if parent is None else prompts[parent] + sampled[parent]
        prompts[call["id"]], sampled[call["id"]] = before + call["suffix_ids"], call["sampled_ids"]
        assert len(prompts[call["id"]]) == call["prompt_tokens"]
    assert [1, 2, 3, 4, 5, 6] in prompts.values()


async def test_parquet_holds_the_same_records(store: LightningStore, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    run_id = await a_full_run(store)
    counts = await export_run(store, run_id, tmp_path / "parquet", "parquet")
    assert await export_run(store, run_id, tmp_path / "jsonl", "jsonl") == counts
    for kind in KINDS:
        rows, lines = parquet_rows(tmp_path / "parquet", kind), json_lines(tmp_path / "jsonl", kind)
        assert len(rows) == len(lines) == counts[kind]
        for row, line in zip(rows, lines, strict=True):
            assert row.keys() == line.keys()
            for name, value in row.items():
                same = json.loads(value) if isinstance(value, str) and not isinstance(line[name], str) else value
                if kind == "metrics" and line[name] is None:
                    assert same != same  # NaN
                else:
                    assert same == line[name], (kind, name)


async def test_a_run_without_anything_is_written_too(store: LightningStore, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    run_id = await a_run(store)
    for name in ("jsonl", "parquet"):
        counts = await export_run(store, run_id, tmp_path / name, name)  # type: ignore[arg-type]
        assert set(counts.values()) == {0}
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == sorted(
            ["run.json", *(f"{kind}.{name}" for kind in KINDS)]
        )


async def test_files_appear_once_they_are_complete(store: LightningStore, clock: Clock, tmp_path: Path) -> None:
    run_id = await a_full_run(store)

    def fail(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await export_run(store, run_id, tmp_path / "out", on_progress=fail)
    assert not (tmp_path / "out").exists()
    await export_run(store, run_id, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


async def test_what_cannot_be_written_is_said_in_a_sentence(store: LightningStore, tmp_path: Path) -> None:
    run_id = await a_run(store)
    with pytest.raises(NotFoundError, match="no such run"):
        await export_run(store, "nowhere", tmp_path / "out")
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        await export_run(store, run_id, tmp_path / "there")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        await export_run(store, run_id, tmp_path / "file" / "out")
