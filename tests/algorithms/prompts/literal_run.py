"""A search run over literals: rewards follow from the words of the texts, and every answer is recorded under its request."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentlightning.algorithms.prompts.racing import RacedSearch
from agentlightning.algorithms.prompts.search import PromptCandidate, RolloutScore, ScoreRequest, Split, Trace
from agentlightning.errors import BudgetSpentError, InputError
from agentlightning.runtime.code_loader import load_file

REPOSITORY = Path(__file__).parents[3]
ScriptedOptimiser = load_file(REPOSITORY / "examples" / "optimize" / "scripted.py", "writer").ScriptedOptimiser
RandomSearch: type[RacedSearch] = load_file(
    REPOSITORY / "benchmarks" / "learning" / "random_search.py", "control"
).RandomSearch


def bounded(kind: type[RacedSearch], patience: int = 20, max_proposals: int = 200, **settings: Any) -> RacedSearch:
    """The search with other bounds on its tries."""
    own = type(kind.__name__, (kind,), {"patience": patience, "max_proposals": max_proposals})
    made: RacedSearch = own(**settings)
    return made


Optimiser = Callable[[str, str, int], Awaitable[str]]
Rewards = Callable[[Mapping[str, str], Split, int, int], tuple[float, str, str]]
"""From texts, split, task and replica: reward, feedback and error."""

SEED_TEXT = "Answer {question}. Be creative."
GOOD = ("Reply in valid json.", "Read the schema first.", "State every unit.")
_NOUNS = (
    "budget tone order clock weather title margin colour summary index author reader cover chapter footer header "
    "garden river window bridge market kitchen forest island harbour castle village mountain"
)
IDLE = tuple(f"Mind the {noun}." for noun in _NOUNS.split())
GRAMMAR = {"add": [*GOOD, *IDLE], "drop": ["Be creative."]}
COMPLAINTS = (
    "The output was no valid json.",
    "The schema had not been read.",
    "A unit is missing.",
    "Too creative for a fact.",
)


def planted(texts: Mapping[str, str], split: Split, task: int, replica: int) -> tuple[float, str, str]:
    """Every fourth task fails without one of the good sentences, and every fourth with the creative one."""
    kind = task % 4
    text = " ".join(texts.values())
    good = "creative" not in text if kind == 3 else GOOD[kind] in text
    return (1.0, "", "") if good else (0.0, COMPLAINTS[kind], "")


class LiteralRun:
    """Implements `SearchRun`. With the `record` of an earlier run it answers from that and counts only what is new."""

    def __init__(
        self,
        rewards: Rewards = planted,
        optimiser: Optimiser | None = None,
        *,
        texts: Mapping[str, str] | None = None,
        sizes: tuple[int, int] = (24, 16),
        rollouts: int | None = None,
        requests: int | None = None,
        record: dict[Any, Any] | None = None,
    ) -> None:
        self.sizes: Mapping[Split, int] = {"train": sizes[0], "val": sizes[1]}
        self.seed = PromptCandidate(number=0, texts=texts or {"system": SEED_TEXT})
        self.rewards = rewards
        self.optimiser = optimiser or ScriptedOptimiser(GRAMMAR)
        self.rollouts = rollouts
        self.requests = requests
        self.record = {} if record is None else record
        self.candidates = [self.seed]
        self.log: list[Any] = []
        self.notes: list[str] = []
        self.new = 0
        """Requests that no record had."""
        self.spent = 0
        """Rollouts that no record had."""

    async def propose(
        self, texts: Mapping[str, str], parents: Sequence[PromptCandidate], source: str
    ) -> PromptCandidate:
        self._count(("propose", tuple(sorted(texts.items())), source))
        for known in self.candidates:
            if known.texts == texts:
                return known
        for name, text in texts.items():
            wanted, given = (set(re.findall(r"{\w+}", one)) for one in (self.seed.texts[name], text))
            if wanted != given:
                raise InputError(f"prompts.templates.{name}: expected the placeholders {sorted(wanted)}")
        number = len(self.candidates)
        parent_numbers = tuple(parent.number for parent in parents)
        self.candidates.append(PromptCandidate(number=number, texts=texts, parents=parent_numbers, source=source))
        return self.candidates[number]

    async def evaluate(self, wanted: Sequence[ScoreRequest]) -> list[list[RolloutScore]]:
        keys = [
            [(tuple(sorted(one.candidate.texts.items())), one.split, task, one.replica) for task in one.tasks]
            for one in wanted
        ]
        self._count(("evaluate", tuple(key for request in keys for key in request)))
        new = {key for request in keys for key in request if key not in self.record}
        if self.rollouts is not None and self.spent + len(new) > self.rollouts:
            raise BudgetSpentError(f"The budget of {self.rollouts} rollouts is spent.")
        self.spent += len(new)
        for key in new:
            texts, split, task, replica = key
            reward, feedback, error = self.rewards(dict(texts), split, task, replica)
            self.record[key] = RolloutScore(task=task, reward=reward, feedback=feedback, error=error)
        return [[self.record[key] for key in request] for request in keys]

    async def traces(self, scores: Sequence[RolloutScore]) -> list[Trace]:
        self._count(("traces", tuple(score.task for score in scores)))
        return [Trace(task=f"task {score.task}", steps=("assistant: a fact",), score=score) for score in scores]

    async def ask(self, prompt: str, purpose: str, number: int = 0) -> str:
        key = ("ask", prompt, purpose, number)
        self._count(key)
        if key not in self.record:
            self.new += 1
            self.record[key] = await self.optimiser(prompt, purpose, number)
        answer: str = self.record[key]
        return answer

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)

    def _count(self, request: Any) -> None:
        if self.requests is not None and len(self.log) >= self.requests:
            raise BudgetSpentError(f"The budget of {self.requests} requests is spent.")
        self.log.append(request)
