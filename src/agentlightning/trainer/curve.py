"""The reward curve of a run as a picture: training reward and held-out success by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentlightning.errors import MissingExtraError
from agentlightning.types import JSON


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
        ("reward_mean", "training reward (T = 1)", {"color": "#9aa5b1", "linewidth": 1.2}),
        ("heldout_greedy", "held-out, greedy", {"color": "#1f6feb", "marker": "o", "linewidth": 2}),
        ("heldout_sampled", "held-out, T = 1", {"color": "#d97706", "marker": "s", "linestyle": "none"}),
    ):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set_xlabel("training step")
    axes.set_ylabel("mean reward")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    if any("heldout_loss" in row for row in rows):
        _draw_loss(rows, axes)
    if axes.lines:
        axes.legend(frameon=False)
    temporary = to.with_name(f".{to.name}.tmp")
    figure.savefig(temporary, format="png", dpi=140)
    temporary.replace(to)


def _draw_loss(rows: Sequence[JSON], axes: Any) -> None:
    """Of a run that learns from the record: beside the reward of its evaluations, or alone where no agent is evaluated."""
    if axes.lines:
        axes = axes.twinx()
    axes.set_ylabel("held-out loss")
    points = [(row["step"], row["heldout_loss"]) for row in rows if "heldout_loss" in row]
    axes.plot(*zip(*points, strict=True), label="held-out loss", color="#6f42c1", marker=".", linestyle="--")
