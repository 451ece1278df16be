"""The kind verifiers: what it makes of folders and episodes; and, in its own Python, the contract and a training run."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_training import agl, train

from agentlightning.environments.packages import install, interpreter
from agentlightning.environments.verifiers import episode_result, find_package
from agentlightning.errors import AgentLightningError, ConfigError, InfrastructureError, VerifierError
from agentlightning.testing.contract_model import write_contract_model

TASKSET = """
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def exact(self, trace: vf.Trace) -> float:
        if self.data.answer == "broken":
            raise ValueError("the scorer is broken")
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class SumConfig(vf.TasksetConfig):
    num_tasks: int = 40
    broken: bool = False


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for number in range(self.config.num_tasks):
            answer = "broken" if self.config.broken else str(2 * number)
            yield SumTask(SumData(prompt=f"{number}+{number}=?", answer=answer), self.config.task)


__all__ = ["SumTaskset"]
"""
SUITE = """
import pytest
from agentlightning.testing.environment_contract import *

@pytest.fixture
def environment_name():
    return {name!r}

@pytest.fixture
def answers():
    return lambda request: "It is 4."

@pytest.fixture
def at_once():
    return 4
"""


def write_taskset(folder: Path) -> str:
    """A project with a package of sums; returns its environment's name."""
    package = folder / "my-sums" / "my_sums"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(TASKSET)
    return f"verifiers:{package.parent}"


def test_a_taskset_is_the_package_of_its_folder(tmp_path: Path) -> None:
    package = tmp_path / "my-sums" / "src" / "my_sums"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    found = (str(package.parent), "my_sums")
    assert [find_package(str(folder)) for folder in (tmp_path / "my-sums", package)] == [found, found]
    assert find_package("gsm8k-v1") == (None, "gsm8k-v1")


@pytest.mark.parametrize(
    ("taskset", "sentence"), [(".", "expected a folder with one package, found none"), ("./nowhere", "no such folder")]
)
def test_a_folder_without_a_taskset_gets_a_sentence(
    taskset: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        find_package(taskset)


def test_verifiers_that_is_not_installed_is_said_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="verifiers is not installed; install it with: agl env install verifiers"):
        interpreter("verifiers")


def episode(error: tuple[str, str] | None = None, **trace: Any) -> SimpleNamespace:
    """An episode of verifiers with one trace."""
    errors = [SimpleNamespace(type=error[0], message=error[1])] if error else []
    given = {
        "rewards": {},
        "metrics": {},
        "reward": 0.0,
        "is_truncated": False,
        "ok": not errors,
        "errors": errors,
    } | trace
    return SimpleNamespace(errors=[], traces=[SimpleNamespace(**given)])


def test_rewards_and_metrics_are_recorded_by_name() -> None:
    rewards = {"exact": SimpleNamespace(score=1.0), "style": SimpleNamespace(score=0.5), "unscored": None}
    result = episode_result(episode(rewards=rewards, metrics={"turns": 3.0, "unscored": None}, reward=1.25))
    assert (result.reward, result.success) == (1.25, None)
    assert result.metrics == {"exact": 1.0, "style": 0.5, "turns": 3.0, "truncated": 0.0}


def test_a_full_context_ends_an_episode_and_is_no_failure() -> None:
    full = ("ProviderError", "HTTP 400: {'error': {'code': 'context_length_exceeded'}}")
    result = episode_result(episode(full, rewards={"exact": None}))
    assert (result.reward, result.metrics) == (0.0, {"truncated": 1.0})


@pytest.mark.parametrize(
    ("played", "kind", "sentence"),
    [
        (
            episode(("TaskError", "reward exact: ValueError: x")),
            VerifierError,
            "TaskError: reward exact: ValueError: x",
        ),
        (episode(("SandboxError", "no space")), InfrastructureError, "SandboxError: no space"),
        (episode(("ProviderError", "HTTP 503")), InfrastructureError, "ProviderError: HTTP 503"),
        (episode(), VerifierError, "the taskset gave no reward"),
        (SimpleNamespace(errors=[], traces=[]), InfrastructureError, "expected one agent in an episode, got 0"),
    ],
)
def test_a_failure_of_an_episode_is_no_reward_of_0(
    played: SimpleNamespace, kind: type[AgentLightningError], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        episode_result(played)


@pytest.mark.slow
@pytest.mark.long
def test_the_contract_in_its_own_python(tmp_path: Path) -> None:
    python = str(install("verifiers", print) / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"pytest=={version('pytest')}"], check=True)
    suite = tmp_path / "test_contract.py"
    suite.write_text(SUITE.format(name=write_taskset(tmp_path)))
    command = [python, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", str(suite)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "5 passed" in done.stdout, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.long
def test_it_is_checked_trains_two_steps_and_a_broken_scorer_is_said(tmp_path: Path) -> None:
    install("verifiers", print)
    name = write_taskset(tmp_path)
    assert "can be trained on" in agl(tmp_path, "env", "check", f"{name}?num_tasks=20")
    rows = train(tmp_path, write_contract_model(tmp_path / "model", context=4096), name)
    assert [row["rollout/failed"] for row in rows if row["kind"] == "step"] == [0, 0]
    with pytest.raises(AssertionError, match="the scorer is broken"):
        agl(tmp_path, "env", "check", f"{name}?broken=true")
