"""Checkpoints as model versions: registered with what made them, once, and kept as long as somebody uses them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loop_doubles import RememberingEngine

from agentlightning.config.run import Config, parse_config
from agentlightning.engines.folders import seal
from agentlightning.records import Metric, Resource
from agentlightning.store.base import LightningStore
from agentlightning.store.models import ModelVersion
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.checkpoint import Fingerprint, RunFolder, take_fingerprint
from agentlightning.trainer.checkpoint_files import Registrar, licence_of, save_checkpoint


class SealedEngine(RememberingEngine):
    """Its checkpoints are sealed, and hold weights beside the learner's state."""

    async def save(self, path: Path, policy: str = "default") -> None:
        await super().save(path, policy)
        (path / "model.safetensors").write_bytes(b"weights")
        await asyncio.to_thread(seal, path)


class Training:
    """A run in a folder, which saves a step and registers it."""

    def __init__(self, store: LightningStore, root: Path, run_id: str = "run", **settings: Any) -> None:
        self.store = store
        self.folder = RunFolder(root / "runs", run_id)
        table: dict[str, Any] = {"model": {"path": "base/model"}, "agent": {"run": "a.py:f"}, "data": {"train": "t"}}
        for name, value in settings.items():
            table[name] = {**table.get(name, {}), **value}
        self.config: Config = parse_config(table)
        self.policies = tuple(self.config.policies) or ("default",)
        self.registrar = Registrar(
            store=store,
            config=self.config,
            folder=self.folder,
            policies=self.policies,
            made_of=Fingerprint(config="c", code="d", data="e"),
        )

    async def save(self, step: int) -> None:
        engine, trainer = SealedEngine(), self.config.trainer
        engine.updates = [f"{self.folder.run_id} {step}"]
        await save_checkpoint(self.store, engine, self.folder, step, step + 1, trainer, self.policies)

    async def step(self, step: int) -> list[ModelVersion]:
        await self.save(step)
        return await self.registrar.register(step)

    @property
    def steps(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.path.glob("checkpoints/step-*"))


@pytest.fixture
async def store() -> AsyncIterator[LightningStore]:
    async with InMemoryLightningStore() as opened:
        for run_id in ("run", "next"):
            await opened.create_run(run_id, {}, run_id)
        yield opened


async def test_a_checkpoint_is_registered_with_what_made_it(store: LightningStore, tmp_path: Path) -> None:
    run = Training(store, tmp_path, model={"name": "support"})
    for _ in range(11):
        await store.put_resources(
            [Resource(run_id="run", name="default", kind="policy", value={"prompts": {"system": 3}})]
        )
    for step, mean in ((5, 0.25), (10, 0.5), (11, 0.9)):
        numbers = {"reward_mean": mean, "reward_stderr": 0.1, "tasks": 300.0}
        await store.log_metrics(
            [
                Metric(run_id="run", step=step, name=f"eval/greedy/{name}", value=value)
                for name, value in numbers.items()
            ]
        )
    [version] = await run.step(10)
    place = run.folder.path.resolve() / "checkpoints" / "step-000010"
    assert (version.reference, version.parent, version.base_model) == ("support@10", "base/model", "base/model")
    assert (version.resource_version, version.prompts) == (11, {"system": 3})
    assert (version.config_hash, version.code_hash, version.data_hash) == ("c", "d", "e")
    interval = version.metrics["eval/greedy/reward"]
    assert (interval["mean"], interval["n"], interval["step"]) == (0.5, 300, 10)
    assert (round(interval["low"], 3), round(interval["high"], 3)) == (0.304, 0.696)
    assert (version.weights["kind"], version.weights["url"]) == ("full", f"file://{place}")
    assert version.weights["bytes"] == len(b"weights")
    assert len(version.weights["manifest_hash"]) == 64
    assert await run.registrar.register(10) == [version]
    [after] = await run.step(20)
    assert after.parent == "support@10"
    assert await run.step(0) == []  # the weights that training starts from
    assert await run.registrar.register(30) == []  # what is not recorded


async def test_a_run_that_starts_from_a_version_names_it_as_its_parent(store: LightningStore, tmp_path: Path) -> None:
    [version] = await Training(store, tmp_path, model={"name": "support"}).step(10)
    path = str(version.weights["url"]).removeprefix("file://")
    further = Training(store, tmp_path, "next", model={"name": "support", "path": path})
    [after] = await further.step(5)
    assert (after.reference, after.parent, after.base_model) == ("support@15", "support@10", "base/model")


async def test_each_policy_of_several_has_versions_of_its_own(store: LightningStore, tmp_path: Path) -> None:
    run = Training(store, tmp_path, policies={"writer": {}, "critic": {"model": "other/base"}})
    found = {version.name: version for version in await run.step(10)}
    assert set(found) == {"run-writer", "run-critic"}
    assert found["run-critic"].base_model == "other/base"
    assert str(found["run-critic"].weights["url"]).endswith("/step-000010/critic")


async def test_checkpoints_of_versions_in_use_are_kept_until_they_are_not(
    store: LightningStore, tmp_path: Path
) -> None:
    run = Training(store, tmp_path, trainer={"keep_checkpoints": 1})
    await run.step(10)
    await store.set_alias("run", "production", 10)
    for step in (20, 30):
        await run.step(step)
    assert run.steps == [10, 30]
    assert [version.deleted for version in await store.models("run")] == [False, True, False]
    await store.set_alias("run", "production", None)
    await run.step(40)
    assert run.steps == [40]


async def test_a_trainer_killed_between_the_mark_and_the_files_removes_them_with_the_next_checkpoint(
    store: LightningStore, tmp_path: Path
) -> None:
    run = Training(store, tmp_path, trainer={"keep_checkpoints": 1})
    await run.step(10)
    await store.delete_model("run", 10)  # and its files are there
    await run.step(20)
    assert run.steps == [20]


def test_a_fingerprint_changes_with_code_and_data_and_not_with_the_store(tmp_path: Path) -> None:
    agent, script = tmp_path / "agent.py", tmp_path / "run.sh"
    agent.write_text("one")
    script.write_text("one")
    run: dict[str, Any] = {"model": {"path": "m"}, "agent": {"run": f"{agent}:solve"}, "data": {"train": "t.jsonl"}}
    first = take_fingerprint(parse_config(run), [{"a": 1}])
    assert take_fingerprint(parse_config({**run, "store": {"url": "memory://"}}), [{"a": 1}]) == first
    assert take_fingerprint(parse_config(run), [{"a": 2}]) == replace(
        first, data=take_fingerprint(parse_config(run), [{"a": 2}]).data
    )
    agent.write_text("two")
    changed = take_fingerprint(parse_config(run), [{"a": 1}])
    assert (changed.config, changed.data) == (first.config, first.data)
    assert changed.code != first.code
    assert Fingerprint.of_summary(first.summary()) == first
    command = {**run, "agent": {"command": f"sh {script} --x"}}
    before = take_fingerprint(parse_config(command), []).code
    script.write_text("two")
    assert take_fingerprint(parse_config(command), []).code != before


@pytest.mark.parametrize(
    ("name", "text", "licence"),
    [
        ("README.md", "---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\nlicense: mit", "apache-2.0"),
        ("README.md", "---\nlicense: other\nlicense_name: qwen-research\n---\n", "qwen-research"),
        ("README.md", "# A model\nlicense: mit", None),
        ("other", "", None),
    ],
)
def test_the_licence_is_that_of_the_models_card(tmp_path: Path, name: str, text: str, licence: str | None) -> None:
    (tmp_path / name).write_text(text)
    assert licence_of(str(tmp_path)) == licence


async def test_weights_at_a_url_are_named_by_it_and_kept_copies_there_stay_too(
    store: LightningStore, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    run = Training(store, tmp_path, trainer={"keep_checkpoints": 1, "checkpoint_url": f"file://{shared}"})
    [version] = await run.step(10)
    assert version.weights["url"] == f"file://{shared}/run/step-000010"
    await store.set_alias("run", "production", 10)
    for step in (20, 30):
        await run.step(step)
    assert sorted(path.name for path in (shared / "run").iterdir()) == ["step-000010", "step-000030"]
