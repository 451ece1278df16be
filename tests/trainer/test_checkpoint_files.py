"""Checkpoints that are copied to a URL: recorded when they are whole there, found from a folder that has nothing, deleted by
number. On a shared disk here; tests/engines/test_url_folder.py has a real S3 server."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from loop_doubles import RememberingEngine

from agentlightning.config.run import TrainerConfig
from agentlightning.engines.folders import seal
from agentlightning.errors import ConfigError, NotFoundError, StoreError
from agentlightning.records import Checkpoint
from agentlightning.store.base import LightningStore
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.checkpoint_files import (
    check_checkpoint_url,
    last_checkpoint,
    load_checkpoint,
    save_checkpoint,
)


class SealingEngine(RememberingEngine):
    """Its checkpoints are sealed, as those of a real one."""

    async def save(self, path: Path, policy: str = "default") -> None:
        await super().save(path, policy)
        await asyncio.to_thread(seal, path)


class Hosts:
    """Two hosts with folders of their own, a shared disk and one store."""

    def __init__(self, tmp_path: Path, store: LightningStore) -> None:
        self.shared = tmp_path / "shared"
        self.shared.mkdir()
        self.one, self.two = RunFolder(tmp_path / "one", "run"), RunFolder(tmp_path / "two", "run")
        self.settings = TrainerConfig(checkpoint_url=f"file://{self.shared}", keep_checkpoints=2)
        self.store = store

    async def save(self, step: int, updates: list[str], policies: tuple[str, ...] = ("default",)) -> Checkpoint:
        engine = SealingEngine()
        engine.updates = updates
        return await save_checkpoint(self.store, engine, self.one, step, step, self.settings, policies)

    async def last(self, folder: RunFolder) -> Checkpoint:
        found = await last_checkpoint(self.store, folder)
        assert found is not None
        return found

    def remote(self, step: int) -> Path:
        return self.shared / "run" / f"step-{step:06d}"


@pytest.fixture
def hosts(tmp_path: Path, store: LightningStore) -> Hosts:
    return Hosts(tmp_path, store)


async def test_a_checkpoint_is_recorded_by_its_url_and_loads_on_a_host_that_has_nothing(hosts: Hosts) -> None:
    saved = await hosts.save(10, ["a", "b"])
    assert saved.path.startswith(f"file://{hosts.shared}/run/step-000010#sha256=")
    found = await hosts.last(hosts.two)
    assert (found.step, found.path) == (10, str(hosts.two.path / "checkpoints" / "step-000010"))
    engine = SealingEngine()
    await load_checkpoint(engine, found)
    assert engine.updates == ["a", "b"]


async def test_a_folder_of_another_history_is_not_taken_for_the_recorded_one(hosts: Hosts) -> None:
    """The other host was killed after it had saved this step, and before it had recorded that."""
    await save_checkpoint(hosts.store, SealingEngine(), hosts.two, 10, 10, TrainerConfig())
    await hosts.save(10, ["recorded"])
    engine = SealingEngine()
    await load_checkpoint(engine, await hosts.last(hosts.two))
    assert engine.updates == ["recorded"]


async def test_one_flipped_byte_has_a_checkpoint_passed_over(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    await hosts.save(10, ["a"])
    await hosts.save(20, ["a", "b"])
    file = hosts.remote(20) / "learner.pt"
    whole = file.read_bytes()
    file.write_bytes(whole[:3] + bytes([whole[3] ^ 1]) + whole[4:])
    assert (await hosts.last(hosts.two)).step == 10
    assert (
        f"damaged checkpoint passed over: file://{hosts.remote(20)}: learner.pt is not what was written" in caplog.text
    )
    assert (await hosts.last(hosts.one)).step == 20


async def test_the_last_ones_are_kept_in_both_places_and_half_copies_are_not(hosts: Hosts) -> None:
    half, others = hosts.remote(7), hosts.shared / "other-run" / "step-000001"
    for folder in (half, others, hosts.shared / "run" / "notes"):
        folder.mkdir(parents=True)
        (folder / "learner.pt").write_text("half")
    for step in (10, 20, 30):
        await hosts.save(step, ["a"])
    assert sorted(os.listdir(hosts.shared / "run")) == ["notes", "step-000020", "step-000030"]
    assert sorted(os.listdir(hosts.one.path / "checkpoints")) == ["step-000020", "step-000030"]
    assert others.is_dir()


async def test_damaged_ones_of_later_steps_take_the_place_of_none_that_a_run_saves_after_it_went_on(
    hosts: Hosts,
) -> None:
    hosts.settings = hosts.settings.model_copy(update={"keep_checkpoints": 1})
    for step in (10, 20):
        await hosts.save(step, ["a"])
    for place in (hosts.remote(20), hosts.one.path / "checkpoints" / "step-000020"):
        (place / "learner.pt").write_text("")
    for step in (12, 14):  # it went on from an earlier one, and was stopped twice
        await hosts.save(step, ["a", "b"])
        for folder in (hosts.one, hosts.two):
            assert (await hosts.last(folder)).step == step
    assert sorted(os.listdir(hosts.shared / "run")) == ["step-000014", "step-000020"]


async def test_a_checkpoint_that_cannot_be_copied_is_not_recorded(hosts: Hosts) -> None:
    await hosts.save(10, ["a"])
    hosts.remote(20).write_text("in the way")
    with pytest.raises(StoreError, match=f"file://{hosts.remote(20)}: .* is not possible: .*Not a directory"):
        await hosts.save(20, ["a", "b"])
    assert (await hosts.last(hosts.one)).step == 10


async def test_several_policies_are_whole_together(hosts: Hosts) -> None:
    await hosts.save(10, ["a"], ("black", "white"))
    await hosts.save(20, ["a"], ("black", "white"))
    assert sorted(os.listdir((await hosts.last(hosts.two)).path)) == ["black", "manifest.json", "white"]
    (hosts.remote(20) / "white" / "manifest.json").unlink()
    await asyncio.to_thread(os.rename, hosts.two.path, hosts.two.path.with_name("gone"))
    assert (await hosts.last(hosts.two)).step == 10


@pytest.mark.parametrize(
    ("path", "error", "sentence"),
    [
        (
            "/elsewhere/runs/run/checkpoints/step-000010",
            NotFoundError,
            r"/elsewhere/runs/run/checkpoints/step-000010 is not here.*trainer\.checkpoint_url",
        ),
        ("http://169.254.169.254/step-000010#sha256=00", ConfigError, "expected file:///FOLDER"),
    ],
)
async def test_a_path_in_the_store_that_is_none_of_ours_is_not_followed(
    hosts: Hosts, path: str, error: type[Exception], sentence: str
) -> None:
    await hosts.store.put_checkpoint(Checkpoint(run_id="run", step=10, path=path, version=1))
    with pytest.raises(error, match=sentence):
        await last_checkpoint(hosts.store, hosts.two)


def test_a_disk_that_is_not_mounted_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.checkpoint_url: .*missing is no folder here; mount"):
        check_checkpoint_url(TrainerConfig(checkpoint_url=f"file://{tmp_path}/missing"))
    check_checkpoint_url(TrainerConfig(checkpoint_url=f"file://{tmp_path}/"))
