"""Races: their error under the null with a look after every batch, and their bounds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product

import pytest

from agentlightning.algorithms.prompts import racing
from agentlightning.algorithms.prompts.racing import Race
from agentlightning.algorithms.prompts.search import PromptCandidate, RolloutScore

PARENT = PromptCandidate(number=0, texts={"system": "old"})
CHILD = PromptCandidate(number=1, texts={"system": "new"}, parents=(0,))
BATCH = 4


def scores(rewards: Sequence[float]) -> list[RolloutScore]:
    return [RolloutScore(task=task, reward=reward) for task, reward in enumerate(rewards)]


def race(order: int = 100, batch: int = BATCH) -> Race:
    return Race(PARENT, CHILD, range(order), batch)


def run(one: Race, differences: Sequence[float]) -> Race:
    """Feeds the race these differences of reward until it is over or they are used up."""
    left = list(differences)
    while left and (wanted := one.wanted()) is not None:
        size = len(wanted[0].tasks)
        batch, left = left[:size], left[size:]
        one.record(scores([0.0] * size), scores(batch))
    return one


def test_a_race_between_equals_is_seldom_won_exactly_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every outcome of a race of 20 pairs in batches of 2: a pair is a win, a loss or equal with probability 1/4, 1/4, 1/2.
    monkeypatch.setattr(racing, "RACE_ALPHA", 0.2)
    monkeypatch.setattr(racing, "MAX_RACE_TASKS", 20)
    chances = {1.0: 0.25, -1.0: 0.25, 0.0: 0.5}

    @cache
    def accepted(wins: int, losses: int, ties: int) -> float:
        total = 0.0
        for first, second in product(chances, repeat=2):
            one = race(batch=2)
            one.wins, one.losses, one.ties = wins, losses, ties
            one.record(scores([0.0, 0.0]), scores([first, second]))
            after = accepted(one.wins, one.losses, one.ties) if one.accepted is None else float(one.accepted)
            total += chances[first] * chances[second] * after
        return total

    assert 0 < accepted(0, 0, 0) <= 0.2


@pytest.mark.parametrize(
    ("differences", "accepted"),
    [
        ([1.0] * 4, None),
        ([1.0] * 8, True),  # five wins without a loss decide at a tenth
        ([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0], True),  # equal rewards decide nothing
        ([1.0, -1.0, -1.0, 0.0], False),  # behind after one batch
        ([0.0] * 4, None),
        ([0.0] * 8, False),  # no different after two
    ],
)
def test_a_race_is_decided_by_wins_and_losses(differences: list[float], accepted: bool | None) -> None:
    assert run(race(), differences).accepted is accepted


def test_a_race_ends_where_the_rollouts_that_are_left_cannot_decide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(racing, "MAX_RACE_TASKS", 7)
    assert run(race(), [1.0, 0.0, 0.0, 0.0]).accepted is False  # 5 wins would be needed, 3 pairs are left


def test_both_run_on_the_same_tasks_and_tasks_come_again_as_further_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(racing, "RACE_ALPHA", 0.01)
    one = Race(PARENT, CHILD, [2, 0, 1], 2)
    seen = []
    for _ in range(4):
        wanted = one.wanted()
        assert wanted is not None
        before, after = wanted
        assert (before.candidate, after.candidate) == (PARENT, CHILD)
        assert (before.tasks, before.replica, before.split) == (after.tasks, after.replica, "val")
        seen.append((before.tasks, before.replica))
        one.record(scores([0.0] * len(before.tasks)), scores([1.0] * len(before.tasks)))
    assert seen == [((2, 0), 0), ((1,), 0), ((2, 0), 1), ((1,), 1)]


def test_a_race_that_is_resumed_goes_on_with_what_it_counted_and_one_that_is_hopeless_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = run(race(), [1.0, -1.0, -1.0, 0.0])
    one.resume()
    run(one, [1.0] * 24)
    assert one.accepted
    assert one.losses == 2

    monkeypatch.setattr(racing, "MAX_RACE_TASKS", 7)
    short = run(race(), [1.0, 0.0, 0.0, 0.0])
    short.resume()
    assert short.accepted is False
