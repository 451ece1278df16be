"""``agl export``: a run's trained model as a transformers folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli.options import Runs, Store, open_store


def export(
    run: Annotated[str, typer.Argument(help="Id of the run.")],
    to: Annotated[Path, typer.Option("--to", help="New folder for the model.")],
    store: Store = None,
    runs: Runs = Path("runs"),
) -> None:
    """Write the model of the run's last checkpoint as a folder that transformers (and vLLM) loads."""
    import asyncio

    from agentlightning.errors import NotFoundError
    from agentlightning.trainer.checkpoint import RunFolder, last_checkpoint
    from agentlightning.trainer.checkpoint import export as copy

    async def work() -> None:
        async with open_store(store or RunFolder(runs, run).config().store.url) as opened:
            checkpoint = await last_checkpoint(opened, run)
        if checkpoint is None:
            raise NotFoundError(f"{run}: has no checkpoint yet; see: agl runs list")
        copy(Path(checkpoint.path), to)
        typer.echo(f"step {checkpoint.step}, version {checkpoint.version}: {to}")

    asyncio.run(work())
