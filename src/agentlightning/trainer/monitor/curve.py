"""The reward curve of a run as a picture: training reward and held-out success by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentlightning.errors import MissingExtraError
from agentlightning.records import JSON
from agentlightning.runtime.disk import open_private

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
