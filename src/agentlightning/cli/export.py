"""``agl export``: a run's trained model as a transformers folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli.options import RunId, Runs, Store, trained_checkpoint


def export(
    run: RunId,
    to: Annotated[Path, typer.Option("--to", help="New folder for the model.")],
    policy: Annotated[str | None, typer.Option(help="Which one, of a run that trains several policies.")] = None,
    store: Store = None,
    runs: Runs = Path("runs"),
) -> None:
    """Write the model of the run's last checkpoint as a folder that transformers (and vLLM) loads."""
    from agentlightning.trainer.checkpoint import RunFolder, export_policy
    from agentlightning.trainer.run_config import run_config

    folder = RunFolder(runs, run)
    checkpoint = trained_checkpoint(store or run_config(folder).store.url, folder)
    export_policy(Path(checkpoint.path), to, policy)
    typer.echo(f"step {checkpoint.step}, version {checkpoint.version}: {to}")
