"""``agl rollouts``: what agents did, call by call; and rollouts that continue a recorded one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentlightning.cli.options import (
    Json,
    Mode,
    RunId,
    Runs,
    Settings,
    Step,
    Store,
    number,
    own_config,
    print_json,
    say,
    trained_checkpoint,
    with_store,
)
from agentlightning.errors import ConflictError, NotFoundError
from agentlightning.records import RolloutState
from agentlightning.store.summaries import RolloutSummary

if TYPE_CHECKING:
    from agentlightning.records import Call, Rollout, Run, Span
    from agentlightning.store.base import LightningStore
    from agentlightning.store.summaries import SummaryQuery

Listed = Sequence["Rollout | RolloutSummary"]

MAX_REASON_CHARS = 240
"""Characters of what went wrong that a list shows."""
MAX_DEPTH = 40
"""Levels of a tree of spans that are indented."""
MAX_TEXT_CHARS = 160
"""Characters that a span's line shows of each text that the agent gave."""
HEAD = ("rollout", "mode", "step", "group", "state", "try", "calls", "reward", "outcome")

Where = Annotated[
    str,
    typer.Option(
        "--where", help="Only finished rollouts that match: \"reward < 0.2 and step > 50 and agent = 'writer'\"."
    ),
]
State = Annotated[
    Literal[RolloutState, "refused"] | None,
    typer.Option("--state", help="Only rollouts in this state; refused ones are among those that failed."),
]
Sort = Annotated[
    Literal["finished", "reward", "step", "turns", "sampled_tokens", "duration"] | None,
    typer.Option("--sort", help="List finished rollouts by this, largest first; newest first by default."),
]
After = Annotated[
    str | None, typer.Option("--after", help="Go on where a list of --where or --sort ended: what it printed last.")
]

app = typer.Typer(
    help="Rollouts of a run, call by call; and forks of them.", no_args_is_help=True, rich_markup_mode=None
)


@app.command("list")
def list_rollouts(
    run: RunId,
    mode: Mode = None,
    state: State = None,
    step: Step = None,
    where: Where = "",
    sort: Sort = None,
    ascending: Annotated[
        bool, typer.Option("--ascending", help="Smallest, or oldest, first (--where, --sort).")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="List at most this many rollouts.")] = 20,
    after: After = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all that is known of each.")] = False,
    store: Store = None,
) -> None:
    """List the rollouts of a run, newest first. With a filter or an order: of finished ones, from their summaries."""
    from agentlightning.store.base import RolloutQuery
    from agentlightning.store.scan import find_run
    from agentlightning.store.summaries import SummaryQuery

    by_summary = bool(where or sort or after or ascending) or state == "refused"
    filtered = _where(where, mode, state, step)
    summaries = SummaryQuery(
        run_id=run, where=filtered, order_by=sort or "finished", descending=not ascending, after=after
    )
    states = None if state is None or state == "refused" else [state]
    query = RolloutQuery(run_id=run, mode=mode, step=step, states=states, limit=limit, newest_first=True)

    async def work(opened: LightningStore) -> tuple[Listed, str | None, dict[str, str]]:
        await find_run(opened, run)
        found: Listed
        if by_summary:
            found, following = await _summaries(opened, summaries, limit)
        else:
            found, following = await opened.rollouts(query), None
        return found, following, {} if as_json else await _replay_warnings(opened, found)

    found, further, warnings = with_store(store, work)
    if as_json:
        print_json({"rollouts": found, "next": further})
        return
    _print_rollouts(found, warnings)
    if further is not None:
        say(f"more of them: --after {further}")


def _where(where: str, mode: str | None, state: str | None, step: int | None) -> str:
    """The filter, with what other options ask for; what the user wrote comes first, so that positions in it are right."""
    from agentlightning.store.where import parse

    parse(where)
    parts = [f"({where})"] if where.strip() else []
    parts += [f"mode = '{mode}'"] if mode else []
    parts += ["refused = true" if state == "refused" else f"state = '{state}'"] if state else []
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


async def _replay_warnings(store: LightningStore, listed: Listed) -> dict[str, str]:
    """By rollout: of the forks among them, those whose replay ended too early."""
    from agentlightning.store.base import RolloutQuery
    from agentlightning.store.forks import replay_warning

    found = await store.rollouts(RolloutQuery(ids=[one.id for one in listed]))
    forks = [one for one in found if one.kind == "fork"]
    calls = await store.calls([one.id for one in forks])
    warnings = {one.id: replay_warning(one, [call for call in calls if call.rollout_id == one.id]) for one in forks}
    return {rollout_id: warning for rollout_id, warning in warnings.items() if warning}


def _print_rollouts(rollouts: Listed, warnings: Mapping[str, str]) -> None:
    """A line for each rollout, and below it what went wrong: no terminal is wide enough for both. warnings: by rollout."""
    if not rollouts:
        say("no rollout matches")
        return
    rows = [HEAD, *map(_row, rollouts)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, rollout in zip(rows, [None, *rollouts], strict=True):
        line = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        say(line, style="bold" if rollout is None else None)
        for wrong in () if rollout is None else (_why(rollout), warnings.get(rollout.id)):
            if wrong and wrong.strip():
                say(f"    {wrong.strip().splitlines()[-1][:MAX_REASON_CHARS]}", style="yellow")


def _row(one: Rollout | RolloutSummary) -> tuple[str, ...]:
    tries, calls = (one.attempts, one.turns) if isinstance(one, RolloutSummary) else (one.attempt, one.calls)
    state = "refused" if one.refused else one.state
    place = one.id, one.mode, str(one.step), f"{one.group_id}/{one.replica}"
    return *place, state, str(tries), str(calls), number(one.reward), one.outcome or ""


def _why(rollout: Rollout | RolloutSummary) -> str | None:
    """The reason why a rollout failed, or looks suspicious: a refusal says more than the error that it became."""
    if isinstance(rollout, RolloutSummary):
        return rollout.failure
    return rollout.warning if rollout.refused else rollout.error or rollout.warning


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
    """Show a rollout: the conversation, its tokens and rewards."""
    from agentlightning.analysis.rollout_view import print_rollout
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
            _print_spans(recorded, calls)

    with_store(store, work)


def _print_spans(spans: list[Span], calls: list[Call]) -> None:
    """A line for each span of an attempt, with its time since the first, its duration and what went wrong; below a span
    the spans and the model calls that were made in it."""
    from agentlightning.adapters.semantics import error_of
    from agentlightning.adapters.span_tree import SpanTree
    from agentlightning.records import Call
    from agentlightning.trainer.display import screen

    if not spans:
        say("no span was recorded")
        return
    tree, console = SpanTree(spans), screen()
    inside = [call for call in calls if call.span_id is not None and tree.get(call.span_id) is not None]
    for depth, each in tree.rows(inside):
        if isinstance(each, Call):
            what, wrong = f"model call {each.id}", None
        else:
            what, wrong = each.name + _said(each), error_of(each)
        at, took = (each.started_ns - tree.spans[0].started_ns) / 1e9, (each.finished_ns - each.started_ns) / 1e9
        indent = "  " * min(depth, MAX_DEPTH)
        console.print(f"{at:9.3f} s  {took:8.3f} s  {indent}{what}", soft_wrap=True, highlight=False, markup=False)
        if wrong:
            console.print(f"{'':24}{indent}{wrong}", soft_wrap=True, style="yellow", markup=False)


def _said(span: Span) -> str:
    """Content that the agent gave with the span: a message, an object, a tool's arguments and result; '' for any other."""
    from agentlightning.adapters.semantics import text_of, tool_use

    use = tool_use(span)
    texts = [text_of(span.attributes, name) for name in ("agl.message", "agl.object.name", "agl.object")]
    if use is not None:
        texts += [use.arguments, None if use.result is None else f"→ {use.result}"]
    parts = [" ".join(text.split()) for text in texts if text]
    return "".join(f"  {text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 1] + '…'}" for text in parts)


@app.command("fork")
def fork_rollout(
    rollout: Annotated[str, typer.Argument(help="Id of the finished rollout that they continue.")],
    calls: Annotated[
        int, typer.Option("--calls", min=0, help="Answer so many of its policy's calls from the record; then sample.")
    ],
    count: Annotated[int, typer.Option("--count", min=1, max=1000, help="Make so many.")] = 1,
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Enqueue rollouts that continue a recorded one.

    They put an agent back into a state in which it was; their ids are printed.

    The run's workers execute them, after its end those of `agl rollouts execute`: its agent is started anew, and its first
    calls are answered from the record. `agl rollouts show ID` shows what became of one.
    """
    from agentlightning.store.forks import new_forks
    from agentlightning.store.scan import find_run

    async def work(opened: LightningStore) -> tuple[list[Rollout], Run]:
        made = await opened.enqueue(await new_forks(opened, rollout, calls, count))
        return made, await find_run(opened, made[0].run_id)

    made, run = with_store(store, work)
    if as_json:
        print_json({"rollouts": [one.id for one in made], "group_id": made[0].group_id, "run_id": run.id})
        return
    for one in made:
        typer.echo(one.id)
    if run.state != "running":
        command = "rollouts execute" if run.state == "finished" else "train --resume"
        typer.echo(f"run {run.id} is {run.state}: they wait for: agl {command} {run.id}", err=True)


@app.command("execute")
def execute_rollouts(run: RunId, settings: Settings = None, store: Store = None, runs: Runs = Path("runs")) -> None:
    """Execute the rollouts that wait in a finished run, such as forks.

    Its last checkpoint, or the model of a run that trained nothing, is served, and its workers are started, until none
    waits.
    """
    from agentlightning.store.base import RolloutQuery
    from agentlightning.store.scan import find_run
    from agentlightning.trainer.checkpoint import RunFolder, policies_in
    from agentlightning.trainer.display import Display
    from agentlightning.trainer.interrupts import run_interruptible
    from agentlightning.trainer.policies import with_models
    from agentlightning.trainer.serving import execute_waiting, is_training

    folder = RunFolder(runs, run)
    config = own_config(folder, settings, store)

    async def waiting(opened: LightningStore) -> tuple[Run, list[Rollout]]:
        query = RolloutQuery(run_id=run, states=["queued", "running"], limit=1)
        return await find_run(opened, run), await opened.rollouts(query)

    found, some = with_store(config.store.url, waiting)
    if found.state != "finished":
        why = f"expected a finished run, this is {found.state}: its own workers execute its rollouts"
        raise ConflictError(f"{run}: {why}")
    if not some:
        raise ConflictError(f"{run}: no rollout waits; fork one by: agl rollouts fork ROLLOUT --calls N")
    step = 0
    if is_training(found):
        checkpoint = trained_checkpoint(config.store.url, folder)
        config, step = with_models(config, policies_in(Path(checkpoint.path))), checkpoint.step
    with Display(f"execute {run}") as display:
        done = run_interruptible(lambda: execute_waiting(config, folder, display, step))
    for one in done:
        typer.echo(f"{one.id}  {one.state}" + ("" if one.reward is None else f"  reward {one.reward:g}"))
