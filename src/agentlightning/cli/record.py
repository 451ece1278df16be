"""``agl record``: an agent's rollouts, recorded and not learned from; or traces of an agent that ran elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentlightning.cli.options import Runs, Settings, Store, run_shown, store_setting
from agentlightning.errors import ConfigError
from agentlightning.store.open import open_store, store_url

if TYPE_CHECKING:
    from collections import Counter

REASONS_TOLD = 3
ROLLOUTS = 4


def record(
    config: Annotated[Path | None, typer.Argument(help="TOML file with the configuration.")] = None,
    rollouts: Annotated[
        int | None, typer.Option("--rollouts", min=1, help="Rollouts of each task.", show_default=str(ROLLOUTS))
    ] = None,
    tasks: Annotated[
        int | None, typer.Option("--tasks", min=1, help="Training tasks to use, at most; all by default.")
    ] = None,
    traces: Annotated[
        list[Path] | None,
        typer.Option(
            "--traces",
            help="In place of running an agent: a file of OpenTelemetry GenAI spans, conversations, request and response "
            "pairs or preferences (.jsonl, .json, .gz). May be repeated.",
        ),
    ] = None,
    task_fields: Annotated[
        str | None,
        typer.Option(
            "--task-fields",
            help="With --traces: fields of a row that belong to its task, such as the right answer: a,b.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="With --traces: what lists call the run.")] = None,
    settings: Settings = None,
    store: Store = None,
    runs: Runs = Path("runs"),
) -> None:
    """Run the agent on its training tasks and store the rollouts, for offline training by `agl train --from-run`."""
    if (config is None) == (not traces):
        raise ConfigError("record: give either a configuration, whose agent is run, or --traces FILE")
    if traces:
        given = {"--set": bool(settings), "--tasks": tasks is not None, "--rollouts": rollouts is not None}
        for option in (option for option, there in given.items() if there):
            raise ConfigError(f"{option}: has no effect with --traces")
        _record_traces(traces, task_fields, name, store)
    else:
        if name is not None or task_fields is not None:
            raise ConfigError(f"{'--name' if name is not None else '--task-fields'}: has no effect without --traces")
        assert config is not None  # one of the two is there
        _record_agent(config, rollouts or ROLLOUTS, tasks, settings, store, runs)


def _record_agent(
    config: Path, rollouts: int, tasks: int | None, settings: list[str] | None, store: str | None, runs: Path
) -> None:
    from dataclasses import asdict

    import orjson

    from agentlightning.config.file import load_config
    from agentlightning.trainer.check import record_rollouts

    loaded = load_config(config, settings or [], store_setting(store))
    done = run_shown(
        f"record {config}", runs, lambda folder, display: record_rollouts(loaded, folder, display, rollouts, tasks)
    )
    typer.echo(orjson.dumps(asdict(done)).decode())


def _record_traces(files: list[Path], task_fields: str | None, name: str | None, store: str | None) -> None:
    import asyncio
    import os

    import orjson

    from agentlightning.traces.importer import TraceImport
    from agentlightning.trainer.checkpoint import make_default_folder
    from agentlightning.trainer.training import new_run_id

    url = store_url(store)
    fields = [field.strip() for field in (task_fields or "").split(",") if field.strip()]

    async def work() -> TraceImport:
        make_default_folder(url)
        async with open_store(url, os.environ.get("AGL_SERVER_KEY")) as opened:
            done = TraceImport(store=opened, run_id=new_run_id(), task_fields=fields)
            await done.read(files, name or ", ".join(file.name for file in files), lambda _: None)
            return done

    done = asyncio.run(work())
    for what, counted in (("model calls cannot be learned from", done.left_out), ("spans were broken", done.broken)):
        if counted:
            typer.echo(f"note: {counted.total()} {what}: {_told(counted)}", err=True)
    if done.without:
        typer.echo(f"note: {done.without} rollouts have no model call that can be learned from", err=True)
    figures = {"run_id": done.run_id, "rollouts": done.rollouts, "calls": done.calls, "rewarded": done.rewarded}
    typer.echo(orjson.dumps(figures).decode())


def _told(counted: Counter[str]) -> str:
    return "; ".join(f"{count} × {reason}" for reason, count in counted.most_common(REASONS_TOLD))
