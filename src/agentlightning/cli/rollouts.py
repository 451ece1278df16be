"""``agl rollouts``: what agents did, call by call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from agentlightning.cli import drift, export_rows, traces
from agentlightning.cli.options import Store, open_store, store_url

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from agentlightning.types import Attempt, Call, Reward, Rollout

LONGEST_REASON = 240
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
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most rollouts to list, newest first.")] = 20,
    store: Store = None,
) -> None:
    """List the rollouts of a run, newest first."""
    import asyncio
    from typing import get_args

    from agentlightning.cli.display import screen
    from agentlightning.errors import ConfigError, NotFoundError
    from agentlightning.store.base import RolloutQuery
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
    tokens: Annotated[bool, typer.Option("--tokens", help="Also print token ids and logprobs, one a line.")] = False,
    spans: Annotated[
        bool, typer.Option("--spans", help="Also print what the agent did outside its model calls, as a tree.")
    ] = False,
    store: Store = None,
) -> None:
    """Show a rollout: the conversation, its tokens with logprobs, and its rewards."""
    import asyncio

    from agentlightning.cli.display import screen
    from agentlightning.errors import NotFoundError
    from agentlightning.store.base import RolloutQuery

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
            last = wrong.splitlines()[-1][:LONGEST_REASON]
            console.print(f"    {last}", soft_wrap=True, style="yellow")


def print_rollout(
    console: Console,
    rollout: Rollout,
    attempts: list[Attempt],
    calls: list[Call],
    rewards: list[Reward],
    tokens: bool = False,
) -> None:
    """Print one rollout for a person; shared with ``agl check``."""
    import orjson

    console.print(
        f"rollout {rollout.id}  {rollout.mode}  step {rollout.step}  {rollout.state}  attempt {rollout.attempt}",
        soft_wrap=True,
    )
    console.print(f"task {orjson.dumps(rollout.task).decode()}", soft_wrap=True)
    for number, call in enumerate(calls, 1):
        version = ", ".join(f"v{span.version}" for span in call.versions)
        cause = f"  fork: {call.fork_cause}" if call.fork_cause else ""
        if call.context_only:
            cause += f" ({call.context_only} sampled tokens are context only)"
        by = f" by {call.agent}" if call.agent else ""
        console.print(
            f"── call {number}{by}  {call.policy or call.model}  "
            + (_outside(call) if not call.policy else f"{version}  {_sampled(call)}{cause}"),
            soft_wrap=True,
            style="dim",
        )
        for message in (*call.messages, call.answer):
            console.print(_message(message), soft_wrap=True)
        if tokens:
            for token, logprob in zip(call.sampled_ids, call.logprobs, strict=True):
                console.print(f"    {token:>8}  {logprob:9.4f}")
    console.print("──", style="dim")
    for reward in rewards:
        where = f" on call {reward.call_id}" if reward.call_id else ""
        line = f"reward {reward.name} {reward.value:g} ({reward.source}, attempt {reward.attempt}){where}"
        console.print(line, soft_wrap=True)
    console.print(f"final reward {rollout.reward}  outcome {rollout.outcome}")
    if rollout.warning:
        console.print(rollout.warning, soft_wrap=True, style="yellow")
    for attempt in attempts:
        console.print(f"attempt {attempt.attempt}  {attempt.state}  {attempt.worker_id}", soft_wrap=True)
        for title, text in (("error", attempt.error), ("output", attempt.output)):
            if text and not (title == "output" and attempt.error and text.strip() in attempt.error):
                console.print(f"  {title}: {text.strip()}", soft_wrap=True, style="yellow")


def _sampled(call: Call) -> str:
    return (
        f"prompt {call.prompt_tokens} tokens  sampled {len(call.sampled_ids)}  logprob {sum(call.logprobs):.2f}  "
        f"T={call.sampling.temperature:g}"
    )


def _outside(call: Call) -> str:
    """Of a call whose tokens no policy of ours sampled: what its model said that it used, if anything."""
    used = [
        f"{what} {call.usage[name]} tokens"
        for what, name in (("prompt", "prompt_tokens"), ("sampled", "sampled_tokens"))
        if call.usage.get(name)
    ]
    return "  ".join([*used, "text only"])


def _message(message: dict[str, object]) -> Text:
    import orjson
    from rich.text import Text

    role = str(message.get("role", ""))
    style = {"assistant": "bold green", "user": "cyan", "system": "magenta", "tool": "blue"}.get(role, "")
    content = message.get("content")
    body = content if isinstance(content, str) else "" if content is None else orjson.dumps(content).decode()
    line = Text.assemble((f"{role:>9} ", style), body)
    if calls := message.get("tool_calls"):
        line.append(" " + orjson.dumps(calls).decode(), style="dim")
    return line
