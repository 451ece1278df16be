"""Offline training: the candidates that algorithms choose from, the examples that they choose, and their shared settings.

The offline trainer drives them: candidates (recorded rollouts, by numbers and names alone) in, examples out. Pure: the same
candidates give the same examples in the same order, so that a run that is resumed goes on with the batches that it had.
Knows nothing of stores, tokens or engines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, ClassVar

from pydantic import Field

from agentlightning.algorithms.settings import Names, check_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One recorded rollout that can be learned from."""

    rollout_id: str
    task: str
    """Equal for rollouts of equal tasks, whichever run and group they are of."""
    reward: float | None
    answer: str
    """Equal for rollouts of one task in which the model wrote the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """The unit of an update, as ids of rollouts."""

    wanted: str | None = None
    """To be imitated, or preferred."""
    unwanted: str | None = None
    """To be avoided: the other half of a pair, or an example of its own."""
    held_out: bool = False
    """Never trained on: its loss tells how well what was learned holds elsewhere."""


@dataclass(frozen=True, kw_only=True)
class OfflineAlgorithm:
    """Settings of every offline algorithm."""

    name: ClassVar[str]
    needs_reference: ClassVar[bool] = False
    """True where it compares with the weights that the run began with."""
    renders: ClassVar[bool] = False
    """True where it renders messages anew, in place of the recorded token ids."""

    held_out: Annotated[float, Field(ge=0, le=0.9)] = 0.05
    """Share of the tasks that is never trained on, and gives the held-out loss; 0: none."""
    longest: Annotated[int, Field(ge=2)] | None = None
    """Rollouts with a row of more tokens than this are left out; None: than the model's context holds."""
    merge: bool = True
    """Merge calls whose prompts continue each other into one row; False: one row per call. The gradient is the same."""
    agents: Names | None = None
    """Selects the calls that are trained on, as in `selection.selection`; the others are context. None: all."""
    reward: Annotated[str, Field(min_length=1)] | None = None
    """Name of the final reward that counts, such as one that `agl rewards rescore` wrote. None: the rollout's own."""

    def __post_init__(self) -> None:
        check_settings(self)

    def examples(self, candidates: Sequence[Candidate]) -> list[Example]:
        """Returns the examples in a fixed order. ConfigError, with the setting to change, where there are none."""
        raise NotImplementedError

    def is_held_out(self, task: str) -> bool:
        """True where this task's examples are held out: decided by its content, so that a second run holds out the same."""
        place = int.from_bytes(blake2b(task.encode(), digest_size=6).digest()) / 2**48
        return place < self.held_out


def by_task(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """The candidates of each task, tasks in the order of their first one."""
    found: defaultdict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        found[candidate.task].append(candidate)
    return list(found.values())


def best_first(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Sorts by reward, the highest first; equal ones in the order of their ids. Those without a reward are left out."""
    known = [(candidate.reward, candidate) for candidate in candidates if candidate.reward is not None]
    return [candidate for _, candidate in sorted(known, key=lambda pair: (-pair[0], pair[1].rollout_id))]
