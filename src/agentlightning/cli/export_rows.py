"""``agl rollouts export-rows``: stored rollouts as conversations or preferences, for other trainers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentlightning.cli.options import RunId, Store, with_store

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore
    from agentlightning.trainer.data.export_dataset import DatasetExport


def export_rows(
    run: RunId,
    to: Annotated[Path, typer.Option("--to", help="New file, .jsonl.")],
    kind: Annotated[
        Literal["messages", "preferences"],
        typer.Option("--as", help="messages: a row for each conversation; preferences: pairs of one task."),
    ] = "messages",
    reward: Annotated[
        str | None, typer.Option("--reward", help="Name of the reward that counts; the rollouts' own by default.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option("--threshold", help="With messages: only rollouts with at least this reward.")
    ] = None,
    margin: Annotated[
        float | None, typer.Option("--margin", help="With preferences: rewards must differ by more than this.")
    ] = None,
    store: Store = None,
) -> None:
    """Write a run's training rollouts as rows of messages, or of preferences between two of one task."""
    import orjson

    from agentlightning.errors import ConfigError
    from agentlightning.runtime.disk import open_private
    from agentlightning.trainer.data.export_dataset import DatasetExport

    for option, value, of in (("--threshold", threshold, "messages"), ("--margin", margin, "preferences")):
        if value is not None and kind != of:
            raise ConfigError(f"{option}: has no effect with --as {kind}")
    if to.exists():
        raise ConfigError(f"--to: {to} exists already")
    if not to.parent.is_dir():
        raise ConfigError(f"--to: there is no folder {to.parent}")

    async def work(opened: LightningStore) -> tuple[list[bytes], DatasetExport]:
        rows = DatasetExport(store=opened, run_id=run, reward=reward)
        found = rows.conversations(threshold) if kind == "messages" else rows.preferences(margin or 0.0)
        return [orjson.dumps(row) + b"\n" async for row in found], rows

    lines, rows = with_store(store, work)
    with open_private(to, "wb") as file:
        file.writelines(lines)
    for reason, count in rows.left_out.most_common():
        if count:
            typer.echo(f"note: left out {count}: {reason}", err=True)
    typer.echo(f"{len(lines)} rows: {to}")
