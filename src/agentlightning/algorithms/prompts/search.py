"""The interface between a prompt search and what it runs on: candidates, their scores, and the doors to rollouts and models.

The trainer implements `SearchRun` over a store and workers; tests implement it over literals. A search is a deterministic
function of its seed and of what these doors answer. Every answer is recorded under its request before it is given, so that a
search that was killed is run again from its start and finds all it had asked for: resuming needs no state of the algorithm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

Split = Literal["train", "val"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCandidate:
    """One set of texts, a text for each template that is searched."""

    number: int
    """Position in the order of proposals; 0 is what the search started from."""
    texts: Mapping[str, str]
    """By name of the template. Messages are one text each, NAME.0, NAME.1 and so on."""
    parents: tuple[int, ...] = ()
    """Numbers of the candidates it was made from."""
    source: str = "seed"
    """The algorithm and its operation that made it, such as apo edit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutScore:
    """One rollout of one candidate on one task."""

    task: int
    """Position of the task in its split."""
    reward: float
    """0 where the rollout failed."""
    feedback: str = ""
    """Words of the reward function about it."""
    error: str = ""
    """Sentence of the failure; empty where it succeeded."""
    rollout_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The record of a rollout, as text for a model that reflects on it."""

    task: str
    steps: tuple[str, ...]
    """Model calls, tool calls with their results and errors, and spans, in order."""
    score: RolloutScore


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """A request for rollouts: one for each task."""

    candidate: PromptCandidate
    split: Split
    tasks: tuple[int, ...]
    replica: int = 0
    """Further rollouts of the same task have replicas of their own."""


class SearchRun(Protocol):
    """Rollouts, models and the record of one search. Every method may raise BudgetSpentError, before anything is spent."""

    sizes: Mapping[Split, int]
    """Number of tasks in each split."""
    seed: PromptCandidate
    """Start of the search, candidate 0."""

    async def propose(
        self, texts: Mapping[str, str], parents: Sequence[PromptCandidate], source: str
    ) -> PromptCandidate:
        """Record a candidate and return it; the one that has these texts already, where there is one.

        InputError, a sentence, where a text is no template or its placeholders are others than the parent's: the refusal is
        recorded, and the search goes on without it.
        """

    async def evaluate(self, wanted: Sequence[ScoreRequest]) -> list[list[RolloutScore]]:
        """The scores of each request, tasks in the order given; all its rollouts run side by side.

        A rollout that was run before costs nothing. BudgetSpentError where the rest would pass the budget of rollouts.
        """

    async def traces(self, scores: Sequence[RolloutScore]) -> list[Trace]:
        """The records of the rollouts of these scores, in their order."""

    async def ask(self, prompt: str, purpose: str, number: int = 0) -> str:
        """The optimiser model's answer.

        `purpose` names the request in the record; equal prompts with other numbers are asked again. AgentLightningError
        where the model stays away after retries.
        """

    def note(self, sentence: str) -> None:
        """Tell the person who watches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The end of a search."""

    best: PromptCandidate
    """By its mean over the validation tasks that count; the seed where nothing is better."""
    mean: float | None
    """Its mean reward over them; None where the budget ended before any was scored whole."""
    reason: str
    """Sentence that says why it ended."""
    means: Mapping[int, float] = field(default_factory=dict)
    """Mean validation reward of every candidate that was scored over all validation tasks, by number."""


@dataclass(frozen=True, kw_only=True)
class PromptAlgorithm(ABC):
    """A search over prompts.

    A subclass is a frozen dataclass whose fields are the settings of ``[algorithm]``, checked as it is made
    (`algorithms.settings.check_settings`).
    """

    name: ClassVar[str]

    @abstractmethod
    async def search(self, run: SearchRun, seed: int) -> SearchResult:
        """Search until the budget is spent or the algorithm is done. `seed` makes every choice of its own repeatable."""
