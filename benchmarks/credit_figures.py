"""Figures of the credit suite: from curves of cells to numbers with intervals, tables and a picture.

Pure but for `draw`. A figure is over seeds: the compute to a success of 0.8 is a median, a ratio to `uniform` is the
geometric mean over seeds of the same seed's ratios, its interval the t interval of their logarithms. Baselines go on beyond
their budget until they reach 0.8, up to twice of it; a seed of another rule that never does counts with its budget, over at
most as much of the baseline's: the rule is worse than that ratio says.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

GOAL = 0.8
CONTROLS = ("random_reward", "oracle")
BASELINES = ("uniform", "packed")
BASELINE_OF = MappingProxyType({"tree": "packed"})
"""By rule, the baseline that it is compared with, where that is not `uniform`: the one whose rows are computed alike."""
MAX_RATIO = 0.6
"""A rule pays on a task where it needs at most this share of its baseline's compute."""
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t, 0.975 quantile, for 1, 2, … degrees of freedom."""

Curve = Sequence[Sequence[float]]
"""[compute, rollouts, held-out success] of each evaluation."""
Cells = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]
"""By task, rule and seed: `points`, a curve, `beyond`, where a baseline goes on, `steps` and `correlation`."""


def to_goal(points: Curve, goal: float = GOAL) -> tuple[float, float] | None:
    """The compute and the rollouts at which the curve first reaches `goal`, linearly between evaluations; None: never.

    >>> to_goal([[0, 0, 0.2], [100, 10, 0.6], [200, 30, 1.0]])
    (150.0, 20.0)
    """
    if points[0][2] >= goal:
        return 0.0, 0.0
    for (compute, rollouts, low), (later, more, high) in pairwise(points):
        if low < goal <= high:
            part = (goal - low) / (high - low)
            return compute + part * (later - compute), rollouts + part * (more - rollouts)
    return None


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95% t interval of the mean; None for fewer than two values, which have none."""
    if len(values) < 2:
        return None
    half = T_95[min(len(values), 10) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def figures_of(cells: Cells, task: str, rule: str) -> dict[str, Any]:
    """The figures of one rule on one task."""
    own = cells[task][rule]
    reached = {seed: to_goal(_all(one)) for seed, one in own.items()}
    last = {seed: _all(one)[-1] for seed, one in own.items()}
    finals = [_final(one["points"]) for one in own.values()]
    found: dict[str, Any] = {
        "rollouts_to_0.8": round(statistics.median(r[1] if (r := reached[seed]) else last[seed][1] for seed in own)),
        "compute_to_0.8": round(statistics.median(r[0] if (r := reached[seed]) else last[seed][0] for seed in own)),
        "reached": sum(to_goal(one["points"]) is not None for one in own.values()),
        "seeds": len(own),
        "final": round(statistics.fmean(finals), 3),
        "ci": _rounded(interval(finals)),
    }
    baseline = cells[task].get(BASELINE_OF.get(rule, "uniform"), {})
    ratios = [math.log(_ratio(own[seed], base)) for seed, base in baseline.items() if seed in own]
    if rule != "uniform" and ratios:
        bounds = interval(ratios)
        found["ratio"] = round(math.exp(statistics.fmean(ratios)), 3)
        found["ratio_ci"] = _rounded(None if bounds is None else (math.exp(bounds[0]), math.exp(bounds[1])))
    return found


def _final(points: Curve) -> float:
    """Mean of the last three evaluations, which move by chance."""
    return statistics.fmean(point[2] for point in points[-3:])


def _ratio(own: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    """Compute to the goal over the baseline's; of a seed that never reaches it, the budget over at most as much of that."""
    spent, needed = to_goal(_all(own)), to_goal(_all(base))
    budget, other = _all(own)[-1][0], _all(base)[-1][0]
    if spent is None:
        return max(1.0, budget) / max(1.0, min(budget, needed[0] if needed else other))
    return max(1.0, spent[0]) / max(1.0, needed[0] if needed else other)


def _all(cell: Mapping[str, Any]) -> Curve:
    return [*cell["points"], *cell.get("beyond", [])]


def _rounded(bounds: tuple[float, float] | None) -> list[float] | None:
    return None if bounds is None else [round(one, 3) for one in bounds]


def summary(cells: Cells) -> dict[str, Any]:
    """All figures: by rule and task, and the rank correlations by rule and task."""
    rules = list(dict.fromkeys(rule for by_rule in cells.values() for rule in by_rule))
    found: dict[str, Any] = {
        rule: {task: figures_of(cells, task, rule) for task in cells if cells[task].get(rule)} for rule in rules
    }
    found["rank_correlation_with_true_credit"] = {
        rule: by_task for rule in rules if (by_task := _correlations(cells, rule))
    }
    return found


def _correlations(cells: Cells, rule: str) -> dict[str, float]:
    found = {}
    for task, by_rule in cells.items():
        values = [one["correlation"] for one in by_rule.get(rule, {}).values() if one["correlation"] is not None]
        if values:
            found[task] = round(statistics.fmean(values), 3)
    return found


def pays(figures: Mapping[str, Any]) -> bool:
    """True where a rule reaches 0.8 with every seed, with at most 0.6 of its baseline's compute, and the ratio's interval
    ends below 1."""
    bounds = figures.get("ratio_ci")
    return (
        bounds is not None
        and figures["reached"] == figures["seeds"]
        and figures["ratio"] <= MAX_RATIO
        and bounds[1] < 1.0
    )


def verdict(found: Mapping[str, Any], tasks: Sequence[str]) -> str:
    """Says on which tasks a rule pays, and which need least."""
    lines = []
    for task in tasks:
        ratios = {
            rule: float(by_task[task]["ratio"])
            for rule, by_task in _rules(found)
            if rule not in (*CONTROLS, *BASELINES) and "ratio" in by_task.get(task, {})
        }
        order = sorted(ratios, key=lambda rule: ratios[rule])
        seeds = max(by_task[task]["seeds"] for _, by_task in _rules(found) if task in by_task)
        paying = _with_ratios([rule for rule in order if pays(found[rule][task])], ratios) or "none"
        said = paying if seeds > 1 else "not known: an interval takes two seeds"
        lines.append(f"| {task} | {seeds} | {said} | {_with_ratios(order[:3], ratios)} |")
    head = "| task | seeds | rules that pay, with their share of their baseline's compute | those that need least |"
    return "\n".join([head, "| --- | --- | --- | --- |", *lines])


def _with_ratios(rules: Sequence[str], ratios: Mapping[str, float]) -> str:
    return ", ".join(f"`{rule}` ({ratios[rule]:.2f})" for rule in rules)


def table(found: Mapping[str, Any], tasks: Sequence[str]) -> str:
    """One row a rule: for each task the ratio of compute to 0.8 to uniform's, and the final success."""
    head = "| rule | " + " | ".join(tasks) + " |"
    lines = [head, "| --- " * (len(tasks) + 1) + "|"]
    for rule, by_task in _rules(found):
        lines.append(f"| `{rule}` | " + " | ".join(_entry(rule, by_task.get(task)) for task in tasks) + " |")
    return "\n".join(lines)


def _entry(rule: str, figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return ""
    final = f"{figures['final']:.2f}".replace("0.", ".")
    if rule == "uniform":
        return f"{figures['compute_to_0.8'] / 1e6:.2f} M, {figures['reached']}/{figures['seeds']}; {final}"
    bounds = figures.get("ratio_ci")
    spread = f" ({bounds[0]:.2f} to {bounds[1]:.2f})" if bounds else ""
    reached = f"{figures['ratio']:.2f}{spread}" if "ratio" in figures else "?"
    return f"{reached}, {figures['reached']}/{figures['seeds']}; {final}"


def correlation_table(found: Mapping[str, Any]) -> str:
    """One row a rule, the highest correlation first."""
    by_rule = found["rank_correlation_with_true_credit"]
    tasks = list(dict.fromkeys(task for one in by_rule.values() for task in one))
    if not tasks:
        return "There are no figures yet."
    order = sorted(by_rule, key=lambda rule: -max(by_rule[rule].values()))
    lines = ["| rule | " + " | ".join(tasks) + " |", "| --- " * (len(tasks) + 1) + "|"]
    for rule in order:
        entries = [f"{by_rule[rule][task]:.2f}" if task in by_rule[rule] else "" for task in tasks]
        lines.append(f"| `{rule}` | " + " | ".join(entries) + " |")
    return "\n".join(lines)


def _rules(found: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(rule, by_task) for rule, by_task in found.items() if rule != "rank_correlation_with_true_credit"]


def draw(cells: Cells, found: Mapping[str, Any], path: Path) -> None:
    """Draws curves (above) and ratios of compute (below), a column a task."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    tasks = list(cells)
    figure, axes = plt.subplots(2, len(tasks), figsize=(3.2 * len(tasks), 7.5), squeeze=False)
    for column, task in enumerate(tasks):
        _draw_curves(axes[0][column], cells, found, task)
        _draw_ratios(axes[1][column], found, task)
    axes[0][0].set_ylabel("held-out success, mean of seeds")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _draw_curves(axis: Any, cells: Cells, found: Mapping[str, Any], task: str) -> None:
    ratios = {
        rule: by_task[task]["ratio"]
        for rule, by_task in _rules(found)
        if rule not in CONTROLS and "ratio" in by_task.get(task, {})
    }
    shown = ["uniform", *sorted(ratios, key=lambda rule: ratios[rule])[:2], *CONTROLS]
    for rule in shown:
        curves = [one["points"] for one in cells[task].get(rule, {}).values()]
        if curves:
            length = min(map(len, curves))
            xs = [statistics.fmean(curve[place][0] for curve in curves) / 1e6 for place in range(length)]
            axis.plot(
                xs, [statistics.fmean(curve[place][2] for curve in curves) for place in range(length)], label=rule
            )
    axis.axhline(GOAL, color="grey", linewidth=0.5)
    axis.set(title=task, xlabel="compute, millions of token forwards", ylim=(0, 1.02))
    axis.legend(fontsize=7)


def _draw_ratios(axis: Any, found: Mapping[str, Any], task: str) -> None:
    rows = [
        (rule, by_task[task])
        for rule, by_task in _rules(found)
        if rule != "random_reward" and "ratio" in by_task.get(task, {})
    ]
    for place, (rule, figures) in enumerate(reversed(rows)):
        colour = "tab:green" if pays(figures) else "tab:grey" if rule in CONTROLS else "tab:blue"
        axis.plot([figures["ratio"]], [place], "o", color=colour)
        if figures["ratio_ci"]:
            axis.plot(figures["ratio_ci"], [place, place], color=colour)
    axis.set_yticks(range(len(rows)), [rule for rule, _ in reversed(rows)], fontsize=7)
    axis.set_xscale("log")
    axis.set_xlim(0.1, 10)
    for bound, style in ((1.0, "-"), (MAX_RATIO, ":")):
        axis.axvline(bound, color="grey", linewidth=0.7, linestyle=style)
    axis.set_xlabel("compute to 0.8 over the baseline's")
