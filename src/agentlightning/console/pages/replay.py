"""One rollout call by call: what the agent asked, what the model read and wrote, and what happened between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from agentlightning.adapters.agent_names import is_prompt_name
from agentlightning.adapters.semantics import error_of
from agentlightning.adapters.span_tree import SpanTree
from agentlightning.analysis.rollout_view import decoding_line, fork_place
from agentlightning.console.conversation import messages_view, prompt_view, token_strip, tools_view
from agentlightning.console.markup import (
    Attribute,
    Html,
    Query,
    choice,
    element,
    figures,
    first,
    form,
    join,
    json_text,
    link,
    number,
    replay_link,
    run_link,
    select,
    shown,
    table,
    url,
    when,
)
from agentlightning.console.measures import COLORINGS, CallUse, Measure, by_logprob, call_use
from agentlightning.console.reader import Reader, Recorded, Texts
from agentlightning.errors import InputError
from agentlightning.records import FINAL_STATES, Call, Span
from agentlightning.rendering.call_chain import call_chain, chain_tools, is_whole
from agentlightning.store.forks import calls_before, replay_warning
from agentlightning.store.scan import attempt_feedback

MAX_ROWS = 500
"""Rows of the waterfall; agents make any number of spans."""
MAX_DEPTH = 12
MIN_SHARE = 0.3
"""Per cent of the width that the shortest bar has, so that it can be seen."""

Entry = Span | Call


async def replay_page(reader: Reader, query: Query) -> Html:
    """The rollout of the address, at one of its calls."""
    rollout_id = first(query, "rollout")
    if not rollout_id:
        raise InputError("rollout: expected the id of a rollout in the address")
    one = await reader.rollout(rollout_id, number(query, "attempt"))
    current = _current(one, query)
    one = await reader.with_uses(one, one.calls[current : current + 1])
    coloring = choice(query, "color", tuple(COLORINGS))
    place = {"rollout": rollout_id, "attempt": first(query, "attempt"), "color": first(query, "color")}
    parts = [
        head(one),
        _links(one),
        _attempts(one),
        element("h2", "What happened when"),
        waterfall(one, place, current),
        _agents(one.calls, current),
    ]
    if one.calls:
        texts = await reader.texts(one.calls[current])
        colors = select("color", "Colour by", {name: name for name in COLORINGS}, coloring)
        kept = {"rollout": rollout_id, "attempt": place["attempt"], "call": str(current)}
        parts += [
            _steps(place, current, len(one.calls)),
            call_view(one, current, texts, COLORINGS[coloring]),
            _fork_command(one, current),
            form("/replay", colors, hidden=kept),
        ]
    return join(parts)


def _current(one: Recorded, query: Query) -> int:
    """The number of the call that the address names by its number, or by its id."""
    if (call_id := first(query, "call_id")) and not first(query, "call"):
        found = [place for place, call in enumerate(one.calls) if call.id == call_id]
        if not found:
            raise InputError(f"call_id: expected a call of the shown attempt, got {call_id[:80]!r}")
        return found[0]
    current = number(query, "call", 0) or 0
    if one.calls and current >= len(one.calls):
        raise InputError(f"call: expected a number below {len(one.calls)} (the first call is 0), got {current}")
    return current


def head(one: Recorded) -> Html:
    """The rollout's own facts: task, reward, outcome."""
    rollout = one.rollout
    ended = replay_warning(rollout, one.calls) if one.attempt == rollout.attempt else None
    wrong = [text for text in (rollout.error, rollout.warning, ended) if text]
    known = {
        "reward": shown(rollout.reward) or "-",
        "state": "refused" if rollout.refused else rollout.state,
        "outcome": rollout.outcome,
        "fork": None if rollout.fork is None else f"of {rollout.fork.rollout_id}, {fork_place(rollout.fork)}",
        "calls": str(len(one.calls)),
        "sampled tokens": str(sum(len(call.sampled_ids) for call in one.calls if not call.replayed_id)),
        "temperature": f"{rollout.sampling.temperature:g}",
    }
    return join(
        [
            element("h1", f"Rollout {rollout.id}"),
            element("p", f"of run {rollout.run_id}, step {rollout.step}, {rollout.mode}, attempt {one.attempt}"),
            figures(known),
            element("details", element("summary", "Task"), element("pre", json_text(rollout.task)), open=True),
            *(element("pre", text, class_="wrong") for text in wrong),
            _rewards(one),
        ]
    )


def call_view(
    one: Recorded, current: int, texts: Texts, coloring: Callable[[Call, CallUse], Measure] = by_logprob
) -> Html:
    """One call: its messages, its tokens and the prompt as the model read it."""
    call = one.calls[current]
    use = one.uses.get(call.id) or call_use(one.rollout, call)
    chain = call_chain(call, {each.id: each for each in one.calls})
    earlier = [message for each in chain[:-1] for message in (*each.messages, each.completion)]
    summary = element("summary", f"{len(earlier)} earlier messages of its prompt")
    fork = f"fork: {call.fork_cause}"
    if call.untrained_tokens:
        fork += f"; {call.untrained_tokens} sampled tokens of earlier calls are context only"
    return element(
        "section",
        element("h2", f"Call {current + 1} of {len(one.calls)}{f' by {call.agent}' if call.agent else ''}", id="call"),
        figures(_facts(call)),
        element("p", use.note, class_="note"),
        _credit(use),
        element("p", f"decoding: {decoding_line(call.decoding)}", class_="note") if call.decoding else None,
        element("p", fork, class_="note wrong") if call.fork_cause is not None else None,
        tools_view(chain_tools(chain)),
        element("details", summary, messages_view(earlier)) if earlier else None,
        messages_view(call.messages),
        element("h3", "Completion"),
        messages_view([call.completion]),
        _tokens(chain, texts, coloring(call, use)) if call.policy else None,
        aria_label=f"call {current + 1}",
    )


def _tokens(chain: Sequence[Call], texts: Texts, measure: Measure) -> Html:
    call = chain[-1]
    prompt = prompt_view(chain, texts.decode) if is_whole(chain) else "a call that it continues is not stored"
    marked = "chat template included; marked: what the policy sampled in earlier calls"
    return join(
        [
            element("h3", f"Sampled tokens by {measure.name}"),
            element("p", f"{measure.legend}; {texts.note}", class_="note"),
            token_strip(call.sampled_ids, measure, texts.token, call.decoding.get("forced", ())),
            element(
                "details",
                element("summary", f"The prompt as the model read it ({call.prompt_tokens:,} tokens)"),
                element("p", marked, class_="note"),
                prompt,
            ),
        ]
    )


def _facts(call: Call) -> dict[str, str | None]:
    versions = ", ".join(f"v{span.version} [{span.start}, {span.end})" for span in call.versions)
    return {
        "model": call.policy or call.model,
        "policy version": versions or None,
        "prompt tokens": str(call.prompt_tokens or call.usage.get("prompt_tokens") or 0),
        "sampled tokens": str(len(call.sampled_ids) or call.usage.get("sampled_tokens") or 0),
        "log-probability": f"{sum(call.logprobs):.2f}" if call.logprobs else None,
        "finished as": call.finish_reason,
        "protocol": call.protocol,
        "seconds": f"{(call.finished_ns - call.started_ns) / 1e9:.2f}",
    }


def _credit(use: CallUse) -> Html | None:
    """The numbers that a step gave the call; where none are stored, and why."""
    one = use.credit
    if one is None:
        return element("p", f"no credit: {use.missing}", class_="note") if use.trained and use.missing else None
    return figures(
        {
            "credit": f"{one.credit:.4g}",
            "return": None if one.return_ is None else f"{one.return_:.4g}",
            "advantage": f"{one.advantage:+.4g}",
            "loss weight": f"{one.weight:.4g}",
            "trained tokens": str(one.trained_tokens),
            "clip share": None if one.clip_share is None else f"{one.clip_share:.1%}",
            "learned by": f"{one.policy}, step {one.step}",
        }
    )


def _fork_command(one: Recorded, current: int) -> Html | None:
    """The command that continues the shown rollout from the shown call; None where it cannot be."""
    rollout = one.rollout
    calls = calls_before(one.calls).get(one.calls[current].id)
    finished = rollout.state in FINAL_STATES and one.attempt == rollout.attempt
    if not finished or rollout.kind == "session" or calls is None:
        return None
    return element("p", "Continue from here: ", element("code", f"agl rollouts fork {rollout.id} --calls {calls}"))


def _rewards(one: Recorded) -> Html | None:
    if not one.rewards:
        return None
    numbers = {call.id: str(place + 1) for place, call in enumerate(one.calls)}
    rows = ([each.name, f"{each.value:g}", each.source, numbers.get(each.call_id or "", "")] for each in one.rewards)
    rewards = table(["reward", "value", "source", "call"], rows, "Rewards of this attempt")
    words = attempt_feedback(one.spans).get((one.rollout.id, one.attempt))
    feedback = element("section", element("h3", "Feedback"), element("pre", words)) if words else None
    return join([rewards, feedback])


def _attempts(one: Recorded) -> Html | None:
    if len(one.attempts) < 2 and not any(attempt.error for attempt in one.attempts):
        return None
    rows = []
    for attempt in one.attempts:
        href = url("/replay", {"rollout": attempt.rollout_id, "attempt": attempt.attempt})
        current = "page" if attempt.attempt == one.attempt else None
        name = element("a", f"attempt {attempt.attempt}", href=href, aria_current=current)
        said = attempt.error or attempt.output
        told = element("details", element("summary", "what it said"), element("pre", said)) if said else None
        rows.append([name, attempt.state, attempt.worker_id, when(attempt.started_ns), told])
    columns = ["attempt", "state", "worker", "started (UTC)", ""]
    return join([element("h2", "Attempts"), table(columns, rows, "Attempts")])


def _agents(calls: Sequence[Call], current: int) -> Html | None:
    """Each sub-agent as it stood after the shown call."""
    names = Counter(call.agent for call in calls if call.agent)
    if len(names) < 2 and all(map(is_prompt_name, names)):  # one agent, which nobody named
        return None
    until = calls[: current + 1]
    last = {call.agent: call for call in until}
    rows = []
    for name, count in names.items():
        own = [call for call in until if call.agent == name]
        sampled = str(sum(len(call.sampled_ids) for call in own))
        said = messages_view([last[name].completion]) if name in last else "nothing yet"
        rows.append([name, f"{len(own)} of {count}", sampled, said])
    columns = ["agent", "calls so far", "sampled tokens", "said last"]
    return join([element("h2", "Sub-agents, as of the shown call"), table(columns, rows, "Sub-agents")])


def _steps(place: Mapping[str, str], current: int, count: int) -> Html:
    """A slider and links to other calls, which the arrow keys follow."""

    def to(call: int, text: str, relation: str) -> Html | None:
        href = url("/replay", {**place, "call": str(call)}, "call")
        return element("a", text, href=href, rel=relation) if 0 <= call < count else None

    look: dict[str, Attribute] = {"type": "range", "min": 0, "max": count - 1, "class_": "scrub", "aria_label": "call"}
    scrub = form("/replay", element("input", name="call", value=current, **look), button="Go", hidden=place)
    parts = [to(current - 1, "← previous", "prev"), scrub, to(current + 1, "next →", "next")]
    return element("nav", *parts, class_="steps", aria_label="calls")


def _links(one: Recorded) -> Html:
    rollout = one.rollout
    group = link("Its group side by side", "/side", run=rollout.run_id, group=rollout.group_id)
    links = [run_link(rollout.run_id, "Its run"), group]
    if rollout.fork is not None:
        links.append(replay_link(rollout.fork.rollout_id, "The rollout that it continues"))
    if rollout.mode == "train":
        links.append(link("Why it earned that", "/rewards", run=rollout.run_id, view="explain", rollout=rollout.id))
    return element("p", join(links, " "), class_="links")


def waterfall(one: Recorded, place: Mapping[str, str], current: int) -> Html:
    """A row per span and call, by tree and start: who did what, when, within what."""
    rows = [*SpanTree(one.spans).rows(one.calls)]
    if not rows:
        return element("p", "no call and no span was recorded", class_="none")
    start = min(entry.started_ns for _, entry in rows)
    length = max(1, max(entry.finished_ns for _, entry in rows) - start)
    numbers = {call.id: number for number, call in enumerate(one.calls)}
    items = []
    for depth, entry in rows[:MAX_ROWS]:
        number = numbers.get(entry.id)
        name: str | Html = entry.name if isinstance(entry, Span) else ""
        if number is not None:
            by = f" by {entry.agent}" if isinstance(entry, Call) and entry.agent else ""
            step = "step" if number == current else None
            href = url("/replay", {**place, "call": str(number)})
            name = element("a", f"call {number + 1}{by}", href=href, aria_current=step)
        label = element("span", "· " * min(depth, MAX_DEPTH), name, class_="name")
        items.append(_bar(entry, label, start, length, number == current))
    left = f"{len(rows) - MAX_ROWS} more rows are left out" if len(rows) > MAX_ROWS else ""
    return element("div", element("ol", *items, class_="waterfall"), left)


def _bar(entry: Entry, label: Html, start: int, length: int, current: bool) -> Html:
    at, took = entry.started_ns - start, entry.finished_ns - entry.started_ns
    left = min(100 * at / length, 100 - MIN_SHARE)
    width = min(max(MIN_SHARE, 100 * took / length), 100 - left)
    failed = error_of(entry) if isinstance(entry, Span) else None
    kind = "wrong" if failed else "span" if isinstance(entry, Span) else "call"
    rect = element("rect", x=f"{left:.2f}%", width=f"{width:.2f}%", y=2, height=10, class_=kind)
    bar = element("svg", rect, class_="bar", aria_hidden="true")
    time = element("span", f"{at / 1e9:.3f} s + {took / 1e9:.3f} s", class_="time")
    error = element("span", failed, class_="error") if failed else None
    return element("li", label, bar, time, error, class_="current" if current else None)
