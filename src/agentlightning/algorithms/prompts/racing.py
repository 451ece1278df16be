"""The loop of the built-in searches: candidates are proposed, race against their parents, and join a pool.

A search scores its start on the validation tasks, then proposes candidates in rounds. A candidate replaces its parent only
if a paired sequential test over the same tasks says that it is better. Whatever ends the search, a spent budget among it,
the best candidate so far is the result. Pure: rollouts and models are behind `SearchRun`.
"""

from __future__ import annotations

import asyncio
import random
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

from pydantic import PositiveInt

from agentlightning.algorithms.prompts.reflection import TriedText, new_text
from agentlightning.algorithms.prompts.search import (
    PromptAlgorithm,
    PromptCandidate,
    RolloutScore,
    ScoreRequest,
    SearchResult,
    SearchRun,
    Split,
)
from agentlightning.algorithms.sequential_tests import sign_test_wealth
from agentlightning.algorithms.settings import check_settings
from agentlightning.errors import BudgetSpentError, DataError, InputError

RACE_ALPHA = 0.1
"""Probability at most that a candidate which is no better than its parent replaces it."""
MAX_RACE_TASKS = 80
"""Tasks of one race, each run by both candidates; those that were run before count, too."""
MAX_QUOTED = 200
"""Characters of an answer that a note repeats."""

Pair = tuple[PromptCandidate, PromptCandidate]
"""A parent and its child."""


class CandidatePool:
    """Candidates by number, each with its rewards.

    Only those that were accepted, the seed among them, can be the best or on the front: a high mean alone may be noise."""

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

    def record(self, number: int, scores: Iterable[RolloutScore], replica: int = 0) -> None:
        for score in scores:
            self._rewards[number].setdefault(score.task, {})[replica] = score.reward

    def rewards(self, number: int) -> dict[int, float]:
        """The reward on each task that has one: the mean over its replicas."""
        return {task: fmean(replicas.values()) for task, replicas in sorted(self._rewards[number].items())}

    def mean(self, number: int) -> float | None:
        """The mean reward over the validation tasks; None where one of them has no reward yet."""
        return fmean(self.rewards(number).values()) if len(self._rewards[number]) == self.val_tasks else None

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
        rewards = {number: self.rewards(number) for number in self.accepted & self.means().keys()}
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


class Race:
    """One candidate against its parent, over tasks in a fixed order, then over further replicas of the same tasks.

    Pairs with equal rewards say nothing. It ends with `accepted` where the wealth reaches 1 / RACE_ALPHA, and without where
    the candidate is behind at the end of a batch, or still not ahead after more tasks than one batch has, or where the
    rollouts that are left could not decide it. Ending it early makes no wrong acceptance, and neither does resuming it
    with what it has counted.
    """

    def __init__(self, parent: PromptCandidate, child: PromptCandidate, order: Sequence[int], batch: int) -> None:
        """order: the validation tasks. batch: tasks between two looks at the test."""
        self.parent = parent
        self.child = child
        self.wins = self.losses = self.ties = 0
        self.accepted: bool | None = None
        """None: not decided yet."""
        self._order = tuple(order)
        self._batch = batch

    def wanted(self) -> tuple[ScoreRequest, ScoreRequest] | None:
        """The next rollouts, of the parent and of the child; None where the race is over."""
        if self.accepted is not None:
            return None
        replica, start = divmod(self._counted(), len(self._order))
        tasks = self._order[start : start + min(self._batch, self._left())]
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
        return sign_test_wealth(self.wins + max(0, self._left()), self.losses) < 1 / RACE_ALPHA

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
        return MAX_RACE_TASKS - self._counted()

    def _decision(self) -> bool | None:
        if sign_test_wealth(self.wins, self.losses) >= 1 / RACE_ALPHA:
            return True
        behind = self.wins < self.losses
        even = self.wins == self.losses and self._counted() > self._batch
        return False if behind or even or self.hopeless else None


@dataclass(frozen=True, kw_only=True)
class RacedSearch(PromptAlgorithm):
    """Base of searches whose candidates race: `propose` makes those of a round, `select` keeps what the next one needs."""

    max_proposals: ClassVar[int] = 200
    """Requests for a new text after which the search ends."""
    patience: ClassVar[int] = 20
    """Tries in a row without a new text that can be used after which the search ends."""

    minibatch: PositiveInt = 4
    """Training tasks that a candidate is made from, and validation tasks between two looks at a race."""
    perfect_reward: float = 1.0
    """Reward that nothing exceeds: a candidate with it on all validation tasks ends the search, a minibatch with it on all
    tasks teaches nothing. Where there is none, a number that is never reached."""

    def __post_init__(self) -> None:
        check_settings(self)

    async def search(self, run: SearchRun, seed: int) -> SearchResult:
        state = SearchState(self, run, seed)
        try:
            await state.score_whole(run.seed)
            while (reason := state.end()) is None:
                await state.race(await self.propose(state))
                self.select(state)
        except BudgetSpentError as spent:
            reason = str(spent)
        return state.result(reason)

    @abstractmethod
    async def propose(self, state: SearchState) -> Sequence[Pair]:
        """The new candidates of a round, each with its parent."""

    def select(self, state: SearchState) -> None:
        """Looks at the pool after a round."""


class SearchState:
    """The candidates, races and random choices of one search."""

    def __init__(self, settings: RacedSearch, run: SearchRun, seed: int) -> None:
        for split in ("train", "val"):
            if run.sizes[split] < 1:
                raise DataError(f"data.{split}: a prompt search needs tasks, got none")
        self.settings = settings
        self.run = run
        self.random = random.Random(seed)
        self.pool = CandidatePool(run.seed, run.sizes["val"])
        self.asked = 0
        """Requests for a new text."""
        self.failed = 0
        """Tries in a row without one that can be used."""
        self.beam = [run.seed]
        """The candidates that apo goes on from."""
        self._races: dict[tuple[int, int], Race] = {}
        self._train_order: list[int] = []

    def end(self) -> str | None:
        """The reason to end now; None: go on."""
        settings = self.settings
        best, mean = self.pool.best()
        if mean is not None and min(self.pool.rewards(best.number).values()) >= settings.perfect_reward:
            return f"Candidate {best.number} earns {mean:g} on every validation task: nothing is left (perfect_reward)."
        if self.failed >= settings.patience:
            return f"{self.failed} tries in a row brought no new text that can be used (patience)."
        if self.asked >= settings.max_proposals:
            return f"All {self.asked} requests for a new text were made (max_proposals)."
        return None

    def result(self, reason: str) -> SearchResult:
        best, mean = self.pool.best()
        return SearchResult(best=best, mean=mean, reason=reason, means=self.pool.means())

    def minibatch(self) -> tuple[int, ...]:
        """The next training tasks: shuffled, every task once before one comes again."""
        if not self._train_order:
            self._train_order = self.random.sample(range(size := self.run.sizes["train"]), size)
        wanted = self.settings.minibatch
        batch, self._train_order = self._train_order[:wanted], self._train_order[wanted:]
        return tuple(batch)

    def teaches_nothing(self, scores: Sequence[RolloutScore]) -> bool:
        """True where every rollout earned all that it could."""
        return all(score.reward >= self.settings.perfect_reward for score in scores)

    async def evaluate(self, wanted: Sequence[ScoreRequest]) -> list[list[RolloutScore]]:
        """The scores of each request; those of validation tasks are in the pool."""
        found = await self.run.evaluate(wanted)
        for request, scores in zip(wanted, found, strict=True):
            if request.split == "val":
                self.pool.add(request.candidate)
                self.pool.record(request.candidate.number, scores, request.replica)
        return found

    async def score(self, candidate: PromptCandidate, split: Split, tasks: Iterable[int]) -> list[RolloutScore]:
        [scores] = await self.evaluate([ScoreRequest(candidate=candidate, split=split, tasks=tuple(tasks))])
        return scores

    async def score_whole(self, candidate: PromptCandidate) -> None:
        """Accept a candidate, score it on all validation tasks, and tell its mean."""
        await self.score(candidate, "val", range(self.run.sizes["val"]))
        self.pool.accepted.add(candidate.number)
        mean = self.pool.mean(candidate.number)
        parents = " and ".join(map(str, candidate.parents))
        origin = f", from {parents}" if parents else ""
        self.run.note(f"Candidate {candidate.number} ({candidate.source}{origin}): validation reward {mean:.3f}.")

    def numbers(self, wanted: int) -> range:
        """Count so many requests for a new text, no more than may be made, and return their numbers."""
        first = self.asked + 1
        self.asked = min(self.asked + wanted, self.settings.max_proposals)
        return range(first, self.asked + 1)

    async def ask(self, prompts: Sequence[str], purpose: str, numbers: Sequence[int]) -> list[str]:
        """The optimiser model's answers, all asked for side by side."""
        asked = [self.run.ask(prompt, purpose, number) for prompt, number in zip(prompts, numbers, strict=True)]
        answers = await asyncio.gather(*asked, return_exceptions=True)  # none goes on once this has returned
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if isinstance(answer, str)]

    async def changed(self, parent: PromptCandidate, name: str, answer: str, source: str) -> PromptCandidate | None:
        """The candidate with the text of an answer in place of the parent's; None, with a note that says why, where it has
        none that can be used."""
        text = new_text(answer)
        if text is None:
            self.failed += 1
            quoted = answer.strip()[:MAX_QUOTED]
            self.run.note(f"The optimiser model's answer has no text between fences, and is left out: {quoted!r}.")
            return None
        return await self.propose({**parent.texts, name: text}, [parent], source)

    async def edited(self, parent: PromptCandidate, name: str, prompt: str, source: str) -> PromptCandidate | None:
        """The candidate that one request leads to, or None as in `changed`."""
        [answer] = await self.ask([prompt], source, self.numbers(1))
        return await self.changed(parent, name, answer, source)

    async def propose(
        self, texts: Mapping[str, str], parents: Sequence[PromptCandidate], source: str
    ) -> PromptCandidate | None:
        """The candidate with these texts; None where it is refused, which a note says, or nothing is open about it."""
        try:
            candidate = await self.run.propose(texts, parents, source)
        except InputError as refused:
            self.failed += 1
            self.run.note(f"A candidate is refused: {refused}")
            return None
        raced = self._races.get((parents[0].number, candidate.number))
        if candidate.number in self.pool.accepted or (raced is not None and raced.hopeless):
            self.failed += 1
            return None
        self.failed = 0
        return candidate

    def tried(self, parent: PromptCandidate, name: str) -> list[TriedText]:
        """The texts that raced against this one, in order."""
        return [
            TriedText(text=race.child.texts[name], wins=race.wins, losses=race.losses, ties=race.ties)
            for race in self._races.values()
            if race.parent.number == parent.number and race.child.texts[name] != parent.texts[name]
        ]

    async def race(self, pairs: Sequence[Pair]) -> list[Race]:
        """Race pairs of parent and child on validation tasks, side by side; those accepted are scored on all of them.

        A pair that raced before goes on with what was counted.
        """
        races = [self._race_of(parent, child) for parent, child in pairs]
        while running := [(race, wanted) for race in races if (wanted := race.wanted()) is not None]:
            found = await self.evaluate([request for _, wanted in running for request in wanted])
            for place, (race, _) in enumerate(running):
                race.record(found[2 * place], found[2 * place + 1])
        for one in races:
            if one.accepted:
                await self.score_whole(one.child)
            else:
                self.run.note(
                    f"Candidate {one.child.number} does not replace {one.parent.number}: {one.sentence()} validation tasks."
                )
        return races

    def _race_of(self, parent: PromptCandidate, child: PromptCandidate) -> Race:
        key = (parent.number, child.number)
        if key not in self._races:
            size = self.run.sizes["val"]
            self._races[key] = Race(parent, child, self.random.sample(range(size), size), self.settings.minibatch)
        self._races[key].resume()
        return self._races[key]
