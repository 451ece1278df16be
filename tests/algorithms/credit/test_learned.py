from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from credit_trajectories import trajectory

from agentlightning.algorithms.credit import CREDIT, Evidence
from agentlightning.errors import AgentError
from agentlightning.training_types import Trajectory


def values(groups: list[list[Trajectory]], **settings: Any) -> Any:
    rule = CREDIT["learned"]
    credits = rule.credits(groups, Evidence(), rule.settings(settings))
    return [[one.values for one in group] for group in credits]


def lottery(seed: int, count: int = 8, calls: int = 4) -> list[Trajectory]:
    """Rollouts of calls with two actions each; the second call alone decides."""
    draw = random.Random(seed)
    rows = ["".join(draw.choice("xy") for _ in range(calls)) for _ in range(count)]
    return [trajectory(f"{seed}-{index}", float(row[1] == "x"), row, states="0123") for index, row in enumerate(rows)]


def test_one_call_that_tells_all_is_credited_with_all() -> None:
    group = [trajectory("a", 1.0, "1"), trajectory("b", 0.0, "2")]
    [[first, second]] = values([group])
    assert (first, second) == ([pytest.approx(0.5)], [pytest.approx(-0.5)])


def test_credits_add_up_to_what_the_rollout_was_better_by() -> None:
    group = lottery(1)
    mean = statistics.mean(one.reward for one in group)
    [rows] = values([group])
    assert [sum(row) for row in rows] == pytest.approx([one.reward - mean for one in group])


def test_the_call_that_decides_gets_the_credit() -> None:
    groups = [lottery(seed) for seed in range(16)]
    rows = [row for group in values(groups) for row in group]
    by_call = [statistics.fmean(abs(row[place]) for row in rows) for place in range(4)]
    assert by_call[1] > 5 * max(by_call[0], by_call[2], by_call[3])


def test_a_feature_function_that_fails_is_named(tmp_path: Path) -> None:
    file = tmp_path / "broken_features.py"
    file.write_text("def broken(transition):\n    return {'x': float('nan')}\n")
    with pytest.raises(AgentError, match=r"broken_features\.py:broken': expected finite numbers"):
        values([[trajectory("a", 1.0, "x")]], features=f"{file}:broken")
