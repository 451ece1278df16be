"""``agl rollouts``: what agents did, call by call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from agentlightning.cli import drift, export_rows, traces
from agentlightning.cli.options import Store, open_store, store_url

if TYPE_CHECKING:
    from rich.console import Console

    from agentlightning.types import Rollout

MAX_REASON_CHARS = 240
"""Characters of what went wrong that a list shows."""

app = typer.Typer(help="List and show rollouts.", no_args_is_help=True, rich_markup_mode=None)
app.command("drift")(drift.show_drift)
app.command("export-rows")(export_rows.export_rows)
app.command("export-traces")(traces.export_traces)


@app.command("list")
def list_rollouts(
    run: Annotated[str, typer.Argument(help="Id of the run.")],
    mode: Annotated[str | None, typer.Option("--mode", help="train or eval.")] = None,
    state: Annotated[
        str | None, typer.Option("--state", help="queued, running, succeeded, failed or cancelled.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="Only those enqueued for this training step.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="List at most this many rollouts, newest first.")] = 20,
    store: Store = None,
) -> None:
    """List the rollouts of a run, newest first."""
    import asyncio
    from typing import get_args

    from agentlightning.errors import ConfigError, NotFoundError
    from agentlightning.store.base import RolloutQuery
    from agentlightning.trainer.display import screen
    from agentlightning.types import Mode, RolloutState

    for name, value, known in (("--mode", mode, get_args(Mode)), ("--state", state, get_args(RolloutState))):
        if value is not None and value not in known:
            raise ConfigError(f"{name}: expected one of {', '.join(known)}, got {value!r}")

    async def work() -> None:
        query = RolloutQuery(
            run_id=run,
            mode=mode,  # type: ignore[arg-type]  # checked above
            states=[state] if state else None,  # type: ignore[list-item]
            step=step,
            limit=limit,
            newest_first=True,
        )
        async with open_store(store_url(store)) as opened:
            found = await opened.rollouts(query)
            if not found and not await opened.runs(ids=[run]):
                raise NotFoundError(f"{run}: no such run; see: agl runs list")
        print_rollouts(screen(), found)

    asyncio.run(work())


@app.command("show")
def show_rollout(
    rollout: Annotated[str, typer.Argument(help="Id of the rollout.")],
    tokens: Annotated[bool, typer.Option("--tokens", help="Also print token ids and logprobs, one per line.")] = False,
    spans: Annotated[
        bool, typer.Option("--spans", help="Also print what the agent did between its model calls, as a tree.")
    ] = False,
    store: Store = None,
) -> None:
    """Show a rollout: the conversation, its tokens with logprobs, and its rewards."""
    import asyncio

    from agentlightning.analysis.rollout_view import print_rollout
    from agentlightning.errors import NotFoundError
    from agentlightning.store.base import RolloutQuery
    from agentlightning.trainer.display import screen

    async def work() -> None:
        async with open_store(store_url(store)) as opened:
            found = await opened.rollouts(RolloutQuery(ids=[rollout]))
            if not found:
                raise NotFoundError(f"{rollout}: no such rollout; see: agl rollouts list RUN")
            calls = await opened.calls([rollout])
            rewards = await opened.rewards([rollout])
            attempts = await opened.attempts([rollout])
            recorded = await opened.spans([rollout]) if spans else []
        print_rollout(screen(), found[0], attempts, calls, rewards, tokens)
        if spans:
            traces.print_spans(screen(), [span for span in recorded if span.attempt == found[0].attempt], calls)

    asyncio.run(work())


def print_rollouts(console: Console, rollouts: list[Rollout]) -> None:
    """A line for each rollout, and below it what went wrong: no terminal is wide enough for both."""
    if not rollouts:
        console.print("no rollout matches")
        return
    rows = [("rollout", "mode", "step", "group", "state", "try", "calls", "reward", "outcome")]
    rows += [
        (
            rollout.id,
            rollout.mode,
            str(rollout.step),
            f"{rollout.group_id}/{rollout.replica}",
            rollout.state,
            str(rollout.attempt),
            str(rollout.calls),
            "-" if rollout.reward is None else f"{rollout.reward:.3f}",
            rollout.outcome or "",
        )
        for rollout in rollouts
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, rollout in zip(rows, [None, *rollouts], strict=True):
        line = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        console.print(line, soft_wrap=True, style="bold" if rollout is None else None)
        wrong = "" if rollout is None else (rollout.error or rollout.warning or "").strip()
        if wrong:
            last = wrong.splitlines()[-1][:MAX_REASON_CHARS]
            console.print(f"    {last}", soft_wrap=True, style="yellow")
