"""``agl runs bottlenecks``: where the time of a run's steps goes, and what bounds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from agentlightning.cli.options import RunId, Store, print_columns, with_store

if TYPE_CHECKING:
    from rich.console import Console

    from agentlightning.analysis.bottlenecks import BottleneckReport, Lane

BAR = 40
"""Columns of a lane that fills the whole step."""


def show_bottlenecks(
    run: RunId,
    latest: Annotated[int, typer.Option("--steps", min=1, max=1000, help="Average so many of the latest steps.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    store: Store = None,
) -> None:
    """Show where the time of a run's steps goes, what bounds it, what to change and what that gains at most."""
    import orjson

    from agentlightning.analysis.bottlenecks import read_bottlenecks
    from agentlightning.trainer.display import screen

    found = with_store(store, lambda opened: read_bottlenecks(opened, run, latest))
    if as_json:
        typer.echo(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
    else:
        print_bottlenecks(screen(), found)


def print_bottlenecks(console: Console, found: BottleneckReport) -> None:
    """Print the lanes, then the findings, the one that gains most first."""
    if not found.steps:
        console.print("no training step has ended yet")
        return
    console.print(f"a step takes {found.step_s:.3g} s, mean of {found.steps}")
    for title, lanes in (
        ("phases of a step", found.phases),
        ("a rollout, from queueing to its end", found.rollout),
        ("busy during a step", found.busy),
    ):
        if lanes:
            console.print(f"\n{title}:", soft_wrap=True)
            print_columns(console, [_row(lane) for lane in lanes])
    console.print()
    for finding in found.findings:
        console.print(f"{finding.name} (up to {finding.gain:.0%}): {finding.text}", soft_wrap=True)
        console.print(f"    {finding.change}: {', '.join(finding.settings)}", soft_wrap=True)
    if not found.findings:
        console.print("nothing bounds it by itself: no rule finds more than a tenth of the time")


def _row(lane: Lane) -> tuple[str, ...]:
    seconds = "" if lane.seconds is None else f"{lane.seconds:.3g} s"
    return f"  {lane.name}", f"{lane.share:.0%}", seconds, "█" * round(BAR * lane.share)
