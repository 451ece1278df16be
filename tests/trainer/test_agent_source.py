"""What would fail once an agent or a reward function runs is seen in its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentlightning.config.run import Config, parse_settings
from agentlightning.errors import AgentError, AgentLightningError, ConfigError
from agentlightning.trainer.agent_source import alarm_warning, check_source


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import signal\ndef solve(task, llm):\n    signal.alarm(5)\n", "calls signal.alarm"),
        (
            "import signal as s\ndef limit():\n    s.setitimer(0, 1)\ndef solve(task, llm):\n    limit()\n",
            "s.setitimer",
        ),
        ("def solve(task, llm):\n    from signal import alarm as ring\n    ring(5)\n", "calls ring"),
        ("from math_verify import parse\ndef solve(task, llm):\n    return parse('1')\n", "calls parse"),
        ("import math_verify\ndef solve(task, llm):\n    math_verify.verify(1, 1)\n", "calls math_verify.verify"),
        (
            "from math_verify import parse\ndef solve(task, llm):\n    return parse('1', parsing_timeout=None)\n",
            None,
        ),
        ("import signal\nasync def solve(task, llm):\n    signal.alarm(5)\n", None),
        ("import signal\ndef reward(task, result):\n    signal.alarm(5)\ndef solve(task, llm):\n    return 1\n", None),
        ("def parse(x):\n    return x\ndef solve(task, llm):\n    return parse('1')\n", None),
        ("def solve(", None),
    ],
)
def test_an_alarm_of_a_plain_agent_is_named_before_it_runs(source: str, said: str | None, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(source)
    found = alarm_warning(f"{tmp_path}/agent.py:solve")
    assert (found is None) is (said is None)
    assert found is None or (said is not None and said in found and "agent.command" in found)


def test_an_agent_without_a_file_is_not_read() -> None:
    assert [alarm_warning(one) for one in (None, "nowhere.at.all:solve", "gone.py:solve")] == [None] * 3


def config(agent: str, **settings: object) -> Config:
    tables = {"model": {"path": "m"}, "agent": {"run": agent, **settings}, "data": {"train": "t.jsonl"}}
    return parse_settings(Config, tables, "test")


FOUND = """
import neighbour
async def solve(task, llm): ...
class Scorer:
    @staticmethod
    def score(task, result): ...
"""


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("def solved(task, llm): ...\n", ConfigError, "there is no 'solve'; there are solved"),
        ("import nowhere_to_be_found.at_all\n", AgentError, "there is no module 'nowhere_to_be_found', imported at"),
        ("def solve(\n", AgentError, "cannot be imported: SyntaxError"),
        (FOUND, None, ""),
        ("from neighbour import *\n", None, ""),
        ("from neighbour import solve\n", None, ""),
        ("solve = wrapped = len\n", None, ""),
        ("if True:\n    def solve(task, llm): ...\n", None, ""),
        ("import sys\nsys.path.append('lib')\nimport of_that_folder\ndef solve(task, llm): ...\n", None, ""),
        ("def __getattr__(name): ...\n", None, ""),
        ("import neighbour\nimport of_a_folder_that_it_added\ndef solve(task, llm): ...\n", None, ""),
    ],
)
def test_code_that_cannot_be_imported_is_named_before_a_model_loads(
    source: str, error: type[AgentLightningError] | None, said: str, tmp_path: Path
) -> None:
    (tmp_path / "neighbour.py").write_text("")
    (tmp_path / "agent.py").write_text(source)
    name = f"{tmp_path}/agent.py:solve"
    if error is None:
        check_source(config(name))
        return
    with pytest.raises(error, match=said):
        check_source(config(name))


def test_reward_functions_are_read_too_and_code_elsewhere_is_not(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(FOUND)
    (tmp_path / "neighbour.py").write_text("")
    name = f"{tmp_path}/agent.py"
    check_source(config(f"{name}:solve", reward=f"{name}:Scorer.score"))
    with pytest.raises(ConfigError, match=r"reward function '.*:score': there is no 'score'; there are Scorer, solve"):
        check_source(config(f"{name}:solve", reward=f"{name}:score"))
    with pytest.raises(ConfigError, match=r"agent file 'gone\.py' does not exist"):
        check_source(config("gone.py:solve"))
    check_source(config("gone.py:solve", workers=0))
