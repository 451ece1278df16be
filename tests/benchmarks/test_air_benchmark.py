"""The benchmark of AIR runs and says what it promises; a curve's step to a goal is read right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "benchmarks"))

from air import Curve, summary  # noqa: E402

RISING = Curve([(0, 0.2), (2, 0.4), (4, 0.8), (6, 0.6), (8, 0.9)], {})
FLAT = Curve([(0, 0.2), (8, 0.3)], {})


def test_a_goal_is_reached_where_the_curve_first_crosses_it() -> None:
    assert RISING.steps_to(0.6) == pytest.approx(3.0)
    assert RISING.steps_to(0.2) == 0.0
    assert FLAT.steps_to(0.6) is None


def test_a_run_that_never_reaches_the_goal_counts_with_its_last_step() -> None:
    figures = summary({"without": [FLAT, FLAT, RISING], "with": [RISING, RISING, FLAT]}, 0.6)
    assert (figures["steps_without"], figures["steps_with"]) == (8.0, pytest.approx(3.0))
    assert (figures["reached_without"], figures["reached_with"]) == (1, 2)
    assert figures["with_over_without"] == 0.38
    assert figures["after_with"] == pytest.approx(0.7)
    assert figures["others"]["0.8"]["steps_with"] == pytest.approx(4.0)


@pytest.mark.slow
@pytest.mark.long
def test_both_ways_train_and_the_last_line_compares_them() -> None:
    command = [sys.executable, "benchmarks/air.py", "--seeds", "1", "--steps", "2", "--tasks", "4", "--held-out", "48"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["steps_with"] <= 2
    assert 0 < figures["after_with"] <= 1
    assert 0 < figures["after_without"] <= 1
