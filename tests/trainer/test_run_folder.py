from pathlib import Path

import pytest
from loop_doubles import RememberingEngine

from agentlightning.config.file import named_files
from agentlightning.config.run import Config, StoreConfig, TrainerConfig, parse_config, run_record
from agentlightning.engines.folders import seal
from agentlightning.errors import ConfigError, ConflictError, NotFoundError, StoreError
from agentlightning.records import Checkpoint
from agentlightning.store.base import LightningStore
from agentlightning.store.open import open_store
from agentlightning.trainer.checkpoint import (
    RESUMED,
    RunFolder,
    export_policy,
    run_config,
)
from agentlightning.trainer.checkpoint_files import last_checkpoint, save_checkpoint


@pytest.fixture
def config() -> Config:
    return parse_config({"model": {"path": "m"}, "agent": {"run": "a.py:f"}, "data": {"train": "t"}})


async def test_a_run_of_another_host_has_its_configuration_from_the_store(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGL_STORE", raising=False)
    url = f"sqlite:///{tmp_path}/agl.db"
    async with open_store(url) as store:
        await store.create_run("run", run_record(config), "run")
    folder = RunFolder(tmp_path / "nothing", "run")
    found = run_config(folder, url)
    assert found == config.model_copy(update={"store": StoreConfig(url=url)})
    with pytest.raises(NotFoundError, match="no such run"):
        run_config(RunFolder(tmp_path, "other"), url)
    with pytest.raises(NotFoundError, match=r"no such run in .*nothing; .*name the store: --server URL"):
        run_config(folder)


def test_a_configuration_with_a_password_is_its_owners_alone(tmp_path: Path, config: Config) -> None:
    url = "postgresql://agl:secret@db/agl"
    folder = RunFolder(tmp_path, "run")
    folder.create(config.model_copy(update={"store": StoreConfig(url=url)}))
    assert folder.config().store.url == url
    assert (folder.path / "config.json").stat().st_mode & 0o077 == 0


def test_metrics_that_were_undone_and_half_a_line_are_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "run")
    folder.make()
    for step, kind, reward in ((1, "step", 0.1), (2, "step", 0.2), (3, "step", 0.3), (1, RESUMED, 0), (2, "step", 0.5)):
        folder.append_metrics({"step": step, "kind": kind, "train/reward_mean": reward})
    with (folder.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "ki')
    folder.append_metrics({"step": 4, "kind": "step", "train/reward_mean": 0.5})
    assert [(row["step"], row["train/reward_mean"]) for row in folder.metrics()] == [(1, 0.1), (2, 0.5), (4, 0.5)]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path, config: Config) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written: Not a directory; choose another --runs folder"):
        RunFolder(tmp_path / "file", "run").create(config)


def test_a_run_is_trained_by_one_process_at_a_time(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "run")
    with folder.held(), pytest.raises(ConflictError, match="another process is training this run"), folder.held():
        pass
    with folder.held():
        pass


def test_a_checkpoint_whose_replacement_never_came_is_brought_back(tmp_path: Path) -> None:
    """A learner that was killed between the two renames."""
    folder = RunFolder(tmp_path, "run")
    folder.make()
    checkpoints = folder.path / "checkpoints"
    for name in (
        ".step-000001.replaced",
        ".step-000001.77",  # half a checkpoint
        "step-000002/.red.replaced",
        "step-000003",
        ".step-000003.replaced",
    ):
        (checkpoints / name).mkdir(parents=True)
        (checkpoints / name / "learner.pt").write_text(name)
    with folder.held():
        found = {str(one.relative_to(checkpoints)): one.read_text() for one in checkpoints.rglob("learner.pt")}
    assert found == {
        "step-000001/learner.pt": ".step-000001.replaced",
        "step-000002/red/learner.pt": "step-000002/.red.replaced",
        "step-000003/learner.pt": "step-000003",
    }


def test_an_export_leaves_the_learners_state_behind_and_refuses_a_place_that_is_taken(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for name in ("config.json", "model.safetensors", "learner.pt"):
        (checkpoint / name).write_text(name)
    export_policy(checkpoint, tmp_path / "new")
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == ["config.json", "model.safetensors"]
    for taken in (tmp_path / "new", tmp_path / "new" / "config.json"):
        with pytest.raises(ConfigError, match="exists and is not an empty folder"):
            export_policy(checkpoint, taken)


async def test_old_checkpoints_are_deleted_in_the_runs_own_folder_only(tmp_path: Path, store: LightningStore) -> None:
    """A path in the store may come from anybody who may write to it."""
    folder, precious = RunFolder(tmp_path, "run"), tmp_path / "precious"
    precious.mkdir()
    folder.make()
    for step, path in enumerate((precious, folder.path / "checkpoints" / ".." / ".." / "precious", folder.path)):
        await store.put_checkpoint(Checkpoint(run_id="run", step=step, path=str(path), version=0))
    for step in (3, 4):
        await save_checkpoint(store, RememberingEngine(), folder, step, step, TrainerConfig(keep_checkpoints=1))
    assert precious.is_dir()
    assert [one.name for one in (folder.path / "checkpoints").iterdir()] == ["step-000004"]


@pytest.mark.parametrize(
    ("file", "content", "found"),
    [
        ("learner.pt", b"", "learner.pt has 0 bytes"),
        ("model.safetensors", b"weiGhts", "model.safetensors is not what was written"),
        ("model.safetensors", None, "model.safetensors is missing"),
        ("manifest.json", b"", "manifest.json cannot be read"),
    ],
)
async def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path,
    store: LightningStore,
    caplog: pytest.LogCaptureFixture,
    file: str,
    content: bytes | None,
    found: str,
) -> None:
    """What a power cut leaves: names without content. The one before is as it was written."""
    for step in (1, 2):
        folder = tmp_path / str(step)
        folder.mkdir()
        (folder / "learner.pt").write_bytes(b"state")
        (folder / "model.safetensors").write_bytes(b"weights")
        seal(folder)
        await store.put_checkpoint(Checkpoint(run_id="run", step=step, path=str(folder), version=step))
    assert (await last_checkpoint(store, RunFolder(tmp_path, "run"))).step == 2
    if content is None:
        (tmp_path / "2" / file).unlink()
    else:
        (tmp_path / "2" / file).write_bytes(content)
    assert (await last_checkpoint(store, RunFolder(tmp_path, "run"))).step == 1
    assert found in caplog.text
    (tmp_path / "1" / "learner.pt").write_bytes(b"stale")
    with pytest.raises(NotFoundError, match="no checkpoint is whole"):
        await last_checkpoint(store, RunFolder(tmp_path, "run"))


def test_a_file_that_was_edited_between_two_starts_of_a_run_is_named_once(tmp_path: Path) -> None:
    code, tasks = tmp_path / "own.py", tmp_path / "train.jsonl"
    for file in (code, tasks):
        file.write_text("1")
    table = {
        "model": {"path": "m"},
        "agent": {"run": "elsewhere.py:solve", "reward": f"{code}:score"},
        "data": {"train": str(tasks)},
        "policies": {"writer": {"algorithm": {"loss": f"{code}:loss"}}},
        "algorithm": {"schedule": [{"from_step": 2, "credit": f"{code}:first"}], "loss": "ppo_clip"},
    }
    files = named_files(parse_config(table))
    assert files == {
        "agent.reward.0.run": code,
        "algorithm.schedule.0.credit": code,
        "data.train": tasks,
        "policies.writer.algorithm.loss": code,
    }
    folder = RunFolder(tmp_path / "runs", "r")
    assert folder.changed_files(files) == []
    assert folder.changed_files(files) == []
    code.write_text("2")
    changed = folder.changed_files(files)
    assert [sentence.partition(":")[0] for sentence in changed] == sorted(set(files) - {"data.train"})
    assert all(f"{code} was changed after this run had started" in sentence for sentence in changed)
    assert folder.changed_files(files) == []


def test_a_run_finds_its_store_from_any_working_directory(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path, "run")
    folder.create(config)
    monkeypatch.chdir("/")
    assert folder.config().store.url == f"sqlite:///{tmp_path}/runs/agl.db"
