"""``agl rewards air``: what AIR's rules say of a stored run, before anything is trained with them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentlightning.cli.options import Store, open_store, store_url

if TYPE_CHECKING:
    from rich.console import Console

    from agentlightning.store.base import LightningStore
    from agentlightning.tracing.air import Air
    from agentlightning.trainer.data.air_report import AirReport


def show_air(
    run: Annotated[str, typer.Argument(help="Id of the run.")],
    rules: Annotated[
        Path | None, typer.Option("--rules", help="TOML file with an [air] table; the run's own rules by default.")
    ] = None,
    mode: Annotated[str | None, typer.Option("--mode", help="train or eval; both by default.")] = None,
    step: Annotated[int | None, typer.Option("--step", help="Only rollouts enqueued for this training step.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Rollouts to read, at most.")] = None,
    store: Store = None,
) -> None:
    """Show the rewards that AIR's rules give the calls of a run, and whether they agree with the final rewards."""
    import asyncio
    from dataclasses import asdict
    from typing import get_args

    import orjson

    from agentlightning.errors import ConfigError
    from agentlightning.trainer.data.air_report import report_air
    from agentlightning.trainer.display import screen
    from agentlightning.types import Mode

    if mode is not None and mode not in get_args(Mode):
        raise ConfigError(f"--mode: expected train or eval, got {mode!r}")

    async def work() -> AirReport:
        async with open_store(store_url(store)) as opened:
            air = await _rules(opened, run, rules)
            return await report_air(
                opened,
                run,
                air,
                mode=mode,  # type: ignore[arg-type]  # checked above
                step=step,
                limit=limit,
            )

    report = asyncio.run(work())
    _print(screen(), report)
    typer.echo(orjson.dumps({"run_id": run, **asdict(report)}).decode())


async def _rules(store: LightningStore, run: str, file: Path | None) -> Air:
    from agentlightning.config_file import load_air_table
    from agentlightning.errors import ConfigError, NotFoundError
    from agentlightning.runner.air import load_air

    found = await store.runs(ids=[run])
    if not found:
        raise NotFoundError(f"{run}: no such run; see: agl runs list")
    table: Any = load_air_table(file) if file is not None else found[0].config.get("air", {})
    air = load_air(table)
    if air is None:
        where = f"{file}: its [air] table" if file is not None else f"{run}: its configuration"
        raise ConfigError(f"{where} has no rules; give some with --rules FILE")
    return air


def _print(console: Console, report: AirReport) -> None:
    rows = [("rule", "calls", "a call", "a rollout", "agreement")]
    rows += [
        (one.rule, f"{one.share:.1%}", f"{one.a_call:+.3f}", f"{one.a_rollout:+.3f}", _number(one.agreement))
        for one in report.rules
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        console.print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)), soft_wrap=True)
    console.print(
        f"{report.rollouts} rollouts, {report.calls} calls; agreement of all rules together {_number(report.agreement)}; "
        f"{report.recorded} rewards on record, {report.unlike_record} unlike what the rules say",
        soft_wrap=True,
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"
