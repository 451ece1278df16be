"""Progress: what a long piece of work tells whoever watches it. The command line draws it; `Silent` drops it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    def phase(self, name: str, done: int, total: int) -> None:
        """`done` of `total` units of the current phase (collect, learn, evaluate, …); called often."""

    def step(self, step: int, steps: int, metrics: dict[str, float]) -> None:
        """A training step is complete."""

    def evaluated(self, step: int, kind: str, success: float) -> None:
        """Held-out success (mean final reward) after `step`; `kind` is greedy or sampled."""

    def note(self, text: str) -> None:
        """Something a person should read."""


def duration(seconds: float) -> str:
    """
    >>> duration(8.2), duration(200), duration(9000)
    ('8 s', '3 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Silent:
    """Watches nothing."""

    def phase(self, name: str, done: int, total: int) -> None: ...

    def step(self, step: int, steps: int, metrics: dict[str, float]) -> None: ...

    def evaluated(self, step: int, kind: str, success: float) -> None: ...

    def note(self, text: str) -> None: ...
