"""``agl record``: an agent's rollouts, recorded and not learned from; or traces of an agent that ran elsewhere."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli.options import Runs, Settings, Store, print_json, run_shown, store_setting
from agentlightning.errors import ConfigError
from agentlightning.store.open import open_store, store_url

MAX_REASONS = 3
ROLLOUTS = 4

TraceFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--traces",
        help="In place of running an agent: a file of OpenTelemetry GenAI spans, conversations, request and response "
        "pairs or preferences (.jsonl, .json, .gz). May be repeated.",
    ),
]


def record(
    config: Annotated[Path | None, typer.Argument(help="TOML file with the configuration.")] = None,
    rollouts: Annotated[
        int | None, typer.Option("--rollouts", min=1, help="Rollouts of each task.", show_default=str(ROLLOUTS))
    ] = None,
    tasks: Annotated[
        int | None, typer.Option("--tasks", min=1, help="Training tasks to use, at most; all by default.")
    ] = None,
    traces: TraceFiles = None,
    task_fields: Annotated[
        str | None,
        typer.Option("--task-fields", help="With --traces: fields of a row that belong to its task: answer,source."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="With --traces: what lists call the run.")] = None,
    settings: Settings = None,
    store: Store = None,
    runs: Runs = Path("runs"),
) -> None:
    """Record rollouts, or import traces, for offline training.

    Runs the agent on its training tasks and stores the rollouts, for `agl train --from-run`.
    """
    if (config is None) == (not traces):
        raise ConfigError("record: give either a configuration, whose agent is run, or --traces FILE")
    of_traces = {"--name": name, "--task-fields": task_fields}
    of_agents = {"--set": settings, "--tasks": tasks, "--rollouts": rollouts}
    for option, value in (of_agents if traces else of_traces).items():
        if value:
            raise ConfigError(f"{option}: has no effect {'with' if traces else 'without'} --traces")
    if config is None:
        fields = [field.strip() for field in (task_fields or "").split(",") if field.strip()]
        asyncio.run(_record_traces(traces or [], fields, name, store_url(store)))
        return
    from agentlightning.config.file import load_config
    from agentlightning.trainer.check import record_rollouts

    loaded, count = load_config(config, settings or [], store_setting(store)), rollouts or ROLLOUTS
    title = f"record {config}"
    done = run_shown(title, runs, lambda folder, display: record_rollouts(loaded, folder, display, count, tasks))
    print_json(asdict(done))


async def _record_traces(files: list[Path], task_fields: list[str], name: str | None, url: str) -> None:
    from agentlightning.traces.importer import TraceImport
    from agentlightning.trainer.checkpoint import make_default_folder
    from agentlightning.trainer.training import new_run_id

    make_default_folder(url)
    async with open_store(url, os.environ.get("AGL_SERVER_KEY")) as opened:
        done = TraceImport(store=opened, run_id=new_run_id(), task_fields=task_fields)
        await done.read(files, name or ", ".join(file.name for file in files), lambda _: None)
    for what, counted in (("model calls cannot be learned from", done.left_out), ("spans were broken", done.broken)):
        if counted:
            reasons = "; ".join(f"{count} × {reason}" for reason, count in counted.most_common(MAX_REASONS))
            typer.echo(f"note: {counted.total()} {what}: {reasons}", err=True)
    if done.without:
        typer.echo(f"note: {done.without} rollouts have no model call that can be learned from", err=True)
    figures = {"rollouts": done.rollouts, "calls": done.calls, "rewarded": done.rewarded}
    print_json({"run_id": done.run_id, **figures})
