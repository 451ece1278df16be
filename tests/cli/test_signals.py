"""Runs that a signal ends, and runs that cannot start: what the list of runs then says. Real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.demo import tiny_model

pytestmark = pytest.mark.slow  # each starts a server, a sampler, a learner and a worker

AGENT = """
import asyncio
from pathlib import Path

async def solve(task, llm):
    Path("begun").touch()
    await asyncio.sleep(600)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    tiny_model.build(tmp_path / "model", ["a question"], hidden=16, layers=1)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"question": "a"}\n')
    (tmp_path / "train.toml").write_text(
        '[model]\npath = "model"\n[agent]\nrun = "agent.py:solve"\nworkers = 1\n[data]\ntrain = "tasks.jsonl"\n'
        "[trainer]\nsteps = 1\ntasks_per_step = 1\n"
    )
    return tmp_path


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "agentlightning", *words]


def listed(project: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "AGL_STORE"}
    return subprocess.run(
        command("runs", "list", "--all"), cwd=project, env=environment, capture_output=True, text=True, check=True
    ).stdout


def ended(project: Path, words: tuple[str, ...], number: signal.Signals) -> int:
    """The exit code of a command that gets the signal in mid-rollout."""
    return signalled(command(*words), project, number)[1]


def signalled(program: list[str], project: Path, number: signal.Signals) -> tuple[str, int]:
    """Output and exit code of what gets the signal in mid-rollout, twice where a training would finish its step."""
    with subprocess.Popen(
        program,
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=_heed_hangups,
    ) as child:
        assert child.stdout is not None
        begun = project / "begun"
        subprocess.run(
            ["bash", "-c", f"while [ ! -e {begun} ] && kill -0 {child.pid}; do sleep 0.1; done"],
            check=True,
        )
        child.send_signal(number)
        if "check" not in program and number != signal.SIGKILL:
            next(line for line in child.stdout if "again ends at once" in line)
            child.send_signal(number)
        output = child.stdout.read()
        return output, child.wait()


def _heed_hangups() -> None:
    """Tests may be run under nohup, whose children inherit that the signal is ignored, and programs respect that."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("command_name", "number"),
    [("train", signal.SIGTERM), pytest.param("check", signal.SIGHUP, marks=pytest.mark.long)],
)
def test_a_run_that_a_signal_ends_is_listed_as_interrupted(project: Path, command_name: str, number: signal.Signals):
    assert ended(project, (command_name, "train.toml"), number) == 130
    assert "interrupted" in listed(project)


def test_a_run_that_is_killed_is_listed_so_with_the_line_that_resumes_it(project: Path):
    ended(project, ("train", "train.toml"), signal.SIGKILL)
    (run,) = (path.name for path in (project / "runs").iterdir() if path.is_dir())
    assert f"killed; agl train --resume {run}" in listed(project)


SCRIPT = """
import agentlightning as agl

trainer = agl.Trainer("model", workers=1, steps=1, tasks_per_step=1)
trainer.fit("agent.py:solve", train_dataset="tasks.jsonl")
"""


@pytest.mark.long
def test_a_python_program_that_a_signal_ends_says_how_to_go_on(project: Path):
    (project / "program.py").write_text(SCRIPT)
    output, code = signalled([sys.executable, "program.py"], project, signal.SIGTERM)
    assert code == -signal.SIGINT  # of an interrupt that nobody caught
    [run] = [path.name for path in (project / "runs").iterdir() if path.is_dir()]
    assert f"go on with: agl train --resume {run}" in output
    assert "interrupted" in listed(project)


@pytest.mark.long
def test_a_run_whose_engine_is_late_is_listed_as_failed_and_says_how_to_go_on(project: Path):
    (project / "hangs" / "torch").mkdir(parents=True)
    (project / "hangs" / "torch" / "__init__.py").write_text("import time\n\ntime.sleep(3600)\n")
    late = subprocess.run(
        command("train", "train.toml", "--set", "trainer.start_timeout_s=25"),  # the server, without torch, takes less
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(project / "hangs")},
        capture_output=True,
        text=True,
    )
    assert late.returncode == 1
    assert "is not ready after 25 s; on a busy machine raise trainer.start_timeout_s" in late.stderr
    [run] = [path.name for path in (project / "runs").iterdir() if path.is_dir()]
    assert f"nothing was learned yet; go on with: agl train --resume {run}" in late.stdout
    assert f"failed; agl train --resume {run}" in listed(project)


def test_processes_that_are_late_end_the_run_with_a_sentence_that_names_the_setting(project: Path):
    late = subprocess.run(
        command("train", "train.toml", "--set", "trainer.start_timeout_s=0.2"),
        cwd=project,
        capture_output=True,
        text=True,
    )
    assert late.returncode != 0
    assert "raise trainer.start_timeout_s" in late.stderr
