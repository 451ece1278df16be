"""Progress of long work: a live panel in a terminal, a line per step elsewhere. Drawn with rich."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Self

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from agentlightning.errors import MissingExtraError, printable
from agentlightning.records import JSON
from agentlightning.runtime.disk import open_private
from agentlightning.trainer.progress import duration

SHOWN_STEPS = 8
SPARK_WIDTH = 60
SPARKS = "▁▂▃▄▅▆▇█"
PHASES = ("collect", "prepare", "update", "publish")
MAX_SILENCE_S = 25.0
"""Without a terminal: seconds after which a line says how far the phase is."""
BEAT_S = 5.0
MIN_KNOWN = 0.1
"""Share of a phase from which on it says how long the rest will take: what is long comes first, such as reading prompts."""
PIPED_WIDTH = 1000
"""Rich takes 80 columns where there is no terminal, and would cut tables to them."""


class LiteralConsole(Console):
    """A console that shows control characters in place of having the terminal obey them: what agents say may hold any."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of what is printed; those that rich itself makes to move the cursor are control segments."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def screen() -> Console:
    """A console that takes text literally (what agents say has brackets, too) and cuts nothing where it is piped."""
    console = LiteralConsole(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    return console


class Display:
    """The `Progress` of `Trainer` and the command line; a context manager."""

    def __init__(
        self, title: str, console: Console | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.console = console or screen()
        self._lines = not self.console.is_terminal
        self._title = title
        self._clock = clock
        self._started = clock()
        self._phase = ("starting", 0, 1)
        self._phase_began = 0.0
        self._last_line = 0.0
        self._ended = threading.Event()
        self._steps: list[tuple[int, int, dict[str, float]]] = []
        self._told: set[str] = set()
        """Phases that were told where there is no terminal: each once."""
        self._first_step = (0, 0.0)
        """The first step seen here, and when: a resumed run goes on in the middle."""
        self._curve: list[float] = []
        self._heldout: list[tuple[int, str, float]] = []
        self._live = Live(self, console=self.console, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        if self._lines:
            threading.Thread(target=self._beat_until_the_end, name="display", daemon=True).start()
        else:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if not self._lines:
            self._live.stop()

    def phase(self, name: str, done: int, total: int) -> None:
        if self._phase[0] != name or done < self._phase[1]:
            self._phase_began = self._elapsed()
        self._phase = (name, done, total)
        if name not in self._told:
            self._told.add(name)
            self._line(name)

    def beat(self) -> None:
        """Without a terminal: a line after a long silence, with the phase, its counts and the time that it has left."""
        if self._lines and self._elapsed() - self._last_line >= MAX_SILENCE_S:
            name, done, total = self._phase
            spent = self._elapsed() - self._phase_began
            known = MIN_KNOWN * total <= done < total and not name.startswith("starting")  # whose parts are not alike
            left = f", about {duration(spent * (total - done) / done)} left" if known and done else ""
            self._line(f"{name} {done}/{total} for {duration(spent)}{left}")

    def _beat_until_the_end(self) -> None:
        while not self._ended.wait(BEAT_S):
            self.beat()

    def _line(self, text: str) -> None:
        """A line with the time, where there is no terminal."""
        if self._lines:
            self._last_line = self._elapsed()
            self.console.print(f"[{self._last_line:6.1f} s] {text}", soft_wrap=True)

    def step(self, step: int, steps: int, metrics: dict[str, float]) -> None:
        if not self._steps:
            self._first_step = (step, self._elapsed())
        self._steps = [*self._steps[1 - SHOWN_STEPS :], (step, steps, metrics)]
        self._curve.append(metrics.get("train/reward_mean", metrics.get("train/loss", 0.0)))
        told = _from_rollouts(metrics) if "train/reward_mean" in metrics else _from_record(metrics)
        self._line(f"step {step}/{steps}{self._left()}  {told}")

    def evaluated(self, step: int, kind: str, success: float) -> None:
        self._heldout.append((step, kind, success))
        self._line(f"step {step}: held-out {kind} {success:.3f}")

    def note(self, text: str) -> None:
        self.console.print(Text(f"note: {text}", style="yellow"), soft_wrap=True)

    def __rich__(self) -> RenderableType:
        name, done, total = self._phase
        bar = Table.grid(padding=(0, 1))
        bar.add_row(f"{name:>16}", ProgressBar(total=max(1, total), completed=done, width=40), f"{done}/{total}")
        if self._steps:
            step, steps, _ = self._steps[-1]
            bar.add_row(
                "all steps", ProgressBar(total=steps, completed=step, width=40), f"{step}/{steps}{self._left()}"
            )
        parts: list[RenderableType] = [bar]
        if self._steps:
            online = "train/reward_mean" in self._steps[-1][2]
            what = "training reward" if online else "loss"
            parts += [
                self._table() if online else self._plain(),
                Text(f"{what} {_spark(self._curve)} {_scale(self._curve)}", style="cyan"),
            ]
        if self._heldout:
            for kind in dict.fromkeys(kind for _, kind, _ in self._heldout):
                found = [f"{value:.2f} after step {step}" for step, of, value in self._heldout if of == kind]
                parts.append(Text(f"mean reward on held-out tasks, {kind}: {', '.join(found)}"))
        return Panel(Group(*parts), title=Text(f"{self._title}  {self._elapsed():.0f} s"), title_align="left")

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for column in ("step", "reward", "signal", "turns", "tokens/s", "seconds", "where the time goes"):
            table.add_column(column, justify="left" if column.startswith("where") else "right")
        for step, steps, metrics in self._steps:
            table.add_row(
                f"{step}/{steps}",
                f"{metrics['train/reward_mean']:.3f}",
                f"{metrics['train/groups_with_signal']:.2f}",
                f"{metrics['rollout/turns']:.2f}",
                f"{metrics['time/tokens_per_s']:,.0f}",
                f"{metrics['time/step_s']:.1f}",
                _shares(metrics),
            )
        return table

    def _plain(self) -> RenderableType:
        """The steps of offline training."""
        return Group(*(Text(f"{step}/{steps}  {_from_record(metrics)}") for step, steps, metrics in self._steps))

    def _left(self) -> str:
        """The time left by the steps so far, evaluations included; of the first one by itself, nothing after the last."""
        (step, steps, metrics), (first, began) = self._steps[-1], self._first_step
        if step == steps:
            return ""
        each = metrics["time/step_s"] if step == first else (self._elapsed() - began) / (step - first)
        return f", about {duration((steps - step) * each)} left"

    def _elapsed(self) -> float:
        return self._clock() - self._started


def _from_rollouts(metrics: dict[str, float]) -> str:
    return (
        f"reward {metrics['train/reward_mean']:.3f}  signal {metrics['train/groups_with_signal']:.2f}  "
        f"turns {metrics['rollout/turns']:.2f}  {metrics['time/tokens_per_s']:,.0f} tokens/s  {_shares(metrics)}"
    )


def _from_record(metrics: dict[str, float]) -> str:
    shown = [
        f"{name} {metrics[f'train/{name}']:.4f}"
        for name in ("loss", "accuracy", "margin", "nll")
        if f"train/{name}" in metrics
    ]
    return "  ".join([*shown, f"epoch {metrics['train/epoch']:.2f}", f"{metrics['time/step_s']:.1f} s"])


def _shares(metrics: dict[str, float]) -> str:
    total = max(1e-9, metrics["time/step_s"])
    return " ".join(f"{phase} {metrics.get(f'time/{phase}_s', 0.0) / total:.0%}" for phase in PHASES)


def _scale(values: list[float]) -> str:
    recent = values[-SPARK_WIDTH:]
    return f"{min(recent):.3g} to {max(recent):.3g}"


def _spark(values: list[float]) -> str:
    recent = values[-SPARK_WIDTH:]
    low, high = min(recent), max(recent)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in recent)


CURVES = (
    ("train/reward_mean", "training reward (T = 1)", {"color": "#9aa5b1", "linewidth": 1.2}),
    ("eval/greedy/reward_mean", "held-out, greedy", {"color": "#1f6feb", "marker": "o", "linewidth": 2}),
    ("eval/sampled/reward_mean", "held-out, T = 1", {"color": "#d97706", "marker": "s", "linestyle": ":"}),
)


def draw_curve(rows: Sequence[JSON], title: str, to: Path) -> None:
    """Write a PNG of rewards, each with a band of twice its standard error, and of held-out losses by step, from the rows of
    metrics.jsonl. MissingExtraError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as cause:
        raise MissingExtraError("matplotlib", "train") from cause
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="training step", ylabel="mean reward (bands: 95% interval)", title=title)
    axes.grid(alpha=0.25)
    values: list[float] = []
    for name, label, style in CURVES:
        found = [(row["step"], row[name], _error(row, name)) for row in rows if name in row]
        if found:
            steps, means, errors = zip(*found, strict=True)
            axes.plot(steps, means, label=label, **style)
            low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-2, 2))
            axes.fill_between(steps, low, high, color=style["color"], alpha=0.15, linewidth=0)
            values += means
    if values and 0 <= min(values) <= max(values) <= 1:
        axes.set_ylim(-0.03, 1.03)
    if losses := [(row["step"], row["eval/loss"]) for row in rows if "eval/loss" in row]:
        axes = axes.twinx() if values else axes
        axes.set_ylabel("held-out loss")
        axes.plot(*zip(*losses, strict=True), label="held-out loss", color="#6f42c1", marker=".", linestyle="--")
    if axes.lines:
        figure.legend(frameon=False, loc="outside lower center", ncols=4)
    temporary = to.with_name(f".{to.name}.tmp")
    with open_private(temporary, "wb") as file:
        figure.savefig(file, format="png", dpi=140)
    temporary.replace(to)


def _error(row: JSON, name: str) -> float:
    """Standard error of the mean; 0 where it is not known."""
    if name == "train/reward_mean":
        return float(row.get("train/reward_std", 0.0) / max(1.0, row.get("rollout/count", 1.0)) ** 0.5)
    return float(row.get(name.replace("_mean", "_stderr"), 0.0))
