"""How often tasks were solved: never, sometimes, always, with Wilson's intervals, and by the values of a field."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentlightning.analysis.intervals import wilson
from agentlightning.analysis.task_rates import task_rates
from agentlightning.records import Rollout
from build import rollout


def tries(task: dict[str, object], *rewards: float | None, step: int = 1) -> list[Rollout]:
    made = []
    for place, reward in enumerate(rewards):
        state = "failed" if reward is None else "succeeded"
        made.append(rollout(f"{task}-{step}-{place}", reward, task=task, state=state, step=step, cause="policy"))
    return made


def test_tasks_are_told_apart_by_how_often_they_earn_the_highest_reward() -> None:
    easy, middle, hard = {"q": "easy one"}, {"q": "middle one"}, {"q": "hard one"}
    rows = [*tries(easy, 1.0, 1.0), *tries(middle, 0.0, 1.0), *tries(middle, 1.0, 1.0, step=5), *tries(hard, 0.5, None)]
    found = task_rates("run", rows)
    assert [(one.title, one.kind) for one in found.tasks] == [
        ("hard one", "never"),
        ("middle one", "sometimes"),
        ("easy one", "always"),
    ]
    assert found.tasks[1].steps == [(1, 1, 2), (5, 2, 2)]
    assert found.tasks[1].rate == wilson(3, 4)
    assert found.tags[0].tasks == {"never": 1, "sometimes": 1, "always": 1}
    assert found.highest == 1.0


def test_tries_that_say_nothing_about_the_policy_do_not_count() -> None:
    [lost] = tries({"q": "a b"}, None)
    found = task_rates(
        "run", [replace(lost, cause="infra"), replace(lost, state="cancelled"), *tries({"q": "a b"}, 1.0)]
    )
    assert [(one.rate.n, one.kind) for one in found.tasks] == [(1, "always")]


def test_a_task_that_earns_nothing_is_never_solved_where_nothing_else_earns() -> None:
    assert [one.kind for one in task_rates("run", tries({"q": "a b"}, 0.0, 0.0)).tasks] == ["never"]


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"), [(0, 4, 0.0, 0.490), (2, 4, 0.150, 0.850), (8, 8, 0.676, 1.0)]
)
def test_an_interval_of_a_share_is_wilsons(successes: int, count: int, low: float, high: float) -> None:
    found = wilson(successes, count)
    assert (round(found.low, 3), round(found.high, 3)) == (low, high)
