"""The pool of candidates: means over validation tasks, lineage, and the Pareto front of GEPA's Algorithm 2."""

from __future__ import annotations

from agentlightning.algorithms.prompts.racing import CandidatePool
from agentlightning.algorithms.prompts.search import PromptCandidate, RolloutScore


def candidate(number: int, *parents: int) -> PromptCandidate:
    return PromptCandidate(number=number, texts={"system": f"text {number}"}, parents=parents)


def pool(*rewards: tuple[float, ...]) -> CandidatePool:
    """Accepted candidates with these rewards on each validation task."""
    made = CandidatePool(candidate(0), len(rewards[0]))
    for number, row in enumerate(rewards):
        made.add(candidate(number))
        made.accepted.add(number)
        made.record(number, [RolloutScore(task=task, reward=reward) for task, reward in enumerate(row)])
    return made


def test_a_candidate_that_was_not_accepted_has_a_mean_and_is_not_the_best() -> None:
    made = pool((0.0, 1.0))
    made.add(candidate(1, 0))
    made.record(1, [RolloutScore(task=task, reward=1.0) for task in range(2)])
    assert made.means() == {0: 0.5, 1: 1.0}
    assert made.best()[0].number == 0
    assert made.front() == {0: {0}, 1: {0}}


def test_a_dominated_candidate_is_not_on_the_front_though_it_is_best_on_a_task() -> None:
    # 0 is best on task 0, as 2 is, and 2 is better on task 1.
    made = pool((1.0, 0.0), (0.0, 1.0), (1.0, 0.5))
    assert made.front() == {0: {2}, 1: {1}}
    assert made.front_counts() == {1: 1, 2: 1}


def test_the_mean_is_over_all_validation_tasks_or_there_is_none() -> None:
    made = CandidatePool(candidate(0), 2)
    made.record(0, [RolloutScore(task=1, reward=1.0)])
    assert made.mean(0) is None
    made.record(0, [RolloutScore(task=0, reward=0.0)])
    assert made.mean(0) == 0.5
