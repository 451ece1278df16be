"""``agl rollouts``: what agents did, call by call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal

import orjson
import typer

from agentlightning.cli import export_rows, fork, traces
from agentlightning.cli.options import Json, Mode, RunId, Step, Store, print_json, with_store
from agentlightning.records import RolloutState
from agentlightning.store.summaries import RolloutSummary

if TYPE_CHECKING:
    from rich.console import Console

    from agentlightning.records import Rollout
    from agentlightning.store.base import LightningStore
    from agentlightning.store.summaries import SummaryQuery

Warnings = Mapping[str, str]

MAX_REASON_CHARS = 240
"""Characters of what went wrong that a list shows."""

app = typer.Typer(help="List, show, fork and export rollouts.", no_args_is_help=True, rich_markup_mode=None)
app.command("fork")(fork.fork_rollout)
app.command("execute")(fork.execute_rollouts)
app.command("export")(export_rows.export)


@app.command("list")
def list_rollouts(
    run: RunId,
    mode: Mode = None,
    state: Annotated[
        Literal[RolloutState, "refused"] | None,
        typer.Option("--state", help="Only rollouts in this state; refused ones are among those that failed."),
    ] = None,
    step: Step = None,
    where: Annotated[
        str,
        typer.Option(
            "--where", help="Only finished rollouts that match: \"reward < 0.2 and step > 50 and agent = 'writer'\"."
        ),
    ] = "",
    sort: Annotated[
        Literal["finished", "reward", "step", "turns", "sampled_tokens", "duration"] | None,
        typer.Option("--sort", help="List finished rollouts by this, largest first; newest first by default."),
    ] = None,
    ascending: Annotated[
        bool, typer.Option("--ascending", help="Smallest, or oldest, first (--where, --sort).")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="List at most this many rollouts.")] = 20,
    after: Annotated[
        str | None, typer.Option("--after", help="Go on where a list of --where or --sort ended: what it printed last.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all that is known of each.")] = False,
    store: Store = None,
) -> None:
    """List the rollouts of a run, newest first. With a filter or an order: of finished ones, from their summaries."""
    from agentlightning.store.base import RolloutQuery
    from agentlightning.store.scan import find_run
    from agentlightning.store.summaries import SummaryQuery
    from agentlightning.trainer.display import screen

    by_summary = bool(where or sort or after or ascending) or state == "refused"
    listed = SummaryQuery(
        run_id=run,
        where=_where(where, mode, state, step),
        order_by=sort or "finished",
        descending=not ascending,
        after=after,
    )

    async def work(opened: LightningStore) -> tuple[Sequence[Rollout | RolloutSummary], str | None]:
        await find_run(opened, run)
        if by_summary:
            return await _summaries(opened, listed, limit)
        states = None if state is None or state == "refused" else [state]
        query = RolloutQuery(run_id=run, mode=mode, step=step, states=states, limit=limit, newest_first=True)
        return await opened.rollouts(query), None

    async def with_warnings(opened: LightningStore) -> tuple[Sequence[Rollout | RolloutSummary], str | None, Warnings]:
        rollouts, following = await work(opened)
        return rollouts, following, {} if as_json else await _replay_warnings(opened, rollouts)

    found, further, warnings = with_store(store, with_warnings)
    if as_json:
        print(orjson.dumps({"rollouts": found, "next": further}).decode())
        return
    print_rollouts(screen(), found, warnings)
    if further is not None:
        screen().print(f"more of them: --after {further}", soft_wrap=True)


def _where(where: str, mode: str | None, state: str | None, step: int | None) -> str:
    """The filter, with what other options ask for; what the user wrote comes first, so that positions in it are right."""
    from agentlightning.store.where import parse

    parse(where)
    parts = [f"({where})"] if where.strip() else []
    parts += [
        f"{name} = '{value}'" for name, value in (("mode", mode), ("state", state)) if value and value != "refused"
    ]
    parts += ["refused = true"] if state == "refused" else []
    parts += [f"step = {step}"] if step is not None else []
    return " and ".join(parts)


async def _summaries(store: LightningStore, query: SummaryQuery, limit: int) -> tuple[list[RolloutSummary], str | None]:
    """At most `limit` rows in pages, and the cursor behind the last."""
    from agentlightning.store.summaries import MAX_LIMIT

    found: list[RolloutSummary] = []
    further = query.after
    while len(found) < limit:
        page = await store.summaries(replace(query, after=further, limit=min(limit - len(found), MAX_LIMIT)))
        found, further = found + page.rows, page.next
        if further is None:
            break
    return found, further


async def _replay_warnings(store: LightningStore, listed: Sequence[Rollout | RolloutSummary]) -> Warnings:
    """By rollout: of the forks among them, those whose replay ended too early."""
    from agentlightning.store.base import RolloutQuery
    from agentlightning.store.forks import replay_warning

    found = await store.rollouts(RolloutQuery(ids=[one.id for one in listed]))
    rollouts = [one for one in found if one.kind == "fork"]
    calls = await store.calls([one.id for one in rollouts])
    warnings = {one.id: replay_warning(one, [call for call in calls if call.rollout_id == one.id]) for one in rollouts}
    return {rollout_id: warning for rollout_id, warning in warnings.items() if warning}


@app.command("show")
def show_rollout(
    rollout: Annotated[str, typer.Argument(help="Id of the rollout.")],
    tokens: Annotated[bool, typer.Option("--tokens", help="Also print token ids and logprobs, one per line.")] = False,
    spans: Annotated[
        bool, typer.Option("--spans", help="Also print what the agent did between its model calls, as a tree.")
    ] = False,
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Show a rollout: the conversation, its tokens with logprobs, and its rewards."""
    from agentlightning.analysis.rollout_view import print_rollout
    from agentlightning.errors import NotFoundError
    from agentlightning.store.base import RolloutQuery
    from agentlightning.store.scan import read_feedback
    from agentlightning.trainer.display import screen

    async def work(opened: LightningStore) -> None:
        found = await opened.rollouts(RolloutQuery(ids=[rollout]))
        if not found:
            raise NotFoundError(f"{rollout}: no such rollout; see: agl rollouts list RUN")
        calls = await opened.calls([rollout])
        rewards = await opened.rewards([rollout])
        attempts = await opened.attempts([rollout])
        (feedback,) = await read_feedback(opened, found)
        recorded = [one for one in await opened.spans([rollout]) if one.attempt == found[0].attempt]
        if as_json:
            parts = {"attempts": attempts, "calls": calls, "rewards": rewards, "spans": recorded, "feedback": feedback}
            print_json({"rollout": found[0], **parts})
            return
        print_rollout(screen(), found[0], attempts, calls, rewards, tokens, feedback)
        if spans:
            traces.print_spans(screen(), recorded, calls)

    with_store(store, work)


def print_rollouts(
    console: Console, rollouts: Sequence[Rollout | RolloutSummary], warnings: Warnings = MappingProxyType({})
) -> None:
    """A line for each rollout, and below it what went wrong: no terminal is wide enough for both. warnings: by rollout."""
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
            str(rollout.attempts if isinstance(rollout, RolloutSummary) else rollout.attempt),
            str(rollout.turns if isinstance(rollout, RolloutSummary) else rollout.calls),
            "-" if rollout.reward is None else f"{rollout.reward:.3f}",
            rollout.outcome or "",
        )
        for rollout in rollouts
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, rollout in zip(rows, [None, *rollouts], strict=True):
        line = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        console.print(line, soft_wrap=True, style="bold" if rollout is None else None)
        for wrong in () if rollout is None else (_why(rollout), warnings.get(rollout.id)):
            if wrong and wrong.strip():
                last = wrong.strip().splitlines()[-1][:MAX_REASON_CHARS]
                console.print(f"    {last}", soft_wrap=True, style="yellow")


def _why(rollout: Rollout | RolloutSummary) -> str | None:
    """The reason why a rollout failed, or looks suspicious: a refusal says more than the error that it became."""
    if isinstance(rollout, RolloutSummary):
        return rollout.failure
    return rollout.warning if rollout.refused else rollout.error or rollout.warning
