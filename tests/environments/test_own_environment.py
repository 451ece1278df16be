"""An environment of one's own: what is wrong with it is one sentence, and nothing of it counts as a reward of 0."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

from agentlightning.environments.base import close_environment, episode_result, open_environment, task_rows
from agentlightning.environments.checks import check_rows
from agentlightning.errors import ConfigError, DataError, VerifierError

TASKS = "def tasks(self, split, limit, seed): return [{'n': n, 'split': split} for n in range(limit)]"
PLAY = """
async def play(self, task, llm):
    client = llm.async_openai()
    await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": str(task)}])
    return 1.0
"""


@pytest.fixture
def own(tmp_path: Path) -> Any:
    """Writes a class of these methods; returns its name."""

    def write(*methods: str) -> str:
        body = indent(dedent("\n".join(methods)), "    ") or "    pass"
        (tmp_path / "own.py").write_text(f"class Own:\n{body}\n")
        return f"{tmp_path}/own.py:Own"

    return write


@pytest.mark.parametrize(
    ("methods", "sentence"),
    [
        ([PLAY], "has no method tasks(split, limit, seed)"),
        ([TASKS], "has no method play(task, llm)"),
        ([TASKS, "def play(self, task, llm): return 1.0"], "expected async def play(task, llm), got a plain function"),
        ([TASKS, "async def play(self, task): return 1.0"], "expected a method play(task, llm): too many positional"),
        (["def __init__(self): raise ValueError('no dice')"], "cannot be made: ValueError: no dice"),
    ],
    ids=["no tasks", "no play", "plain play", "play of one argument", "constructor"],
)
def test_a_class_that_is_no_environment_is_refused_before_it_plays(own: Any, methods: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_environment(own(*methods))
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("None", "expected a list of dicts, got None"),
        ("[1]", "expected dicts, got 1"),
        ("[{'x': {1}}]", "expected JSON: "),
    ],
)
def test_tasks_that_are_no_rows_are_refused(own: Any, given: str, sentence: str) -> None:
    environment = open_environment(own(f"def tasks(self, split, limit, seed): return {given}", PLAY))
    with pytest.raises(DataError, match=r"env: tasks\('train'\): ") as refused:
        task_rows(environment, "train", 3, 0)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("played", [None, "good", True, math.nan, math.inf], ids=str)
def test_a_reward_that_is_no_finite_number_is_no_reward(played: Any) -> None:
    with pytest.raises(VerifierError, match="env: play: expected a finite number"):
        episode_result(played)


def test_an_environment_without_close_ends(own: Any) -> None:
    close_environment(open_environment(own(TASKS, PLAY)))


def test_equal_splits_are_refused_with_what_to_do(own: Any) -> None:
    with pytest.raises(DataError, match="let tasks\\('val', …\\) give others"):
        check_rows([{"n": 1}], [{"n": 1}])


@pytest.mark.parametrize(
    ("play", "said", "sentence"),
    [(PLAY, "", "nobody answers"), (PLAY.replace("1.0", "task['x']"), "hi\n", "KeyError: 'x' (at ")],
    ids=["end of input", "its own error"],
)
def test_what_ends_an_episode_of_a_person_is_one_line(own: Any, play: str, said: str, sentence: str) -> None:
    command = [sys.executable, "-m", "agentlightning.environments", own(TASKS, play), "--play", "0"]
    done = subprocess.run(command, input=said, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert sentence in done.stderr
