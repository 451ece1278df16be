"""The candidates of a prompt search with their rewards on each validation task: means and the Pareto front.

Searches drive it. Pure: it asks nobody for anything, and knows neither stores nor models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import fmean

from agentlightning.algorithms.prompts.search import PromptCandidate, RolloutScore


class CandidatePool:
    """Candidates by number, each with its rewards.

    One that lacks a validation task has no mean. Only those that were accepted, the seed among them, can be the best or on
    the front: a high mean alone may be noise.
    """

    def __init__(self, seed: PromptCandidate, val_tasks: int) -> None:
        self.seed = seed
        self.val_tasks = val_tasks
        self.candidates: dict[int, PromptCandidate] = {}
        self.accepted = {seed.number}
        self._rewards: dict[int, dict[int, dict[int, float]]] = {}  # candidate, task, replica
        self.add(seed)

    def add(self, candidate: PromptCandidate) -> None:
        self.candidates[candidate.number] = candidate
        self._rewards.setdefault(candidate.number, {})

    def accept(self, number: int) -> None:
        self.accepted.add(number)

    def record(self, number: int, scores: Iterable[RolloutScore], replica: int = 0) -> None:
        """Add rewards of validation tasks; of the same task and replica the latest counts."""
        for score in scores:
            self._rewards[number].setdefault(score.task, {})[replica] = score.reward

    def rewards(self, number: int) -> dict[int, float]:
        """The reward on each task that has one: the mean over its replicas."""
        return {task: fmean(replicas.values()) for task, replicas in sorted(self._rewards[number].items())}

    def is_whole(self, number: int) -> bool:
        """True where every validation task has a reward."""
        return len(self._rewards[number]) == self.val_tasks

    def mean(self, number: int) -> float | None:
        """The mean reward over the validation tasks; None where one of them has no reward yet."""
        return fmean(self.rewards(number).values()) if self.is_whole(number) else None

    def means(self) -> dict[int, float]:
        """The mean of every candidate that has one."""
        return {number: mean for number in sorted(self.candidates) if (mean := self.mean(number)) is not None}

    def best(self) -> tuple[PromptCandidate, float | None]:
        """The accepted candidate with the highest mean, of equal ones the earliest, and its mean; the seed where none has
        a mean."""
        means = {number: mean for number, mean in self.means().items() if number in self.accepted}
        if not means:
            return self.seed, None
        number = max(means, key=lambda one: (means[one], -one))
        return self.candidates[number], means[number]

    def front(self) -> dict[int, frozenset[int]]:
        """For each validation task the accepted candidates with the highest reward on it, less those that are dominated.

        Agrawal et al. 2025, GEPA, arXiv 2507.19457, Algorithm 2: a candidate is dominated by one that is better on a
        task and worse on none.

        Rewards on two tasks, candidate 0: (1, 0), 1: (0, 1), 2: (1, 1), 3: (0, 0): tasks 0 and 1 both have {2}.
        """
        rewards = {number: self.rewards(number) for number in self.accepted if self.is_whole(number)}
        best = {task: max(one[task] for one in rewards.values()) for task in range(self.val_tasks)} if rewards else {}
        fronts = {task: {number for number, one in rewards.items() if one[task] == top} for task, top in best.items()}
        leading = {number for front in fronts.values() for number in front}
        kept = {one for one in leading if not any(_dominates(rewards[other], rewards[one]) for other in leading)}
        return {task: frozenset(front & kept) for task, front in fronts.items()}

    def front_counts(self) -> dict[int, int]:
        """On how many tasks each candidate of the front is best: the weights by which Algorithm 2 draws a parent."""
        counts = Counter(number for front in self.front().values() for number in front)
        return dict(sorted(counts.items()))


def _dominates(one: Mapping[int, float], other: Mapping[int, float]) -> bool:
    return all(one[task] >= other[task] for task in one) and any(one[task] > other[task] for task in one)
