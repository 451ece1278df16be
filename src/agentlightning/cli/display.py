"""What a person sees of long work: a live panel in a terminal, a line per step elsewhere. Drawn with rich."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SHOWN_STEPS = 8
SPARKS = "▁▂▃▄▅▆▇█"
PHASES = ("collect", "record", "learn", "publish")
PIPED_WIDTH = 1000
"""Rich takes 80 columns where there is no terminal, and would cut tables to them."""


def screen() -> Console:
    """A console that takes text literally (what agents say has brackets, too) and cuts nothing where it is piped."""
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    return console


class Display:
    """A `Progress` for the command line; a context manager."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self.console = console or screen()
        self._title = title
        self._started = time.perf_counter()
        self._phase = ("starting", 0, 1)
        self._steps: list[tuple[int, int, dict[str, float]]] = []
        self._curve: list[float] = []
        self._heldout: list[tuple[int, str, float]] = []
        self._live = Live(self, console=self.console, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def phase(self, name: str, done: int, total: int) -> None:
        self._phase = (name, done, total)

    def step(self, step: int, steps: int, metrics: dict[str, float]) -> None:
        self._steps = [*self._steps[1 - SHOWN_STEPS :], (step, steps, metrics)]
        self._curve.append(metrics.get("reward_mean", metrics.get("loss", 0.0)))
        if not self.console.is_terminal and "reward_mean" not in metrics:
            self.console.print(
                f"[{self._elapsed():6.1f} s] step {step}/{steps}  {_from_record(metrics)}", soft_wrap=True
            )
        elif not self.console.is_terminal:
            self.console.print(
                f"[{self._elapsed():6.1f} s] step {step}/{steps}  reward {metrics['reward_mean']:.3f}  "
                f"mixed {metrics['mixed_groups']:.2f}  turns {metrics['turns']:.2f}  "
                f"{metrics['tokens_per_second']:,.0f} tokens/s  {_shares(metrics)}",
                soft_wrap=True,
            )

    def evaluated(self, step: int, kind: str, success: float) -> None:
        self._heldout.append((step, kind, success))
        if not self.console.is_terminal:
            self.console.print(f"[{self._elapsed():6.1f} s] step {step}: held-out {kind} {success:.3f}")

    def note(self, text: str) -> None:
        self.console.print(Text(f"note: {text}", style="yellow"), soft_wrap=True)

    def __rich__(self) -> RenderableType:
        name, done, total = self._phase
        bar = Table.grid(padding=(0, 1))
        bar.add_row(f"{name:>16}", ProgressBar(total=max(1, total), completed=done, width=40), f"{done}/{total}")
        parts: list[RenderableType] = [bar]
        if self._steps:
            online = "reward_mean" in self._steps[-1][2]
            what = "training reward" if online else "loss"
            parts += [self._table() if online else self._plain(), Text(f"{what} {_spark(self._curve)}", style="cyan")]
        if self._heldout:
            parts.append(
                Text("held-out " + "  ".join(f"{step}:{kind[0]}{value:.2f}" for step, kind, value in self._heldout))
            )
        return Panel(Group(*parts), title=Text(f"{self._title}  {self._elapsed():.0f} s"), title_align="left")

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for column in ("step", "reward", "mixed groups", "turns", "tokens/s", "seconds", "where the time goes"):
            table.add_column(column, justify="left" if column.startswith("where") else "right")
        for step, steps, metrics in self._steps:
            table.add_row(
                f"{step}/{steps}",
                f"{metrics['reward_mean']:.3f}",
                f"{metrics['mixed_groups']:.2f}",
                f"{metrics['turns']:.2f}",
                f"{metrics['tokens_per_second']:,.0f}",
                f"{metrics['seconds']:.1f}",
                _shares(metrics),
            )
        return table

    def _plain(self) -> RenderableType:
        """The steps of a run that learns from the record."""
        return Group(*(Text(f"{step}/{steps}  {_from_record(metrics)}") for step, steps, metrics in self._steps))

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started


def _from_record(metrics: dict[str, float]) -> str:
    shown = [f"{name} {metrics[name]:.4f}" for name in ("loss", "accuracy", "margin", "nll") if name in metrics]
    return "  ".join([*shown, f"epoch {metrics['epoch']:.2f}", f"{metrics['seconds']:.1f} s"])


def _shares(metrics: dict[str, float]) -> str:
    total = max(1e-9, metrics["seconds"])
    return " ".join(f"{phase} {metrics.get(f'seconds_{phase}', 0.0) / total:.0%}" for phase in PHASES)


def _spark(values: list[float], width: int = 60) -> str:
    recent = values[-width:]
    low, high = min(recent), max(recent)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in recent)
