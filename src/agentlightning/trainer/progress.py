"""Progress: what a long piece of work tells whoever watches it. The command line draws it; `Silent` drops it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedCall:
    """One call, and what its tokens are trained with."""

    text: str
    """The completion, as it was sampled."""
    advantage: float
    """The mean over its trained tokens."""
    agent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedRollout:
    """One rollout of a training step."""

    rollout_id: str
    reward: float
    calls: Sequence[CreditedCall]
    """In the agent's order."""


class Progress(Protocol):
    def phase(self, name: str, done: int, total: int) -> None:
        """`done` of `total` units of the current phase (collect, learn, evaluate, …); called often."""

    def credited(self, step: int, rollout: CreditedRollout) -> None:
        """The step is planned: an example of what its calls are trained with."""

    def step(self, step: int, steps: int, metrics: dict[str, float]) -> None:
        """A training step is complete."""

    def evaluated(self, step: int, kind: str, success: float) -> None:
        """Held-out success (mean final reward) after `step`; `kind` is greedy or sampled."""

    def note(self, text: str) -> None:
        """Something a person should read."""


class Silent:
    """Watches nothing."""

    def phase(self, name: str, done: int, total: int) -> None: ...

    def credited(self, step: int, rollout: CreditedRollout) -> None: ...

    def step(self, step: int, steps: int, metrics: dict[str, float]) -> None: ...

    def evaluated(self, step: int, kind: str, success: float) -> None: ...

    def note(self, text: str) -> None: ...
