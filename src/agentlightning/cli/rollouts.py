"""``agl rollouts``: what agents did, call by call."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentlightning.cli import drift, export_rows, replay, traces
from agentlightning.cli.options import Mode, RunId, Step, Store, with_store
from agentlightning.types import RolloutState

if TYPE_CHECKING:
    from rich.console import Console

    from agentlightning.store.base import LightningStore, RolloutQuery
    from agentlightning.types import Rollout

MAX_REASON_CHARS = 240
"""Characters of what went wrong that a list shows."""

app = typer.Typer(help="List, show and replay rollouts.", no_args_is_help=True, rich_markup_mode=None)
app.command("replay")(replay.replay)
app.command("drift")(drift.show_drift)
app.command("export-rows")(export_rows.export_rows)
app.command("export-traces")(traces.export_traces)


@app.command("list")
def list_rollouts(
    run: RunId,
    mode: Mode = None,
    state: Annotated[
        Literal[RolloutState, "refused"] | None,
        typer.Option("--state", help="Only rollouts in this state; refused ones are among those that failed."),
    ] = None,
    step: Step = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="List at most this many rollouts, newest first.")] = 20,
    store: Store = None,
) -> None:
    """List the rollouts of a run, newest first."""
    from agentlightning.store.base import RolloutQuery
    from agentlightning.store.scan import find_run
    from agentlightning.trainer.display import screen

    query = RolloutQuery(run_id=run, mode=mode, step=step)

    async def work(opened: LightningStore) -> list[Rollout]:
        await find_run(opened, run)
        if state == "refused":
            return await _refused(opened, query, limit)
        states = None if state is None else [state]
        return await opened.rollouts(replace(query, states=states, limit=limit, newest_first=True))

    print_rollouts(screen(), with_store(store, work))


async def _refused(store: LightningStore, query: RolloutQuery, limit: int) -> list[Rollout]:
    """The newest rollouts that are refused, newest first."""
    from agentlightning.store.scan import read_rollouts

    newest: deque[Rollout] = deque(maxlen=limit)
    async for failed in read_rollouts(store, replace(query, states=["failed"])):
        newest.extend(rollout for rollout in failed if rollout.refused)
    return list(reversed(newest))


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
    from agentlightning.analysis.rollout_view import print_rollout
    from agentlightning.errors import NotFoundError
    from agentlightning.store.base import RolloutQuery
    from agentlightning.trainer.display import screen

    async def work(opened: LightningStore) -> None:
        found = await opened.rollouts(RolloutQuery(ids=[rollout]))
        if not found:
            raise NotFoundError(f"{rollout}: no such rollout; see: agl rollouts list RUN")
        calls = await opened.calls([rollout])
        rewards = await opened.rewards([rollout])
        attempts = await opened.attempts([rollout])
        print_rollout(screen(), found[0], attempts, calls, rewards, tokens)
        if spans:
            recorded = [span for span in await opened.spans([rollout]) if span.attempt == found[0].attempt]
            traces.print_spans(screen(), recorded, calls)

    with_store(store, work)


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
            "refused" if rollout.refused else rollout.state,
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
        wrong = "" if rollout is None else (_why(rollout) or "").strip()
        if wrong:
            last = wrong.splitlines()[-1][:MAX_REASON_CHARS]
            console.print(f"    {last}", soft_wrap=True, style="yellow")


def _why(rollout: Rollout) -> str | None:
    """The reason why a rollout failed, or looks suspicious: a refusal says more than the error that it became."""
    return rollout.warning if rollout.refused else rollout.error or rollout.warning
