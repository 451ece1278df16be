"""``agl runs suggest``: what earlier runs say about a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentlightning.cli.options import Json, Settings, Store, print_columns, print_json, with_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from agentlightning.analysis.suggestions import EarlierRun, Suggestions


def suggest(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file of the run that is planned.")],
    settings: Settings = None,
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Say what earlier runs of the store suggest for a configuration, with the evidence."""
    from agentlightning.analysis.suggestions import suggest as suggest_from_store
    from agentlightning.config.file import load_config
    from agentlightning.config.run import run_record
    from agentlightning.trainer.display import screen

    record = run_record(load_config(config, settings or []))
    found = with_store(store, lambda opened: suggest_from_store(opened, record))
    if as_json:
        print_json(found)
    else:
        _print(screen(), found)


def _print(console: Console, found: Suggestions) -> None:
    console.print(f"{found.comparable} comparable runs, {found.finished} of them finished with a held-out reward")
    for alarm in found.active:
        console.print(f"run {alarm.run_id} has alarm {alarm.name}: {alarm.text}", soft_wrap=True, style="yellow")
    for rule in found.rules:
        console.print(f"{rule.alarm}: {rule.text}", soft_wrap=True)
        console.print(
            f"  with it: {', '.join(rule.alarmed)}; without: {', '.join(rule.quiet) or 'none'}", soft_wrap=True
        )
    if found.nearest:
        rows: list[Sequence[str]] = [("nearest runs", "distance", "held-out", "state", "alarms", "differs in")]
        rows += [_row(one) for one in found.nearest]
        if found.best is not None and found.best.run_id not in {one.run_id for one in found.nearest}:
            rows.append(_row(found.best))
        print_columns(console, rows)
    if found.proposals:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in found.importances.items())
        console.print(f"settings by importance, over {found.finished} runs: {shares}", soft_wrap=True)
        console.print("settings to try:")
        for settings in found.proposals:
            console.print(f"  {', '.join(f'{name} = {_value(value)}' for name, value in settings.items())}")
    if found.no_proposals is not None:
        console.print(f"no settings are suggested: {found.no_proposals}", soft_wrap=True)


def _row(one: EarlierRun) -> tuple[str, ...]:
    held_out = "-" if one.held_out is None else f"{one.held_out:.3f}"
    differs = "; ".join(f"{each.name} {_value(each.values[1])}" for each in one.differs) or "nothing"
    return one.run_id, f"{one.distance:.2f}", held_out, one.state, ", ".join(one.alarms) or "-", differs


def _value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
