"""``agl rewards``: rewards of stored rollouts, and their score by another reward function."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from agentlightning.cli import reward_debugging
from agentlightning.cli.options import (
    REWARD_FUNCTION,
    Mode,
    RunId,
    Step,
    Store,
    print_columns,
    reward_scorer,
    with_store,
)
from agentlightning.errors import ConfigError, RewardError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from agentlightning.store.base import LightningStore
    from agentlightning.trainer.data.rescore import RescoredRollout, RewardComparison

SHOWN = 10
THREADS = 8
OWN = "reward"
EVERY_S = 5.0
"""Seconds between lines that say how far the scoring is."""

app = typer.Typer(
    help="Debug the rewards of stored rollouts: their calculation, distribution and hacks, and what other rules would give.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command("explain")(reward_debugging.explain)
app.command("what-if")(reward_debugging.what_if)
app.command("report")(reward_debugging.report)


@app.command("rescore")
def rescore(
    run: RunId,
    function: Annotated[str, typer.Option("--with", help=REWARD_FUNCTION)],
    write: Annotated[bool, typer.Option("--write", help="Keep the new rewards, under --name.")] = False,
    name: Annotated[str, typer.Option("--name", help="Name of the rewards that are kept.")] = "rescored",
    mode: Mode = None,
    step: Step = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Rollouts to score, at most.")] = None,
    store: Store = None,
) -> None:
    """Score the finished rollouts of a run with another reward function, and compare old and new."""
    from concurrent.futures import ThreadPoolExecutor
    from dataclasses import asdict

    import orjson

    from agentlightning.trainer.data.rescore import Rescoring, compare
    from agentlightning.trainer.display import screen

    if not name or name == OWN:
        raise ConfigError(f"--name: {name!r} is the name of the rollouts' own rewards; choose another")

    async def work(opened: LightningStore) -> list[RescoredRollout]:
        rescoring = Rescoring(
            store=opened,
            run_id=run,
            scorer=scorer,
            mode=mode,
            step=step,
            limit=limit,
            keep_as=name if write else None,
            progress=_progress(),
        )
        await rescoring.score()
        return rescoring.found

    with ThreadPoolExecutor(THREADS) as threads:
        scorer = reward_scorer(function, threads)
        found = with_store(store, work)
    written = sum(one.score is not None and not one.stood for one in found) if write else None
    comparison = compare(found)
    _print(screen(), found, comparison, name, written)
    kept = {} if written is None else {"written": written, "name": name}
    typer.echo(orjson.dumps({"run_id": run, **asdict(comparison), **kept}).decode())
    if not comparison.scored:
        raise RewardError(f"--with {function}: it scored none of {comparison.rollouts} rollouts")


def _progress() -> Callable[[int], None]:
    """A line to standard error now and then: a judge or a program may take hours over a run."""
    told_at = time.monotonic()

    def progress(done: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= EVERY_S:
            told_at = time.monotonic()
            typer.echo(f"note: {done} rollouts scored", err=True)

    return progress


def _print(
    console: Console, found: list[RescoredRollout], comparison: RewardComparison, name: str, written: int | None
) -> None:
    rows = [("", "old", "new"), ("mean", _number(comparison.old_mean), _number(comparison.new_mean))]
    changed = sorted((one for one in found if one.change), key=lambda one: -abs(one.change or 0.0))
    rows += [(one.rollout.id, _number(one.old), _number(one.new)) for one in changed[:SHOWN]]
    print_columns(console, rows)
    if len(changed) > SHOWN:
        console.print(f"… and {len(changed) - SHOWN} more that changed")
    console.print(
        f"{comparison.rollouts} rollouts, {comparison.changed} changed, correlation {_number(comparison.correlation)}, "
        f"order within groups kept {_number(comparison.order_kept)}",
        soft_wrap=True,
    )
    new = {one.new for one in found if one.new is not None}
    if len(new) == 1 and comparison.scored > 1:
        console.print(f"note: all {comparison.scored} new rewards are {new.pop():g}: they tell no rollout from another")
    failures = [one for one in found if one.problem]
    if failures:
        first = failures[0]
        console.print(
            f"the function failed on {len(failures)} rollouts, first on {first.rollout.id}: {first.problem}",
            soft_wrap=True,
            style="yellow",
        )
    if written is not None:
        before = comparison.scored - written
        had = f"; {before} had one of that name, which stays: they were not scored again" if before else ""
        console.print(f"rewards of {written} rollouts written as {name!r}{had}", soft_wrap=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
