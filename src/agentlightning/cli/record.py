"""``agl record``: an agent's rollouts, recorded and not learned from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli.options import Runs, Settings, Store, store_setting


def record(
    config: Annotated[Path, typer.Argument(help="TOML file with the configuration.")],
    rollouts: Annotated[int, typer.Option("--rollouts", min=1, help="Rollouts of each task.")] = 4,
    tasks: Annotated[
        int | None, typer.Option("--tasks", min=1, help="Most training tasks to use, the first ones; all by default.")
    ] = None,
    settings: Settings = None,
    store: Store = None,
    runs: Runs = Path("runs"),
) -> None:
    """Run the agent on its training tasks and keep the record, for `agl train --from-run` to learn from."""
    import asyncio
    from dataclasses import asdict

    import orjson

    from agentlightning.cli.display import Display
    from agentlightning.config_file import load_config
    from agentlightning.trainer.checkpoint import RunFolder
    from agentlightning.trainer.recording import record_rollouts
    from agentlightning.trainer.trainer import new_run_id

    loaded = load_config(config, settings or [], store_setting(store))
    with Display(f"record {config}") as display:
        done = asyncio.run(record_rollouts(loaded, RunFolder(runs, new_run_id()), display, rollouts, tasks))
    typer.echo(orjson.dumps(asdict(done)).decode())
