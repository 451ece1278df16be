"""Replay: one attempt of a rollout, call by call, with the tools that each call used and the rewards it earned.

``agl rollouts show --browse`` and the console drive it. `read_replay` reads it from a store; `play` shows it in a
terminal, a call at a time, by keys that are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.segment import SegmentLines
from rich.text import Text

from agentlightning.analysis.rollout_view import print_call, print_feedback
from agentlightning.errors import InputError, NotFoundError
from agentlightning.records import Attempt, Call, Reward, Rollout, Span
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.scan import attempt_feedback
from agentlightning.tracing.tool_uses import ToolExecution, call_steps, name_calls

NEXT: Final = ("\x1b[C", "\x1bOC", " ", "n", "l")
BACK: Final = ("\x1b[D", "\x1bOD", "p", "h")
DOWN: Final = ("\x1b[B", "\x1bOB", "j")
UP: Final = ("\x1b[A", "\x1bOA", "k")
FIRST: Final = ("\x1b[H", "\x1bOH", "\x1b[1~", "g")
LAST: Final = ("\x1b[F", "\x1bOF", "\x1b[4~", "G")
QUIT: Final = ("q", "\x1b")
"""Keys as terminals send them, in both modes of their arrows, and letters for terminals that send others."""
KEYS = "left/right: call   up/down: scroll   home/end: first, last   q: quit"
MAX_LINE_CHARS = 2000
"""Characters of a tool's arguments or result that a frame shows; the conversation has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUseView:
    """One tool that a call asked for."""

    name: str
    arguments: str
    result: str | None
    """None: nothing tells what became of it."""
    failed: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayFrame:
    """One call and what came of it."""

    number: int
    """From 1, in the order the calls finished."""
    call: Call
    started_s: float
    """Seconds since the attempt's first call began."""
    seconds: float
    """From the call's start to its end."""
    tool_uses: list[ToolUseView]
    rewards: list[Reward]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One attempt of a rollout."""

    rollout: Rollout
    attempts: list[Attempt]
    attempt: int
    """The one that is replayed."""
    frames: list[ReplayFrame]
    final_rewards: list[Reward]
    """Of the attempt, those that belong to no call."""
    feedback: str
    """Words that came with them; '' where there are none."""
    spans: list[Span]


async def read_replay(store: LightningStore, rollout_id: str, attempt: int | None = None) -> Replay:
    """The rollout's latest attempt, or the one of this number. NotFoundError where there is none."""
    found = await store.rollouts(RolloutQuery(ids=[rollout_id]))
    if not found:
        raise NotFoundError(f"{rollout_id}: no such rollout; see: agl rollouts list RUN")
    rollout, number = found[0], found[0].attempt if attempt is None else attempt
    if attempt is not None and not 1 <= attempt <= rollout.attempt:
        raise InputError(f"attempt: expected 1 to {rollout.attempt}, got {attempt}")
    spans = [span for span in await store.spans([rollout_id]) if span.attempt == number]
    calls = name_calls(await store.calls([rollout_id], number), spans)
    rewards = [reward for reward in await store.rewards([rollout_id]) if reward.attempt == number]
    begun = min((call.started_ns for call in calls), default=0)
    return Replay(
        rollout=rollout,
        attempts=await store.attempts([rollout_id]),
        attempt=number,
        frames=[
            ReplayFrame(
                number=place,
                call=step.call,
                started_s=(step.call.started_ns - begun) / 1e9,
                seconds=(step.call.finished_ns - step.call.started_ns) / 1e9,
                tool_uses=[_tool_use(one) for one in step.tool_calls],
                rewards=[reward for reward in rewards if reward.call_id == step.call.id],
            )
            for place, step in enumerate(call_steps(calls, spans), 1)
        ],
        final_rewards=[reward for reward in rewards if reward.call_id is None],
        feedback=attempt_feedback(spans).get((rollout_id, number), ""),
        spans=spans,
    )


def print_frame(console: Console, replay: Replay, frame: ReplayFrame) -> None:
    """Print one call with its tools and rewards; with the last one, how the rollout ended."""
    print_call(console, frame.number, frame.call)
    for use in frame.tool_uses:
        outcome = "no result is recorded" if use.result is None else use.result[:MAX_LINE_CHARS]
        failed = " (failed)" if use.failed else ""
        console.print(
            f"     tool {use.name}({use.arguments[:MAX_LINE_CHARS]}){failed}: {outcome}", soft_wrap=True, style="blue"
        )
    for reward in frame.rewards:
        console.print(f"   reward {reward.name} {reward.value:g} ({reward.source})", soft_wrap=True, style="magenta")
    if frame.number == len(replay.frames):
        print_ending(console, replay)


def print_ending(console: Console, replay: Replay) -> None:
    """Print the final rewards and how the attempts ended."""
    for reward in replay.final_rewards:
        console.print(f"final {reward.name} {reward.value:g} ({reward.source})", soft_wrap=True, style="magenta")
    print_feedback(console, replay.feedback)
    told = "not known" if replay.rollout.reward is None else f"{replay.rollout.reward:g}"
    console.print(f"reward {told}  outcome {replay.rollout.outcome or '-'}")
    for attempt in replay.attempts:
        wrong = (attempt.error or "").strip().splitlines()
        console.print(
            f"attempt {attempt.attempt} {attempt.state}  {wrong[-1] if wrong else ''}".rstrip(), soft_wrap=True
        )


def print_replay(console: Console, replay: Replay) -> None:
    """Print the whole attempt, where nobody presses keys."""
    console.print(heading(replay), soft_wrap=True)
    for frame in replay.frames:
        print_frame(console, replay, frame)
    if not replay.frames:
        console.print("no call is recorded of this attempt")
        print_ending(console, replay)


def heading(replay: Replay) -> str:
    one = replay.rollout
    return f"rollout {one.id}  {one.mode} step {one.step}  {one.state}  attempt {replay.attempt} of {one.attempt}"


def play(console: Console, replay: Replay, read_key: Callable[[], str]) -> None:
    """Show a call at a time on a screen of its own, until a key of QUIT; an attempt without calls is printed.

    read_key: waits for a key and returns what the terminal sent.
    """
    if not replay.frames:
        print_replay(console, replay)
        return
    place, top = 0, 0
    with console.screen(hide_cursor=True) as screen:
        while True:
            lines = _lines(console, replay, replay.frames[place])
            height = max(1, console.height - 2)
            top = max(0, min(top, len(lines) - height))
            screen.update(_page(console, replay, place, lines[top : top + height], len(lines) - height - top))
            key = read_key()
            if key in QUIT:
                return
            if key in DOWN or key in UP:
                top += 1 if key in DOWN else -1
                continue
            moved = _moved(place, len(replay.frames), key)
            place, top = moved, top if moved == place else 0


def _moved(place: int, count: int, key: str) -> int:
    if key in FIRST:
        return 0
    if key in LAST:
        return count - 1
    return max(0, min(count - 1, place + (key in NEXT) - (key in BACK)))


def _lines(console: Console, replay: Replay, frame: ReplayFrame) -> list[list[object]]:
    """The frame as lines of the terminal's width."""
    with console.capture() as captured:
        print_frame(console, replay, frame)
    text = Text.from_ansi(captured.get())
    return [*console.render_lines(text, console.options.update(height=None), pad=False)]  # type: ignore[list-item]


def _page(console: Console, replay: Replay, place: int, lines: Sequence[object], below: int) -> SegmentLines:
    frame = replay.frames[place]
    top = Text(
        f"call {place + 1} of {len(replay.frames)} at {frame.started_s:.1f} s  {heading(replay)}", style="reverse"
    )
    bottom = Text(f"{f'{below} lines more   ' if below > 0 else ''}{KEYS}", style="reverse")
    bars = [
        console.render_lines(bar, console.options.update(height=None, no_wrap=True, overflow="ellipsis"))[0]
        for bar in (top, bottom)
    ]
    return SegmentLines([bars[0], *lines, bars[1]], new_lines=True)  # type: ignore[list-item]


def _tool_use(one: ToolExecution) -> ToolUseView:
    return ToolUseView(name=one.name, arguments=one.arguments, result=one.result, failed=one.failed)
