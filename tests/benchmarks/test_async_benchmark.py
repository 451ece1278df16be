"""The benchmark of asynchronous training runs and says what it promises; what is idle is counted right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "benchmarks"))

from async_rl import idle  # noqa: E402


def test_idle_is_the_time_in_which_the_trainer_waits_and_too_few_rollouts_run() -> None:
    waits = [(0.0, 4.0), (10.0, 12.0)]
    running = [(1.0, 3.0), (2.0, 5.0), (2.5, 11.0)]
    assert idle(waits, running, full=1) == pytest.approx(1.0 + 1.0)  # before the first begins, after the last has ended
    assert idle(waits, running, full=2) == pytest.approx(2.0 + 2.0)
    assert idle(waits, running, full=3) == pytest.approx(2.5 + 1.0 + 2.0)


@pytest.mark.slow
@pytest.mark.long
def test_both_ways_train_and_the_last_line_compares_them() -> None:
    command = [sys.executable, "benchmarks/async_rl.py", "--seeds", "1", "--steps", "4", "--longest", "0.5"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures.keys() == {"busy_share", "wall_over_sync", "after_async", "after_sync"}
    assert 0 < figures["busy_share"] <= 1
    assert figures["wall_over_sync"] > 0
    assert 0 < figures["after_async"] <= 1
    assert 0 < figures["after_sync"] <= 1
