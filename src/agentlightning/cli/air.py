"""``agl rewards air``: what AIR's rules say of a stored run, before anything is trained with them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentlightning.cli.options import Mode, RunId, Step, Store, print_columns, with_store

if TYPE_CHECKING:
    from rich.console import Console

    from agentlightning.store.base import LightningStore
    from agentlightning.tracing.air import Air
    from agentlightning.trainer.data.air_report import AirReport


def show_air(
    run: RunId,
    rules: Annotated[
        Path | None, typer.Option("--rules", help="TOML file with an [air] table; the run's own rules by default.")
    ] = None,
    mode: Mode = None,
    step: Step = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Rollouts to read, at most.")] = None,
    store: Store = None,
) -> None:
    """Show the rewards that AIR's rules give the calls of a run."""
    from dataclasses import asdict

    import orjson

    from agentlightning.trainer.data.air_report import report_air
    from agentlightning.trainer.display import screen

    async def work(opened: LightningStore) -> AirReport:
        air = await _rules(opened, run, rules)
        return await report_air(opened, run, air, mode=mode, step=step, limit=limit)

    report = with_store(store, work)
    _print(screen(), report)
    typer.echo(orjson.dumps({"run_id": run, **asdict(report)}).decode())


async def _rules(store: LightningStore, run: str, file: Path | None) -> Air:
    from agentlightning.config.file import load_air_table
    from agentlightning.errors import ConfigError
    from agentlightning.runner.air import load_air
    from agentlightning.store.scan import find_run

    found = await find_run(store, run)
    table: Any = load_air_table(file) if file is not None else found.config.get("air", {})
    air = load_air(table)
    if air is None:
        where = f"{file}: its [air] table" if file is not None else f"{run}: its configuration"
        raise ConfigError(f"{where} has no rules; give some with --rules FILE")
    return air


def _print(console: Console, report: AirReport) -> None:
    rows = [("rule", "calls", "a call", "a rollout")]
    rows += [(one.rule, f"{one.share:.1%}", f"{one.a_call:+.3f}", f"{one.a_rollout:+.3f}") for one in report.rules]
    print_columns(console, rows)
    console.print(
        f"{report.rollouts} rollouts, {report.calls} calls; "
        f"{report.recorded} rewards on record, {report.unlike_record} unlike what the rules say",
        soft_wrap=True,
    )
