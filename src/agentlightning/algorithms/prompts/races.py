"""Races: a candidate replaces another only where a paired test over the same tasks says that it is better.

The searches drive them. A race is pure: it says which rollouts it wants next and is told their rewards; it may be stopped
at any moment, and looked at after every batch, without a wrong decision becoming more likely.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from agentlightning.algorithms.prompts.search import PromptCandidate, RolloutScore, ScoreRequest
from agentlightning.algorithms.sequential_tests import sign_test_wealth


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceRule:
    """The bounds of a race."""

    alpha: float
    """Probability at most that a candidate which is no better replaces its parent."""
    batch: int
    """Tasks between two looks at the test."""
    max_rollouts: int
    """Of both candidates together."""


class Race:
    """One candidate against its parent, over tasks in a fixed order, then over further replicas of the same tasks.

    Pairs with equal rewards say nothing. It ends with `accepted` where the wealth reaches 1 / alpha, and without where
    the candidate is behind at the end of a batch, or still not ahead after more tasks than one batch has, or where the
    rollouts that are left could not decide it. Ending it early makes no wrong acceptance, and neither does resuming it
    with what it has counted.
    """

    def __init__(self, parent: PromptCandidate, child: PromptCandidate, order: Sequence[int], rule: RaceRule) -> None:
        self.parent = parent
        self.child = child
        self.wins = self.losses = self.ties = 0
        self.accepted: bool | None = None
        """None: not decided yet."""
        self._order = tuple(order)
        self._rule = rule

    def wanted(self) -> tuple[ScoreRequest, ScoreRequest] | None:
        """The next rollouts, of the parent and of the child; None where the race is over."""
        if self.accepted is not None:
            return None
        replica, start = divmod(self._counted(), len(self._order))
        tasks = self._order[start : start + min(self._rule.batch, self._left())]
        parent, child = (
            ScoreRequest(candidate=one, split="val", tasks=tasks, replica=replica) for one in (self.parent, self.child)
        )
        return parent, child

    def record(self, parent: Sequence[RolloutScore], child: Sequence[RolloutScore]) -> None:
        """Count the batch that was wanted, and decide."""
        for before, after in zip(parent, child, strict=True):
            self.wins += after.reward > before.reward
            self.losses += after.reward < before.reward
            self.ties += after.reward == before.reward
        self.accepted = self._decision()

    @property
    def hopeless(self) -> bool:
        """True where not even wins on all tasks that are left would decide it."""
        return sign_test_wealth(self.wins + max(0, self._left()), self.losses) < 1 / self._rule.alpha

    def resume(self) -> None:
        """Go on where it was left, unless it is decided or hopeless."""
        if self.accepted is False and not self.hopeless:
            self.accepted = None

    def sentence(self) -> str:
        """The count, in words."""
        return f"better on {self.wins}, worse on {self.losses}, equal on {self.ties}"

    def _counted(self) -> int:
        return self.wins + self.losses + self.ties

    def _left(self) -> int:
        return self._rule.max_rollouts // 2 - self._counted()

    def _decision(self) -> bool | None:
        if sign_test_wealth(self.wins, self.losses) >= 1 / self._rule.alpha:
            return True
        behind = self.wins < self.losses
        even = self.wins == self.losses and self._counted() > self._rule.batch
        return False if behind or even or self.hopeless else None


Evaluate = Callable[[Sequence[ScoreRequest]], Awaitable[list[list[RolloutScore]]]]


async def run_races(races: Sequence[Race], evaluate: Evaluate) -> None:
    """Run races to their ends; the next batches of all that are undecided run side by side."""
    while running := [(race, wanted) for race in races if (wanted := race.wanted()) is not None]:
        found = await evaluate([request for _, wanted in running for request in wanted])
        for place, (race, _) in enumerate(running):
            race.record(found[2 * place], found[2 * place + 1])
