"""Progress of long work: a live panel in a terminal or a notebook, a line per step elsewhere. Drawn with rich."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from agentlightning.errors import MissingExtraError, one_line, printable
from agentlightning.records import JSON
from agentlightning.runtime.disk import open_private
from agentlightning.trainer.progress import CreditedRollout

SHOWN_STEPS = 8
DRAWN_EVERY_S = 0.5
"""In a notebook, which takes a message for each drawing."""
SHOWN_CALLS = 6
"""Of a rollout; of more, those with the largest advantages."""
SHOWN_CHARS = 400
"""Of a call, before it is cut to the terminal's width: it may be megabytes, laid out four times a second."""
CREDIT_WIDTH = 10
SPARK_WIDTH = 60
SPARKS = "▁▂▃▄▅▆▇█"
PHASES = ("collect", "prepare", "update", "publish")
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


def notebook() -> Callable[[RenderableType], None] | None:
    """In a notebook, a function that draws into the cell's output in place of its last drawing; None elsewhere."""
    if not Console().is_jupyter:
        return None
    drawn: list[Any] = []

    def draw(picture: RenderableType) -> None:
        if drawn:
            drawn[0].update(picture)
        else:
            drawn.append(import_module("IPython.display").display(picture, display_id=True))

    return draw


class Display:
    """The `Progress` of `Trainer` and the command line; a context manager."""

    def __init__(
        self, title: str, console: Console | None = None, draw: Callable[[RenderableType], None] | None = None
    ) -> None:
        self.console = console or screen()
        self._draw = draw or notebook()
        self._drawn = -DRAWN_EVERY_S
        self._lines = self._draw is None and not self.console.is_terminal
        self._title = title
        self._started = time.perf_counter()
        self._phase = ("starting", 0, 1)
        self._steps: list[tuple[int, int, dict[str, float]]] = []
        self._told: set[str] = set()
        """Phases that were told where there is no terminal: each once."""
        self._first_step = (0, 0.0)
        """The first step seen here, and when: a resumed run goes on in the middle."""
        self._credited: tuple[int, CreditedRollout] | None = None
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
        self._redraw(DRAWN_EVERY_S)

    def phase(self, name: str, done: int, total: int) -> None:
        if not self.console.is_terminal and name not in self._told:
            self.console.print(f"[{self._elapsed():6.1f} s] {name}")
        self._told.add(name)
        self._phase = (name, done, total)
        self._redraw()

    def credited(self, step: int, rollout: CreditedRollout) -> None:
        self._credited = (step, rollout)
        self._redraw()

    def step(self, step: int, steps: int, metrics: dict[str, float]) -> None:
        if not self._steps:
            self._first_step = (step, self._elapsed())
        self._steps = [*self._steps[1 - SHOWN_STEPS :], (step, steps, metrics)]
        self._curve.append(metrics.get("train/reward_mean", metrics.get("train/loss", 0.0)))
        self._redraw()
        if self._lines:
            told = _from_rollouts(metrics) if "train/reward_mean" in metrics else _from_record(metrics)
            self.console.print(f"[{self._elapsed():6.1f} s] step {step}/{steps}  {told}", soft_wrap=True)

    def evaluated(self, step: int, kind: str, success: float) -> None:
        self._heldout.append((step, kind, success))
        self._redraw()
        if self._lines:
            self.console.print(f"[{self._elapsed():6.1f} s] step {step}: held-out {kind} {success:.3f}")

    def note(self, text: str) -> None:
        self.console.print(Text(f"note: {text}", style="yellow"), soft_wrap=True)

    def _redraw(self, waited_s: float = 0.0) -> None:
        """Draw where this is a notebook, and the last drawing is long enough ago."""
        if self._draw is not None and self._elapsed() - self._drawn + waited_s >= DRAWN_EVERY_S:
            self._drawn = self._elapsed()
            self._draw(self.__rich__())

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
        if self._credited is not None:
            parts += _credit(*self._credited)
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
        """Minutes left by the steps so far; nothing after the first of them."""
        (step, steps, _), (first, began) = self._steps[-1], self._first_step
        if step == first:
            return ""
        return f", about {(steps - step) * (self._elapsed() - began) / (step - first) / 60:.0f} min left"

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started


def _credit(step: int, rollout: CreditedRollout) -> list[RenderableType]:
    """A rollout's reward, and its calls in order, each with its number from 1 and its advantage as a number and a bar."""
    most = max(abs(call.advantage) for call in rollout.calls) or 1.0
    numbered = list(enumerate(rollout.calls, 1))
    shown = sorted(sorted(numbered, key=lambda one: -abs(one[1].advantage))[:SHOWN_CALLS])
    left_out = "" if len(shown) == len(numbered) else f", {len(shown)} of {len(numbered)} calls"
    table = Table.grid(padding=(0, 1), expand=True)
    for column in ("call", "advantage", "bar"):
        table.add_column(column, justify="right" if column != "bar" else "left", no_wrap=True)
    table.add_column("sampled", ratio=1, no_wrap=True, overflow="ellipsis")
    for number, call in shown:
        style = "green" if call.advantage > 0 else "red" if call.advantage < 0 else ""
        size = round(CREDIT_WIDTH * abs(call.advantage) / most)
        by = f"{call.agent}: " if call.agent else ""
        table.add_row(
            str(number),
            Text(f"{call.advantage:+.2f}", style=style),
            Text(f"{'█' * size:<{CREDIT_WIDTH}}", style=style),
            Text(one_line(f"{by}{call.text[:SHOWN_CHARS]}")),
        )
    title = f"credit in step {step}: rollout {rollout.rollout_id}, reward {rollout.reward:.3g}{left_out}"
    return [Text(one_line(title), style="bold", no_wrap=True, overflow="ellipsis"), table]


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


REWARDS = ("train/reward_mean", "eval/greedy/reward_mean", "eval/sampled/reward_mean")


def draw_curve(rows: Sequence[JSON], title: str, to: Path) -> None:
    """Write a PNG from the rows of metrics.jsonl. MissingExtraError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as cause:
        raise MissingExtraError("matplotlib", "train") from cause
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, label, style in (
        ("train/reward_mean", "training reward (T = 1)", {"color": "#9aa5b1", "linewidth": 1.2}),
        ("eval/greedy/reward_mean", "held-out, greedy", {"color": "#1f6feb", "marker": "o", "linewidth": 2}),
        ("eval/sampled/reward_mean", "held-out, T = 1", {"color": "#d97706", "marker": "s", "linestyle": "none"}),
    ):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
            _draw_band(rows, name, axes, str(style["color"]))
    axes.set_xlabel("training step")
    axes.set_ylabel("mean reward of a rollout (band: 95 % of chance)")
    axes.set_title(title)
    values = [row[name] for row in rows for name in REWARDS if name in row]
    if values and 0 <= min(values) <= max(values) <= 1:
        axes.set_ylim(-0.03, 1.03)
    axes.grid(alpha=0.25)
    if any("eval/loss" in row for row in rows):
        _draw_loss(rows, axes)
    if axes.lines:
        axes.legend(frameon=False)
    temporary = to.with_name(f".{to.name}.tmp")
    with open_private(temporary, "wb") as file:
        figure.savefig(file, format="png", dpi=140)
    temporary.replace(to)


def _draw_band(rows: Sequence[JSON], name: str, axes: Any, color: str) -> None:
    """Twice the standard error of each mean, either way: what chance moves it by."""
    band = []
    for row in rows:
        if name == "train/reward_mean" and {name, "train/reward_std", "rollout/count"} <= row.keys():
            band.append((row["step"], row[name], 2 * row["train/reward_std"] / max(1.0, row["rollout/count"]) ** 0.5))
        elif (error := name.replace("_mean", "_stderr")) in row and name in row:
            band.append((row["step"], row[name], 2 * row[error]))
    if band:
        low, high = ([mean + sign * error for _, mean, error in band] for sign in (-1, 1))
        axes.fill_between([step for step, _, _ in band], low, high, color=color, alpha=0.15, linewidth=0)


def _draw_loss(rows: Sequence[JSON], axes: Any) -> None:
    """Held-out loss of an offline run: beside the reward of its evaluations, or alone where no agent is evaluated."""
    if axes.lines:
        axes = axes.twinx()
    axes.set_ylabel("held-out loss")
    points = [(row["step"], row["eval/loss"]) for row in rows if "eval/loss" in row]
    axes.plot(*zip(*points, strict=True), label="held-out loss", color="#6f42c1", marker=".", linestyle="--")
