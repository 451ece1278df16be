"""The benchmark of canaries runs and says what it promises; its last line is counted right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "benchmarks"))

from canary import Trial, summary  # noqa: E402


def test_what_came_before_and_after_a_decision_is_told_apart() -> None:
    trial = Trial(0, {1: 0.75, 2: 0.6})
    trial.decisions.append({"decision": "roll_back", "decided_ns": 100_000_000_000, "put_s": 0.01})
    trial.starts = [(98.0, 1), (99.0, 2), (100.04, 2), (100.5, 1)]
    figures = trial.figures()
    assert (figures["sessions"], figures["canary_sessions"], figures["rollback_s"]) == (2, 1, 0.04)
    equal = {**figures, "canary": 0.75, "decision": "promote", "rollback_s": None}
    last = summary([figures, equal])
    assert (last["detected"], last["false_alarms"], last["promoted"], last["rollback_s"]) == (1, 0, 1, 0.04)


@pytest.mark.slow
def test_a_worse_canary_is_rolled_back_behind_real_gateways() -> None:
    command = [sys.executable, "benchmarks/canary.py", "--quick"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["detected"] == 2
    assert figures["rollback_s"] < 1
    assert (figures["failed_calls"], figures["mixed_sessions"]) == (0, 0)
