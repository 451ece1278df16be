"""``agl rollouts export-rows``: stored rollouts as conversations or preferences, for other trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli.options import Store, open_store, store_url

KINDS = ("messages", "preferences")


def export_rows(
    run: Annotated[str, typer.Argument(help="Id of the run.")],
    to: Annotated[Path, typer.Option("--to", help="New file, .jsonl.")],
    kind: Annotated[
        str, typer.Option("--as", help="messages: a row for each conversation; preferences: pairs of one task.")
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
    import asyncio

    import orjson

    from agentlightning.errors import ConfigError
    from agentlightning.trainer.data.export_dataset import DatasetExport

    if kind not in KINDS:
        raise ConfigError(f"--as: expected {' or '.join(KINDS)}, got {kind!r}")
    for option, value, of in (("--threshold", threshold, KINDS[0]), ("--margin", margin, KINDS[1])):
        if value is not None and kind != of:
            raise ConfigError(f"{option}: has no effect with --as {kind}")
    if to.exists():
        raise ConfigError(f"--to: {to} exists already")
    if not to.parent.is_dir():
        raise ConfigError(f"--to: there is no folder {to.parent}")

    async def work() -> tuple[int, DatasetExport]:
        async with open_store(store_url(store)) as opened:
            rows = DatasetExport(store=opened, run_id=run, reward=reward)
            found = rows.conversations(threshold) if kind == KINDS[0] else rows.preferences(margin or 0.0)
            lines = [orjson.dumps(row) + b"\n" async for row in found]
        to.write_bytes(b"".join(lines))
        return len(lines), rows

    written, rows = asyncio.run(work())
    for reason, count in rows.left_out.most_common():
        if count:
            typer.echo(f"note: left out {count}: {reason}", err=True)
    typer.echo(f"{written} rows: {to}")
