"""pass@k and best-of-k are those of the literature, unbiased, with intervals over tasks."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import numpy as np
import pytest

import build
from agentlightning.analysis.pass_at_k import Tries, best_of_k, pass_at_k, pass_rows, read_tries
from agentlightning.errors import InputError


def test_a_hand_worked_case() -> None:
    """Of 5 tries 2 solved: of the 10 pairs 3 have neither, of the 10 triples 1."""
    assert [pass_at_k(5, 2, k) for k in (1, 2, 3, 4)] == pytest.approx([0.4, 0.7, 0.9, 1.0])
    assert pass_at_k(5, 0, 5) == 0.0
    with pytest.raises(InputError, match="k: expected 1 to 5, the tries of the task, got 6"):
        pass_at_k(5, 2, 6)


def test_it_is_the_reference_implementation_of_the_paper() -> None:
    """Chen et al. 2021, figure 3."""

    def reference(n: int, c: int, k: int) -> float:
        if n - c < k:
            return 1.0
        return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))

    for n in (1, 2, 7, 200):
        for c, k in itertools.product({0, 1, n // 2, n}, {1, min(2, n), n}):
            assert pass_at_k(n, c, k) == pytest.approx(reference(n, c, k), abs=1e-12)


def test_both_are_means_over_all_choices_of_k_tries() -> None:
    rewards = [0.0, 0.25, 0.25, 1.0, 0.5]
    for k in range(1, 6):
        choices = list(itertools.combinations(rewards, k))
        assert best_of_k(rewards, k) == pytest.approx(statistics.fmean(map(max, choices)))
        assert best_of_k([0.0, 0.0, 1.0, 0.0, 1.0], k) == pytest.approx(pass_at_k(5, 2, k))


def test_rows_are_of_all_tasks_then_of_each_tag_and_leave_out_tasks_that_were_tried_too_rarely() -> None:
    easy = [Tries(tag="easy", solved=[True] * 4, rewards=[1.0] * 4) for _ in range(3)]
    hard = [Tries(tag="hard", solved=[False] * n, rewards=[0.0] * n) for n in (4, 4, 3)]
    rows = {(row.tag, row.k): row for row in pass_rows([*easy, *hard], 4)}
    assert sorted(rows) == [(tag, k) for tag in ("", "easy", "hard") for k in (1, 2, 4)]
    assert [(rows["", k].tasks, rows["hard", k].tasks) for k in (1, 4)] == [(6, 3), (5, 2)]
    whole, alone = rows["", 1].solved, rows["hard", 4].solved
    assert whole is not None
    assert alone is not None
    assert (whole.value, alone.value, alone.high) == (0.5, 0.0, 0.0)
    assert 0.0 <= whole.low < 0.5 < whole.high <= 1.0


def test_an_interval_over_tasks_covers_the_truth_about_as_often_as_it_says() -> None:
    """Tasks of pass rates drawn from [0, 1]: pass@2 is 1 - E(1 - p)^2 = 2/3."""
    draw, covered = np.random.default_rng(0), 0
    for _ in range(100):
        tasks = [Tries(tag="", solved=list(draw.random(4) < draw.random()), rewards=[0.0] * 4) for _ in range(40)]
        found = pass_rows(tasks, 2)[1].solved
        assert found is not None
        covered += found.low <= 2 / 3 <= found.high
    assert 88 <= covered <= 100


def test_a_task_is_solved_by_the_highest_reward_or_as_its_success_says_and_what_infrastructure_ended_is_no_try() -> (
    None
):
    shared: dict[str, Any] = {"mode": "eval", "state": "succeeded"}
    rollouts = [
        build.rollout(id="a", task={"q": 1, "level": "low"}, reward=1.0, cause="policy", **shared),
        build.rollout(id="b", task={"q": 1, "level": "low"}, reward=0.5, cause="policy", **shared),
        build.rollout(id="c", task={"q": 2, "level": "high"}, cause="agent", mode="eval", state="failed"),
        build.rollout(id="d", task={"q": 2, "level": "high"}, cause="infra", mode="eval", state="failed"),
    ]
    by_reward = read_tries(rollouts, {}, "level")
    assert by_reward == [
        Tries(tag="low", solved=[True, False], rewards=[1.0, 0.5]),
        Tries(tag="high", solved=[False], rewards=[0.0]),
    ]
    assert read_tries(rollouts, {"b": True})[0].solved == [False, True]
    with pytest.raises(InputError, match="--tag: no task has the field 'colour'"):
        read_tries(rollouts, {}, "colour")
    assert math.isclose(pass_rows(by_reward, 1)[0].solved.value, 0.25)  # type: ignore[union-attr]


def test_tags_without_several_tries_are_refused() -> None:
    result = build.agl("eval", "train.toml", "--tag", "level")
    assert str(result.exception) == "--tag: expected --attempts with it"
