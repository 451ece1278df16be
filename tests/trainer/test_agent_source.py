"""Alarms that a plain agent function sets are seen in its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentlightning.trainer.agent_source import alarm_warning


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
