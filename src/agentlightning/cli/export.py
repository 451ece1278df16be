"""``agl export``: a run's trained model as a transformers folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli.options import Runs, Store, open_store


def export(
    run: Annotated[str, typer.Argument(help="Id of the run.")],
    to: Annotated[Path, typer.Option("--to", help="New folder for the model.")],
    policy: Annotated[str | None, typer.Option(help="Which one, of a run that trains several policies.")] = None,
    store: Store = None,
    runs: Runs = Path("runs"),
) -> None:
    """Write the model of the run's last checkpoint as a folder that transformers (and vLLM) loads."""
    import asyncio

    from agentlightning.errors import NotFoundError
    from agentlightning.trainer.checkpoint import RunFolder, export_policy, last_checkpoint

    async def work() -> None:
        async with open_store(store or RunFolder(runs, run).config().store.url) as opened:
            checkpoint = await last_checkpoint(opened, run)
        if checkpoint is None:
            raise NotFoundError(f"{run}: has no checkpoint yet; see: agl runs list")
        export_policy(Path(checkpoint.path), to, policy)
        typer.echo(f"step {checkpoint.step}, version {checkpoint.version}: {to}")

    asyncio.run(work())
