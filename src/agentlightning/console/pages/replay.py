"""One rollout: its conversation with the advantage of each call, and one call of it by tokens, numbers and exact prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from agentlightning.adapters.semantics import error_of
from agentlightning.adapters.span_tree import SpanTree
from agentlightning.analysis.rollout_view import decoding_line, fork_place
from agentlightning.console.measures import COLORINGS, FULL_ADVANTAGE, CallUse, Measure, call_use
from agentlightning.console.reader import Reader, Recorded, Texts
from agentlightning.console.render import Page, Query, choice, first, whole
from agentlightning.errors import InputError
from agentlightning.protocols.system_prompts import is_prompt_name
from agentlightning.records import FINAL_STATES, JSON, Call, Span
from agentlightning.rendering.call_chain import call_chain, chain_tools, is_whole
from agentlightning.store.forks import calls_before, replay_warning
from agentlightning.store.scan import attempt_feedback
from agentlightning.store.summaries import title_of

MAX_ROWS = 500
"""Rows of the waterfall; agents make any number of spans."""
MAX_CALLS = 200
"""Calls of the conversation, around the shown one."""
MAX_DEPTH = 12
MIN_SHARE = 0.3
"""Per cent of the width that the shortest bar has, so that it can be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A row of the waterfall: times in seconds, places in per cent of the rollout."""

    depth: int
    name: str
    call: int | None
    """The number of the call that it is; None for a span."""
    at: float
    took: float
    left: float
    width: float
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadedToken:
    """A sampled token of the strip."""

    text: str
    style: str
    told: str


async def replay_page(reader: Reader, query: Query) -> Page:
    """The rollout of the address, at one of its calls."""
    rollout_id = first(query, "rollout")
    if not rollout_id:
        raise InputError("rollout: expected the id of a rollout in the address")
    one = await reader.rollout(rollout_id, whole(query, "attempt"))
    run = await reader.run(one.rollout.run_id)
    current = _current(one, query)
    one = await reader.with_uses(one, one.calls[current : current + 1])
    coloring = choice(query, "color", tuple(COLORINGS))
    start = max(0, current - MAX_CALLS // 2)
    values = {
        "one": one,
        "rollout": one.rollout,
        "place": {"rollout": rollout_id, "attempt": first(query, "attempt"), "color": first(query, "color")},
        "current": current,
        "conversation": list(enumerate(one.calls))[start : start + MAX_CALLS],
        "advantages": await reader.advantages(one.rollout.id),
        "full_advantage": FULL_ADVANTAGE,
        "colorings": COLORINGS,
        "coloring": coloring,
        "question": title_of(one.rollout.task),
        "call": None,
        **head(one),
        "bars": waterfall(one),
        "agents": _agents(one.calls, current),
    }
    if one.calls:
        texts = await reader.texts(one.calls[current])
        values |= _call_values(one, current, texts, coloring)
    return Page(template="replay.html", title=f"Rollout {rollout_id[-8:]}", values=values, run=run)


def _current(one: Recorded, query: Query) -> int:
    """The number of the call that the address names by its number, or by its id."""
    if (call_id := first(query, "call_id")) and not first(query, "call"):
        found = [place for place, call in enumerate(one.calls) if call.id == call_id]
        if not found:
            raise InputError(f"call_id: expected a call of the shown attempt, got {call_id[:80]!r}")
        return found[0]
    current = whole(query, "call", 0) or 0
    if one.calls and current >= len(one.calls):
        raise InputError(f"call: expected a number below {len(one.calls)} (the first call is 0), got {current}")
    return current


def head(one: Recorded) -> dict[str, object]:
    """The rollout's own facts: what failed, where it comes from, its rewards by call, the words that came with them."""
    rollout = one.rollout
    ended = replay_warning(rollout, one.calls) if one.attempt == rollout.attempt else None
    fork = None if rollout.fork is None else f"of {rollout.fork.rollout_id}, {fork_place(rollout.fork)}"
    return {
        "wrong": [text for text in (rollout.error, rollout.warning, ended) if text],
        "fork": fork,
        "sampled": sum(len(call.sampled_ids) for call in one.calls if not call.replayed_id),
        "numbers": {call.id: place + 1 for place, call in enumerate(one.calls)},
        "feedback": attempt_feedback(one.spans).get((rollout.id, one.attempt)),
    }


def _call_values(one: Recorded, current: int, texts: Texts, coloring: str) -> dict[str, object]:
    """Values of the right pane, which is about the current call."""
    call = one.calls[current]
    use = one.uses.get(call.id) or call_use(one.rollout, call)
    chain = call_chain(call, {each.id: each for each in one.calls})
    measure = COLORINGS[coloring](call, use)
    return {
        "call": call,
        "use": use,
        "facts": _facts(call),
        "credit": _credit(use),
        "decoding": decoding_line(call.decoding) if call.decoding else "",
        "tools": chain_tools(chain),
        "measure": measure,
        "strip": _strip(call, measure, texts) if call.policy else [],
        "note": texts.note,
        "prompt": _prompt(chain, texts) if call.policy else [],
        "whole": is_whole(chain),
        "fork_calls": _fork_calls(one, current),
    }


def _strip(call: Call, measure: Measure, texts: Texts) -> list[ShadedToken]:
    """Sampled tokens in their order, shaded by a measure; line ends can be seen."""
    forced = {place for start, end in call.decoding.get("forced", ()) for place in range(start, end)}
    shown = []
    for place, (token, value) in enumerate(zip(call.sampled_ids, measure.values, strict=True)):
        known = "not known" if value != value else f"{value:.4g}"
        told = f"token {place}, id {token}, {measure.name} {known}"
        told += ", forced by the grammar" if place in forced else ""
        style = f"token {measure.style(value)}".strip() + (" forced" if place in forced else "")
        shown.append(ShadedToken(text=texts.token(token).replace("\n", "↵\n") or "∅", style=style, told=told))
    return shown


def _prompt(chain: Sequence[Call], texts: Texts) -> list[tuple[str, bool]]:
    """The prompt of the chain's last call as the model read it: texts, and whether a policy sampled them."""
    parts = []
    for call in chain[:-1]:
        parts += [(texts.decode(call.suffix_ids), False), (texts.decode(call.sampled_ids), True)]
    return [*parts, (texts.decode(chain[-1].suffix_ids), False)]


def _facts(call: Call) -> dict[str, str | None]:
    versions = ", ".join(f"v{span.version} [{span.start}, {span.end})" for span in call.versions)
    return {
        "model": call.policy or call.model,
        "policy version": versions or None,
        "prompt tokens": str(call.prompt_tokens or call.usage.get("prompt_tokens") or 0),
        "sampled tokens": str(len(call.sampled_ids) or call.usage.get("sampled_tokens") or 0),
        "temperature": f"{call.sampling.temperature:g}",
        "log-probability": f"{sum(call.logprobs):.2f}" if call.logprobs else None,
        "finished as": call.finish_reason,
        "protocol": call.protocol,
        "seconds": f"{(call.finished_ns - call.started_ns) / 1e9:.2f}",
    }


def _credit(use: CallUse) -> dict[str, str | None]:
    """The numbers that a step gave the call; none where none are stored."""
    one = use.credit
    if one is None:
        return {}
    return {
        "advantage": f"{one.advantage:+.4g}",
        "credit": f"{one.credit:.4g}",
        "return": None if one.return_ is None else f"{one.return_:.4g}",
        "loss weight": f"{one.weight:.4g}",
        "trained tokens": str(one.trained_tokens),
        "clip share": None if one.clip_share is None else f"{one.clip_share:.1%}",
        "learned by": f"{one.policy}, step {one.step}",
    }


def _fork_calls(one: Recorded, current: int) -> int | None:
    """Calls to replay for a rollout that continues the shown one from the shown call; None where it cannot be."""
    rollout = one.rollout
    finished = rollout.state in FINAL_STATES and one.attempt == rollout.attempt
    return calls_before(one.calls).get(one.calls[current].id) if finished and rollout.kind != "session" else None


def _agents(calls: Sequence[Call], current: int) -> list[tuple[str, str, int, JSON | None]]:
    """Each sub-agent as it stood after the shown call: name, its calls, its sampled tokens, its last completion."""
    names = Counter(call.agent for call in calls if call.agent)
    if len(names) < 2 and all(map(is_prompt_name, names)):  # one agent, which nobody named
        return []
    until = calls[: current + 1]
    own: Mapping[str, list[Call]] = {name: [call for call in until if call.agent == name] for name in names}
    return [
        (name, f"{len(own[name])} of {count}", sum(len(call.sampled_ids) for call in own[name]),
         own[name][-1].completion if own[name] else None)
        for name, count in names.items()
    ]  # fmt: skip


def waterfall(one: Recorded) -> list[Bar]:
    """A row per span and call, by tree and start: who did what, when, within what."""
    rows = list(islice(SpanTree(one.spans).rows(one.calls), MAX_ROWS))
    start = min((entry.started_ns for _, entry in rows), default=0)
    length = max(1, max((entry.finished_ns for _, entry in rows), default=0) - start)
    numbers = {call.id: number for number, call in enumerate(one.calls)}
    bars = []
    for depth, entry in rows:
        at, took = entry.started_ns - start, entry.finished_ns - entry.started_ns
        left = min(100 * at / length, 100 - MIN_SHARE)
        bars.append(
            Bar(
                depth=min(depth, MAX_DEPTH),
                name=entry.name if isinstance(entry, Span) else entry.agent or "",
                call=numbers.get(entry.id),
                at=at / 1e9,
                took=took / 1e9,
                left=left,
                width=min(max(MIN_SHARE, 100 * took / length), 100 - left),
                error=error_of(entry) if isinstance(entry, Span) else None,
            )
        )
    return bars
