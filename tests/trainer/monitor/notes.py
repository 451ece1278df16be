"""Notes: a run's output that keeps what it is told."""

from __future__ import annotations

from agentlightning.trainer.progress import Silent


class Notes(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)
