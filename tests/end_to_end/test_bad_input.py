"""Bad input and bad disks, from the command line: one clear sentence, the right exit code, nothing lost or left behind.

Exit code 2 is for what the user gave, 1 for everything else that failed.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from command_line import Folder, refused_at_once
from house import House
from training import Training
from typer.testing import Result

from agentlightning.records import Checkpoint
from agentlightning.runtime.children import listen
from agentlightning.store.open import open_store

CONFIG = """
[model]
path = "model"
[agent]
run = "agent.py:solve"
[data]
train = "tasks.jsonl"
"""

PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1


@pytest.fixture
def project(folder: Folder) -> Folder:
    """A folder in which `agl train train.toml` has all it needs, except that its model's weights are none."""
    folder.write("train.toml", CONFIG)
    folder.write("agent.py", "def solve(task, llm):\n    return 1.0\n")
    folder.write("tasks.jsonl", '{"question": "1+1", "answer": "2"}\n')
    folder.write("broken.jsonl", '{"question": "1+1", "answer": "2"}\n{"question":\n')
    (folder.path / "model").mkdir()
    folder.write("model/config.json", "{}")
    folder.write("model/model.safetensors", "")
    return folder


@pytest.fixture
def read_only(folder: Folder) -> Path:
    """A folder that whoever obeys permissions cannot write to."""
    path = folder.path / "read-only"
    path.mkdir(mode=0o555)
    return path


def obey_permissions() -> None:
    """Run in a child: root writes where it likes; without this capability it is stopped as everybody else is."""
    if os.geteuid() == 0 and ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE) != 0:
        os._exit(99)


def small_files(kilobytes: int) -> Callable[[], None]:
    """A disk that takes no file larger than that: every write beyond it fails, in every process of the run."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024,) * 2)


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """The command ended with this code and one sentence that has these words."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    sentence, *more = done.stderr.strip().splitlines()
    assert more == []
    assert sentence.startswith("error: ")
    for word in words:
        assert word in sentence


# --- settings, tasks, names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "trainer.stepz=3"], ["trainer.stepz: no such setting", "did you mean 'steps'?"]),
        (["--set", "eval.every=2"], ["eval: has no effect without data.val"]),
        (["--tasks", "broken.jsonl"], ["broken.jsonl, line 2: not JSON"]),
        (["--model", "."], ["not a transformers model folder (it has no config.json)"]),
        (["--resume", "nobody"], ["nobody: no such run in runs"]),
    ],
)
def test_a_wrong_setting_task_or_model_is_refused_before_anything_starts(
    project: Folder, invoke: Callable[..., Result], arguments: list[str], words: list[str]
) -> None:
    before = sorted(project.path.iterdir())
    file = [] if arguments[0] == "--resume" else ["train.toml"]
    refused_at_once(invoke("train", *file, *arguments), *words)
    assert sorted(project.path.iterdir()) == before
    assert project.processes() == []


def test_a_store_of_an_unknown_kind_and_a_file_that_is_not_there_are_refused(invoke: Callable[..., Result]) -> None:
    refused_at_once(invoke("runs", "list", "--store", "mysql://here"), "expected memory://, sqlite:///path", "mysql")
    refused_at_once(invoke("train", "none.toml"), "none.toml: no such file")


async def test_export_leaves_a_folder_that_is_not_empty_as_it_is(folder: Folder) -> None:
    checkpoint = folder.path / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "learner.pt"):
        (checkpoint / name).write_text(name)
    url = f"sqlite:///{folder.path}/agl.db"
    async with open_store(url) as store:
        run = await store.create_run("exported", {})
        await store.put_checkpoint(Checkpoint(run_id=run.id, step=1, path=str(checkpoint), version=2))
    (folder.path / "mine").mkdir()
    folder.write("mine/thesis.tex", "years of work")

    def export(to: str) -> subprocess.CompletedProcess[str]:
        return folder.run("models", "export", run.id, "--to", to, "--store", url)

    refused(await asyncio.to_thread(export, "mine"), 2, "mine: exists and is not an empty folder")
    assert [file.read_text() for file in (folder.path / "mine").iterdir()] == ["years of work"]
    assert (await asyncio.to_thread(export, "new")).returncode == 0
    assert {file.name for file in (folder.path / "new").iterdir()} == {"config.json", "model.safetensors"}


def test_a_port_in_use_is_refused(folder: Folder) -> None:
    with listen("127.0.0.1", 0) as listener:
        port = str(listener.getsockname()[1])
        refused(folder.run("serve", "--store", "memory://", "--port", port), 1, f"port {port} of 127.0.0.1 is in use")


def test_a_server_beyond_loopback_whose_key_others_can_read_or_nobody_can_keep_is_refused(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write("agl.db.server-key", "sk-known").chmod(0o644)
    beyond = ("--host", "0.0.0.0", "--port", "0")
    done = folder.run("serve", "--store", "sqlite:///agl.db", *beyond)
    refused(done, 2, "the server key can be read by others")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder.write("a-file", "")))
    refused(folder.run("serve", "--store", "memory://", *beyond), 2, "the server key cannot be kept there")


# --- agents and rewards -------------------------------------------------------------------------------------------------


def test_an_agent_that_does_not_import_ends_its_worker(folder: Folder) -> None:
    folder.write("agent.py", "import no_such_library\ndef solve(task, llm): ...\n")
    done = folder.run("worker", "agent.py:solve", "--server", "http://127.0.0.1:1", "--run", "r")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "No module named 'no_such_library'" in done.stderr


async def test_a_reward_that_is_no_number_fails_its_attempt_and_is_listed(house: House) -> None:
    sentence = "the agent's return value: expected a finite number, got nan"
    house.folder.write("agent.py", "def solve(task, llm):\n    return float('nan') if task['bad'] else 1.0\n")
    bad, good = await house.rollouts("agent.py:solve", {"bad": True}, {"bad": False})
    assert (bad.state, bad.error) == ("failed", sentence)
    assert (good.state, good.reward) == ("succeeded", 1.0)
    assert sentence in await house.agl("rollouts", "list", house.run_id, "--state", "failed")


# --- disks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--port", "0", "--store", "sqlite:///{}/agl.db"], ["cannot be opened; check the permissions"]),
        (["train", "train.toml", "--runs", "{}/runs"], ["cannot be written: Permission denied", "--runs"]),
    ],
)
def test_a_read_only_folder_is_refused(
    project: Folder, read_only: Path, arguments: list[str], words: list[str]
) -> None:
    filled = [word.format(read_only) for word in arguments]
    refused(project.run(*filled, preexec_fn=obey_permissions), 1, *words)
    assert list(read_only.iterdir()) == []


def test_a_disk_without_room_for_a_store_is_refused(folder: Folder) -> None:
    store = f"sqlite:///{folder.path}/agl.db"
    done = folder.run("serve", "--port", "0", "--store", store, preexec_fn=small_files(8))
    refused(done, 1, "agl.db: the disk refused a read or write; check its space")


# --- what needs the engine ----------------------------------------------------------------------------------------------


@pytest.fixture
def training(folder: Folder, model: Path) -> Training:
    return Training(folder, model)


def last_line(training: Training) -> str:
    assert "Traceback" not in training.output
    return training.output.strip().splitlines()[-1]


@pytest.mark.slow
async def test_a_model_whose_weights_are_none_ends_the_run(project: Folder) -> None:
    done = await asyncio.to_thread(project.run, "train", "train.toml", "--store", "memory://")
    refused(done, 2, f"{project.path}/model: no tokenizer can be loaded from it")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "code", "words"),
    [
        pytest.param(
            "import no_such_library\n",
            2,
            ["could not start", "cannot be imported", "No module named 'no_such_library'"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            "def solve(task, llm):\n    return 'good'\n",
            1,
            ["expected a finite number, got str 'good'"],
            marks=pytest.mark.long,
        ),
        ("def solve(task, llm):\n    return 1.0\n", 1, ["has a model call", "did not use the base URL it was given"]),
    ],
)
async def test_an_agent_that_cannot_be_trained_ends_the_run(
    training: Training, agent: str, code: int, words: list[str]
) -> None:
    training.folder.write("agent.py", agent)
    assert await training.ended(training.start("--set", "agent.max_attempts=1")) == code, training.output
    for word in ("error: ", *words):
        assert word in last_line(training)
    await training.check_machine()


@pytest.mark.slow
@pytest.mark.long
async def test_a_store_in_a_read_only_folder_ends_the_run_at_once(training: Training, read_only: Path) -> None:
    training.store = f"sqlite:///{read_only}/agl.db"
    process = training.start(preexec_fn=obey_permissions)
    assert await training.ended(process) == 1, training.output
    assert "server could not start" in last_line(training)
    assert "check the permissions" in last_line(training)
    await training.check_machine()


@pytest.mark.slow
@pytest.mark.long
async def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_a_mended_disk_resumes_it(
    training: Training,
) -> None:
    process = await training.start_and_hold(1, "--set", "trainer.checkpoint_every=1")
    [learner] = training.processes("agentlightning.engines.local.learner")
    room = 1280 * 1024  # for the weights, not for the optimizer's state
    learner.rlimit(psutil.RLIMIT_FSIZE, (room, room))
    training.hold.unlink()
    assert await training.ended(process) == 1, training.output
    assert "error: the checkpoint " in last_line(training)
    assert "cannot be written" in last_line(training)
    assert await training.ended(training.resume()) == 0, training.output
    await training.check()


@pytest.fixture
def small_disk(folder: Folder) -> Iterator[Path]:
    """A disk of its own size."""
    disk = folder.path / "disk"
    disk.mkdir()
    if not mount(disk, "size=1m"):
        pytest.skip("only a user who may mount gets a disk that is really full")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def mount(disk: Path, options: str) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "size", ["400k", pytest.param("1m", marks=pytest.mark.long)]
)  # full before the first step is collected; full in the middle
async def test_a_full_disk_under_the_store_ends_the_run_and_space_resumes_it(
    training: Training, small_disk: Path, size: str
) -> None:
    assert mount(small_disk, f"remount,size={size}")
    training.store = f"sqlite:///{small_disk}/agl.db"
    assert await training.ended(training.start()) == 1, training.output
    assert "the disk is full; free some space and go on: what was acknowledged is kept" in last_line(training)
    await training.check_machine()
    assert mount(small_disk, "remount,size=64m")
    assert await training.ended(training.resume()) == 0, training.output
    await training.check()
