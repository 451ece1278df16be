"""``agl runs compare``: several runs side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from agentlightning.cli.options import Json, Store, print_columns, print_json, with_store

if TYPE_CHECKING:
    from rich.console import Console

    from agentlightning.analysis.compare import RunComparison
    from agentlightning.analysis.intervals import Interval

MAX_VALUE_CHARS = 40
"""Characters of a setting that the table shows."""


def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Ids of 2 to 20 runs; the first is the baseline.")
    ],
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Compare runs: settings that differ, final figures, and whether they differ by more than chance."""
    from agentlightning.analysis.compare import compare_runs
    from agentlightning.trainer.display import screen

    comparison = with_store(store, lambda opened: compare_runs(opened, runs))
    if as_json:
        print_json(comparison)
    else:
        _print(screen(), comparison)


def _print(console: Console, comparison: RunComparison) -> None:
    ids = [one.run_id for one in comparison.figures]
    if comparison.settings:
        rows = [(one.name, *(_value(value) for value in one.values)) for one in comparison.settings]
        print_columns(console, [("setting", *ids), *rows])
    else:
        console.print("the runs have the same settings")
    console.print()
    figures = [("run", "state", "step", "held-out", "best", "90 % of it at step", "reward per step at the end")]
    figures += [
        (
            one.run_id,
            one.state,
            _number(one.step),
            _at(one.held_out, one.held_out_step),
            _at(one.best, one.best_step),
            _number(one.near_best_step),
            _interval(one.slope, "+.4f"),
        )
        for one in comparison.figures
    ]
    print_columns(console, figures)
    console.print()
    for difference in comparison.differences:
        what = f"{difference.run_id} - {difference.baseline}: "
        if difference.difference is None:
            console.print(f"{what}{difference.tasks} held-out tasks in common: too few to compare", soft_wrap=True)
            continue
        sure = "" if difference.difference.excludes_zero else "; chance alone may do that"
        told = _interval(difference.difference, "+.3f")
        console.print(f"{what}{told} over {difference.tasks} held-out tasks{sure}", soft_wrap=True)
    for band in comparison.bands:
        if len(band.run_ids) > 1 and band.held_out:
            last = band.held_out[-1]
            console.print(
                f"{len(band.run_ids)} seeds ({', '.join(band.run_ids)}): held-out {last.mean:.3f}, "
                f"from {last.low:.3f} to {last.high:.3f} at step {last.step}",
                soft_wrap=True,
            )


def _value(value: object) -> str:
    import orjson

    text = value if isinstance(value, str) else "-" if value is None else orjson.dumps(value, default=str).decode()
    return text if len(text) <= MAX_VALUE_CHARS else f"…{text[1 - MAX_VALUE_CHARS :]}"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _at(value: float | None, step: int | None) -> str:
    return "-" if value is None else f"{value:.3f} at {step}"


def _interval(one: Interval | None, form: str) -> str:
    return "-" if one is None else f"{one.value:{form}} [{one.low:{form}}, {one.high:{form}}]"
