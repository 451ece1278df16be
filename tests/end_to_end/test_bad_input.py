"""Bad input at the command line: one clear sentence, the right exit code, no traceback, nothing lost."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import pytest
from command_line import Folder

INPUT_ERROR, FAILURE = 2, 1
TASKS = '{"question": "1+1", "answer": "2"}\n'
AGENT = "async def solve(task, llm):\n    return 0.0\n"


def toml(model: str = "model", agent: str = "agent.py:solve", more: str = "") -> str:
    return f'[model]\npath = "{model}"\n[agent]\nrun = "{agent}"\n[data]\ntrain = "tasks.jsonl"\n{more}'


@pytest.fixture
def project(folder: Folder) -> Folder:
    folder.write("agent.py", AGENT)
    folder.write("tasks.jsonl", TASKS)
    folder.write("train.toml", toml())
    return folder


def refused(folder: Folder, sentence: str, *arguments: str, code: int = INPUT_ERROR, **popen: object) -> None:
    done = folder.run(*arguments, **popen)  # type: ignore[arg-type]
    assert sentence in done.stderr, (done.stdout, done.stderr)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert folder.processes() == []


def test_an_unknown_setting_names_the_one_that_was_meant(project: Folder) -> None:
    refused(
        project,
        "trainer.step: no such setting; did you mean 'steps'?",
        "train",
        "train.toml",
        "--set",
        "trainer.step=3",
    )


def test_broken_toml_names_the_file(project: Folder) -> None:
    project.write("train.toml", "[model")
    refused(project, "train.toml: not valid TOML", "train", "train.toml")


def test_a_model_path_that_is_no_model_is_named(project: Folder) -> None:
    (project.path / "model").mkdir()
    refused(project, "config.json", "train", "train.toml")
    assert not (project.path / "runs").exists()


def test_an_unknown_task_field_names_row_and_field(project: Folder) -> None:
    project.write("train.toml", toml(more='fields = ["question", "anwser"]\n'))
    refused(project, "row 1: field 'anwser' is missing", "train", "train.toml")
    project.write("train.toml", toml(more='fields = ["question"]\n'))
    refused(project, "row 1: unknown field 'answer'; expected question", "train", "train.toml")


def test_a_task_file_that_is_not_json_names_the_line(project: Folder) -> None:
    project.write("tasks.jsonl", TASKS + "{broken\n")
    refused(project, "line 2: not JSON", "train", "train.toml")


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("import nothing_of_this_name\n", "nothing_of_this_name"),
        ("def other(task, llm):\n    return 0\n", "solve"),
        ("def solve(task):\n    return 0\n", "(task, llm)"),
    ],
)
def test_an_agent_file_that_cannot_be_used_is_one_sentence(project: Folder, code: str, sentence: str) -> None:
    project.write("agent.py", code)
    with socket.socket() as server:  # a worker loads its agent before it asks any server
        server.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        done = project.run("worker", "agent.py:solve", "--server", url, "--run", "run")
    assert sentence in done.stderr
    assert done.returncode == INPUT_ERROR
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_named(folder: Folder) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        refused(folder, f"port {port}", "serve", "--port", port, "--store", "memory://", code=FAILURE)


def test_a_server_beyond_loopback_without_a_key_is_refused(folder: Folder) -> None:
    refused(folder, "AGL_SERVER_KEY", "serve", "--host", "0.0.0.0", "--port", "0", "--store", "memory://")


def test_a_run_that_does_not_exist_cannot_be_resumed(folder: Folder) -> None:
    refused(folder, "none: no such run", "train", "--resume", "none")


def test_a_store_of_an_unknown_kind_lists_the_known_ones(folder: Folder) -> None:
    refused(folder, "sqlite", "runs", "list", "--store", "mysql://here")


def test_a_full_disk_is_one_sentence(folder: Folder) -> None:
    def files_of_at_most_8_kib() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))

    store = f"sqlite:///{folder.path}/agl.db"
    refused(folder, "agl.db", "serve", "--port", "0", "--store", store, code=FAILURE, preexec_fn=files_of_at_most_8_kib)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="/proc is a folder that not even root can write to")
def test_a_folder_that_cannot_be_written_is_one_sentence(project: Folder) -> None:
    refused(project, "/proc", "serve", "--port", "0", "--store", "sqlite:////proc/agl.db", code=FAILURE)
    (project.path / "model").mkdir()
    project.write("model/config.json", '{"model_type": "llama"}')
    project.write("model/model.safetensors", "")
    refused(project, "/proc/runs", "train", "train.toml", "--runs", "/proc/runs", "--store", "memory://", code=FAILURE)
