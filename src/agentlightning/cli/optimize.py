"""``agl optimize``: a search for better prompts, its result compared with what it started from, and promoted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentlightning.cli.options import (
    Json,
    Runs,
    Server,
    Settings,
    Store,
    one_store,
    own_config,
    print_json,
    store_setting,
)
from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from agentlightning.trainer.prompts.optimization import OptimizeResult


def optimize(
    config: Annotated[Path | None, typer.Argument(help="TOML file with the configuration.")] = None,
    resume: Annotated[str | None, typer.Option("--resume", help="Go on with this run.")] = None,
    promote: Annotated[
        bool, typer.Option("--promote/--no-promote", help="Make the best texts the newest versions of their templates.")
    ] = True,
    settings: Settings = None,
    as_json: Json = False,
    store: Store = None,
    runs: Runs = Path("runs"),
    server: Server = None,
) -> None:
    """Search for better prompts of an agent; trains nothing. Ctrl-C ends after the batch that is under way."""
    from functools import partial

    from agentlightning.config.file import load_config
    from agentlightning.trainer.checkpoint import RunFolder
    from agentlightning.trainer.display import Display
    from agentlightning.trainer.interrupts import run_interruptible
    from agentlightning.trainer.prompts.optimization import Optimization
    from agentlightning.trainer.training import new_run_id

    url = one_store(store, server)
    if resume is None:
        if config is None:
            raise ConfigError("agl optimize: give a TOML file, or --resume RUN")
        folder, loaded = RunFolder(runs, new_run_id()), load_config(config, settings or [], store_setting(url))
    else:
        if config is not None:
            raise ConfigError("--resume goes on with the run's own configuration; give no file with it")
        folder = RunFolder(runs, resume)
        loaded = own_config(folder, settings or [], url)
    with Display(folder.run_id) as display:
        search = Optimization(loaded, folder, display, promote=promote)
        result = run_interruptible(partial(search.run, resume=resume is not None), search.stop)
    print_json(_told(result)) if as_json else _print(display.console, result, promote)


def _told(result: OptimizeResult) -> dict[str, Any]:
    before, after = (_mean(rewards) for rewards in result.rewards)
    difference = _difference(result)
    return {
        "run_id": result.run_id,
        "finished": result.finished,
        "reason": result.reason,
        "before": before,
        "after": after,
        "difference": None if difference is None else [difference.value, difference.low, difference.high],
        "best": result.best.number,
        "texts": dict(result.best.texts),
        "candidates": result.means,
        "versions": result.promoted,
        "rollouts": result.rollouts,
        "tokens": result.tokens,
    }


def _print(console: Console, result: OptimizeResult, promote: bool) -> None:
    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    used = f"{result.rollouts} rollouts, {result.tokens:,} tokens"
    say(f"run {result.run_id}: {result.reason} Used: {used}.")
    before, after = (_mean(rewards) for rewards in result.rewards)
    if result.best.number == result.seed.number:
        say("nothing better was found" + ("" if before is None else f"; validation reward {before:.3f}"))
    elif before is not None and after is not None:
        told = f"validation reward {before:.3f} before, {after:.3f} after, over {len(result.rewards[0])} tasks"
        if (difference := _difference(result)) is not None:
            told += f"; {difference.value:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"
            told += "" if difference.excludes_zero else ", which chance alone may do"
        say(f"{told}; the tasks that chose flatter it")
        for line in _diff(result):
            say(line)
    versions = ", ".join(f"{name}@{version}" for name, version in result.promoted.items())
    if result.finished:
        kept = "rollouts of this run get" if promote else "not promoted; rollouts of this run get"
        say(f"{kept} {versions}")
        say(f"candidates: agl prompts list --candidates {result.run_id}")


def _mean(rewards: dict[int, float]) -> float | None:
    import statistics

    return statistics.fmean(rewards.values()) if rewards else None


def _difference(result: OptimizeResult) -> Any:
    """The paired interval of the mean difference; None where the two have other tasks."""
    from agentlightning.analysis.intervals import paired_bootstrap

    before, after = result.rewards
    if before.keys() != after.keys() or result.best.number == result.seed.number:
        return None
    return paired_bootstrap([after[task] - before[task] for task in before])


def _diff(result: OptimizeResult) -> list[str]:
    import difflib

    lines: list[str] = []
    for name, text in result.best.texts.items():
        before = result.seed.texts[name].splitlines()
        lines += difflib.unified_diff(before, text.splitlines(), f"{name} before", f"{name} after", lineterm="")
    return lines
