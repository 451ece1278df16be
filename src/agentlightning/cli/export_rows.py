"""``agl rollouts export``: stored rollouts as conversations or preferences for other trainers, or as traces for viewers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentlightning.cli.options import RunId, Store, with_store
from agentlightning.cli.traces import export_traces

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore
    from agentlightning.trainer.data.export_dataset import DatasetExport


def export(
    run: RunId,
    to: Annotated[str, typer.Option("--to", help="New .jsonl file; for traces also the URL of an OTLP/HTTP endpoint.")],
    kind: Annotated[
        Literal["messages", "preferences", "traces"],
        typer.Option("--as", help="messages: a row per conversation; preferences: pairs of one task; traces: OTLP."),
    ] = "messages",
    reward: Annotated[
        str | None, typer.Option("--reward", help="Name of the reward that counts; default: the final one.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option("--threshold", help="With messages: only rollouts with at least this reward.")
    ] = None,
    margin: Annotated[
        float | None, typer.Option("--margin", help="With preferences: rewards must differ by more than this.")
    ] = None,
    store: Store = None,
) -> None:
    """Write a run's rollouts as rows of messages, as preferences between two of one task, or as OpenTelemetry traces.

    Headers of an OTLP endpoint come from OTEL_EXPORTER_OTLP_HEADERS.
    """
    from agentlightning.errors import ConfigError

    taken = {"messages": {"--reward", "--threshold"}, "preferences": {"--reward", "--margin"}, "traces": set[str]()}
    for option, value in (("--reward", reward), ("--threshold", threshold), ("--margin", margin)):
        if value is not None and option not in taken[kind]:
            raise ConfigError(f"{option}: conflicts with --as {kind}")
    if kind == "traces":
        export_traces(run, to, store)
    else:
        _export_rows(run, Path(to), kind, reward, threshold if kind == "messages" else margin, store)


def _export_rows(
    run: str,
    to: Path,
    kind: Literal["messages", "preferences"],
    reward: str | None,
    bound: float | None,
    store: str | None,
) -> None:
    import orjson

    from agentlightning.errors import ConfigError
    from agentlightning.runtime.disk import open_private
    from agentlightning.trainer.data.export_dataset import DatasetExport

    if to.exists():
        raise ConfigError(f"--to: {to} exists already")
    if not to.parent.is_dir():
        raise ConfigError(f"--to: there is no folder {to.parent}")

    async def work(opened: LightningStore) -> tuple[list[bytes], DatasetExport]:
        rows = DatasetExport(store=opened, run_id=run, reward=reward)
        found = rows.conversations(bound) if kind == "messages" else rows.preferences(bound or 0.0)
        return [orjson.dumps(row) + b"\n" async for row in found], rows

    lines, rows = with_store(store, work)
    with open_private(to, "wb") as file:
        file.writelines(lines)
    for reason, count in rows.left_out.most_common():
        if count:
            typer.echo(f"note: left out {count}: {reason}", err=True)
    typer.echo(f"{len(lines)} rows: {to}")
