"""The frame of searches whose candidates race: settings that they share, and the state of one search.

A search scores its start on the validation tasks, then makes candidates, each of which races against its parent there.
Whatever ends it, a budget that is spent among them, the best candidate so far is the result.
"""

from __future__ import annotations

import asyncio
import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from agentlightning.algorithms.prompts.candidate_pool import CandidatePool
from agentlightning.algorithms.prompts.races import Race, RaceRule, run_races
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
from agentlightning.errors import BudgetSpentError, ConfigError, DataError, InputError

MAX_QUOTED = 200
"""Characters of an answer that a note repeats."""


@dataclass(frozen=True, kw_only=True)
class RacedSearch(PromptAlgorithm):
    """Settings of every search whose candidates race."""

    minibatch: Annotated[int, Field(ge=1)] = 4
    """Training tasks that a candidate is made from, and validation tasks between two looks at a race."""
    race_alpha: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Probability at most that a candidate which is no better than its parent replaces it."""
    max_race_rollouts: Annotated[int, Field(ge=2)] = 160
    """Rollouts of one race at most, those of both candidates together; those that were run before count, too."""
    perfect_reward: float = 1.0
    """Reward that nothing exceeds: a candidate with it on all validation tasks ends the search, a minibatch with it on all
    tasks teaches nothing. Where there is none, a number that is never reached."""
    max_proposals: Annotated[int, Field(ge=1)] = 200
    """Requests for a new text after which the search ends."""
    patience: Annotated[int, Field(ge=1)] = 20
    """Tries in a row without a new text that can be used after which the search ends."""

    def __post_init__(self) -> None:
        check_settings(self)
        if sign_test_wealth(self.max_race_rollouts // 2, 0) * self.race_alpha < 1:
            raise ConfigError(
                f"algorithm.max_race_rollouts: expected enough for race_alpha = {self.race_alpha:g}, got "
                f"{self.max_race_rollouts}: a candidate that is better on every task could not win"
            )

    async def search(self, run: SearchRun, seed: int) -> SearchResult:
        state = SearchState(self, run, seed)
        try:
            await state.start()
            reason = await self.improve(state)
        except BudgetSpentError as spent:
            reason = str(spent)
        return state.result(reason)

    @abstractmethod
    async def improve(self, state: SearchState) -> str:
        """Make candidates until there is a reason to end, and return it as a sentence. BudgetSpentError goes through."""


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
        self._races: dict[tuple[int, int], Race] = {}
        self._train_order: list[int] = []

    async def start(self) -> None:
        """Score the seed on all validation tasks."""
        await self.score_whole(self.run.seed)

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
        counts = self.pool.front_counts()
        if len(counts) > 1:
            leading = ", ".join(f"{number} on {count}" for number, count in counts.items())
            self.run.note(f"Candidates that are best on validation tasks (Pareto front): {leading}.")
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

    async def score(self, candidate: PromptCandidate, split: Split, tasks: Sequence[int]) -> list[RolloutScore]:
        [scores] = await self.evaluate([ScoreRequest(candidate=candidate, split=split, tasks=tuple(tasks))])
        return scores

    async def score_whole(self, candidate: PromptCandidate) -> None:
        """Accept a candidate, score it on all validation tasks, and tell its mean."""
        await self.score(candidate, "val", range(self.run.sizes["val"]))
        self.pool.accept(candidate.number)
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

    async def race(self, pairs: Sequence[tuple[PromptCandidate, PromptCandidate]]) -> list[Race]:
        """Race pairs of parent and child on validation tasks, side by side; those accepted are scored on all of them.

        A pair that raced before goes on with what was counted.
        """
        races = [self._race_of(parent, child) for parent, child in pairs]
        await run_races(races, self.evaluate)
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
            settings, size = self.settings, self.run.sizes["val"]
            rule = RaceRule(
                alpha=settings.race_alpha, batch=settings.minibatch, max_rollouts=settings.max_race_rollouts
            )
            self._races[key] = Race(parent, child, self.random.sample(range(size), size), rule)
        self._races[key].resume()
        return self._races[key]
