"""The frame of searches whose candidates race: settings that they share, and the state of one search.

A search scores its start on the validation tasks, then makes candidates, each of which races against its parent there.
Whatever ends it, a budget that is spent among them, the best candidate so far is the result.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from agentlightning.algorithms.prompts.candidate_pool import CandidatePool
from agentlightning.algorithms.prompts.races import Race, RaceRule, run_races, sign_test_wealth
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
    max_race_rollouts: Annotated[int, Field(ge=2)] = 96
    """Rollouts of one race at most, those of both candidates together; those that were run before count, too."""
    perfect_reward: float = 1.0
    """Reward that nothing exceeds: a candidate with it on all validation tasks ends the search, a minibatch with it on all
    tasks teaches nothing. Where there is none, a number that is never reached."""
    max_proposals: Annotated[int, Field(ge=1)] = 200
    """Requests for a new text after which the search ends."""
    patience: Annotated[int, Field(ge=1)] = 20
    """Requests in a row without a new text that can be used after which the search ends."""

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
        """Requests in a row without one that can be used."""
        self._known = {run.seed.number}
        self._tried: dict[int, list[tuple[PromptCandidate, TriedText]]] = {}
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
            return f"{self.failed} requests in a row brought no new text that can be used (patience)."
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

    async def ask_for_text(
        self, parent: PromptCandidate, name: str, prompt: str, source: str
    ) -> PromptCandidate | None:
        """A candidate with the optimiser model's new text in place of the parent's; None, with a note that says why, where
        the answer has none that can be used."""
        self.asked += 1
        answer = await self.run.ask(prompt, source, self.asked)
        text = new_text(answer)
        if text is None:
            self.failed += 1
            quoted = answer.strip()[:MAX_QUOTED]
            self.run.note(f"The optimiser model's answer has no text between fences, and is left out: {quoted!r}.")
            return None
        return await self.propose({**parent.texts, name: text}, [parent], source)

    async def propose(
        self, texts: Mapping[str, str], parents: Sequence[PromptCandidate], source: str
    ) -> PromptCandidate | None:
        """The new candidate with these texts; None where it is refused, which a note says, or was there before."""
        try:
            candidate = await self.run.propose(texts, parents, source)
        except InputError as refused:
            self.failed += 1
            self.run.note(f"A candidate is refused: {refused}")
            return None
        if candidate.number in self._known:
            self.failed += 1
            for parent in parents:
                self._proposed_again(parent, candidate)
            return None
        self.failed = 0
        self._known.add(candidate.number)
        return candidate

    def tried(self, parent: PromptCandidate, name: str) -> list[TriedText]:
        """The texts that were compared with this one, in order; one that was proposed again since stands last."""
        return [
            replace(tried, text=child.texts[name])
            for child, tried in self._tried.get(parent.number, [])
            if child.texts[name] != parent.texts[name]
        ]

    def compared(self, parent: PromptCandidate, child: PromptCandidate, wins: int, losses: int, ties: int) -> None:
        """Remember how a child did against its parent, for requests for further texts."""
        told = TriedText(text="", wins=wins, losses=losses, ties=ties)
        self._tried.setdefault(parent.number, []).append((child, told))

    def _proposed_again(self, parent: PromptCandidate, child: PromptCandidate) -> None:
        """Put it last: requests show the latest alone, and a model that is not told would propose it for ever."""
        tried = self._tried.setdefault(parent.number, [])
        found = next((one for one in tried if one[0].number == child.number), None)
        if found is None:
            self.compared(parent, child, wins=0, losses=0, ties=0)
        else:
            tried.remove(found)
            tried.append(found)

    async def race(self, pairs: Sequence[tuple[PromptCandidate, PromptCandidate]]) -> list[Race]:
        """Race pairs of parent and child on validation tasks, side by side; those accepted are scored on all of them."""
        settings, size = self.settings, self.run.sizes["val"]
        rule = RaceRule(alpha=settings.race_alpha, batch=settings.minibatch, max_rollouts=settings.max_race_rollouts)
        races = [Race(parent, child, self.random.sample(range(size), size), rule) for parent, child in pairs]
        await run_races(races, self.evaluate)
        for one in races:
            self.compared(one.parent, one.child, one.wins, one.losses, one.ties)
            if one.accepted:
                await self.score_whole(one.child)
            else:
                self.run.note(
                    f"Candidate {one.child.number} does not replace {one.parent.number}: {one.sentence()} validation tasks."
                )
        return races
