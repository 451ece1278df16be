"""One rollout call by call: what the agent asked, what the model read and wrote, and what happened between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import orjson

from agentlightning.analysis.rollout_view import decoding_line, fork_place
from agentlightning.console.conversation import messages_view, prompt_view, token_strip, tools_view
from agentlightning.console.forking import fork_links
from agentlightning.console.markup import Html, element, join, url
from agentlightning.console.measures import COLORINGS, CallUse, Measure, by_logprob, call_use
from agentlightning.console.parts import (
    Query,
    choice,
    figures,
    first,
    number,
    replay_link,
    run_link,
    select,
    shown,
    table,
    when,
)
from agentlightning.console.reader import Reader, Recorded
from agentlightning.console.texts import Texts
from agentlightning.console.waterfall import waterfall
from agentlightning.errors import InputError
from agentlightning.records import Call, Reward
from agentlightning.rendering.call_chain import call_chain, chain_tools, is_whole
from agentlightning.store.forks import replay_warning
from agentlightning.store.scan import attempt_feedback


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
    playing = choice(query, "play", ("", "1")) == "1"
    lanes = waterfall(one.spans, one.calls, lambda call: url("/replay", {**place, "call": str(call)}), current)
    parts = [
        head(one),
        _links(one),
        _attempts(one),
        element("h2", "What happened when"),
        lanes,
        _agents(one.calls, current),
    ]
    if one.calls:
        texts = await reader.texts(one.calls[current])
        chosen = range(number(query, "from", 0) or 0, number(query, "to", 0) or 0)
        parts += [
            _steps(place, current, len(one.calls), playing),
            call_view(one, current, texts, COLORINGS[coloring], chosen),
            fork_links(reader, one, current),
            _range(place, current, coloring, chosen),
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
    fork = None if rollout.fork is None else f"of {rollout.fork.rollout_id}, {fork_place(rollout.fork)}"
    return join(
        [
            element("h1", f"Rollout {rollout.id}"),
            element("p", f"of run {rollout.run_id}, step {rollout.step}, {rollout.mode}, attempt {one.attempt}"),
            figures(
                {
                    "reward": shown(rollout.reward) or "-",
                    "state": "refused" if rollout.refused else rollout.state,
                    "outcome": rollout.outcome,
                    "fork": fork,
                    "calls": str(len(one.calls)),
                    "sampled tokens": str(sum(len(call.sampled_ids) for call in one.calls if not call.replayed_id)),
                    "temperature": f"{rollout.sampling.temperature:g}",
                }
            ),
            element("details", element("summary", "Task"), element("pre", _json(rollout.task)), open=True),
            *(element("pre", text, class_="wrong") for text in wrong),
            _rewards(one),
        ]
    )


def call_view(
    one: Recorded,
    current: int,
    texts: Texts,
    coloring: Callable[[Call, CallUse], Measure] = by_logprob,
    chosen: range = range(0),
) -> Html:
    """One call: its messages, its tokens and the prompt as the model read it."""
    call = one.calls[current]
    use = one.uses.get(call.id) or call_use(one.rollout, call)
    chain = call_chain(call, {each.id: each for each in one.calls})
    earlier = [message for each in chain[:-1] for message in (*each.messages, each.completion)]
    before = element(
        "details", element("summary", f"{len(earlier)} earlier messages of its prompt"), messages_view(earlier)
    )
    by = f" by {call.agent}" if call.agent else ""
    return element(
        "section",
        element("h2", f"Call {current + 1} of {len(one.calls)}{by}", id="call"),
        figures(_facts(call)),
        element("p", use.note, class_="note"),
        _credit(use),
        element("p", f"decoding: {decoding_line(call.decoding)}", class_="note") if call.decoding else None,
        _fork(call),
        tools_view(chain_tools(chain)),
        before if earlier else None,
        messages_view(call.messages),
        element("h3", "Completion"),
        messages_view([call.completion]),
        _tokens(chain, texts, coloring(call, use), chosen),
        aria_label=f"call {current + 1}",
    )


def _tokens(chain: Sequence[Call], texts: Texts, measure: Measure, chosen: range) -> Html | None:
    call = chain[-1]
    if not call.policy:
        return None
    strip = token_strip(call.sampled_ids, measure, texts.token, call.decoding.get("forced", ()), chosen)
    prompt = (
        prompt_view(chain, texts.decode) if is_whole(chain) else element("p", "a call that it continues is not stored")
    )
    return join(
        [
            element("h3", f"Sampled tokens by {measure.name}"),
            element("p", f"{measure.legend}; {texts.note}", class_="note"),
            strip,
            element(
                "details",
                element("summary", f"The prompt as the model read it ({call.prompt_tokens:,} tokens)"),
                element("p", "chat template included; marked: what the policy sampled in earlier calls", class_="note"),
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


def _fork(call: Call) -> Html | None:
    if call.fork_cause is None:
        return None
    cost = (
        f"; {call.untrained_tokens} sampled tokens of earlier calls are context only" if call.untrained_tokens else ""
    )
    return element("p", f"fork: {call.fork_cause}{cost}", class_="note wrong")


def _rewards(one: Recorded) -> Html | None:
    if not one.rewards:
        return None
    numbers = {call.id: str(place + 1) for place, call in enumerate(one.calls)}

    def cells(reward: Reward) -> list[str]:
        return [reward.name, f"{reward.value:g}", reward.source, numbers.get(reward.call_id or "", "")]

    head = ["reward", "value", "source", "call"]
    rows = table(head, (cells(reward) for reward in one.rewards), "Rewards of this attempt")
    return join([rows, _feedback(one)])


def _feedback(one: Recorded) -> Html | None:
    """The words that came with the rewards: somebody's text."""
    feedback = attempt_feedback(one.spans).get((one.rollout.id, one.attempt))
    return element("section", element("h3", "Feedback"), element("pre", feedback)) if feedback else None


def _attempts(one: Recorded) -> Html | None:
    if len(one.attempts) < 2 and not any(attempt.error for attempt in one.attempts):
        return None
    rows = []
    for attempt in one.attempts:
        href = url("/replay", {"rollout": attempt.rollout_id, "attempt": attempt.attempt})
        link = element(
            "a",
            f"attempt {attempt.attempt}",
            href=href,
            aria_current="page" if attempt.attempt == one.attempt else None,
        )
        said = attempt.error or attempt.output
        told = element("details", element("summary", "what it said"), element("pre", said)) if said else None
        rows.append([link, attempt.state, attempt.worker_id, when(attempt.started_ns), told])
    return join(
        [element("h2", "Attempts"), table(["attempt", "state", "worker", "started (UTC)", ""], rows, "Attempts")]
    )


def _agents(calls: Sequence[Call], current: int) -> Html | None:
    """Each sub-agent as it stood after the shown call."""
    names = Counter(call.agent for call in calls if call.agent)
    if not names:
        return None
    until = calls[: current + 1]
    last = {call.agent: call for call in until}
    rows = [
        [
            name,
            f"{sum(call.agent == name for call in until)} of {count}",
            str(sum(len(call.sampled_ids) for call in until if call.agent == name)),
            messages_view([last[name].completion]) if name in last else element("span", "nothing yet", class_="none"),
        ]
        for name, count in names.items()
    ]
    head = ["agent", "calls so far", "sampled tokens", "said last"]
    return join([element("h2", "Sub-agents, as of the shown call"), table(head, rows, "Sub-agents")])


def _steps(place: dict[str, str], current: int, count: int, playing: bool) -> Html:
    """Scrubbing: a form whose slider and links go to another call; arrow keys move the slider. While it plays, the shell's
    script follows the link to the next one."""
    goes_on = playing and current + 1 < count

    def to(call: int, text: str, relation: str) -> Html | None:
        inside = 0 <= call < count
        played = "1" if playing and call > current else None
        href = url("/replay", {**place, "call": str(call), "play": played}, "call")
        return element("a", text, href=href, rel=relation) if inside else None

    slider = element(
        "input", type="range", name="call", min=0, max=count - 1, value=current, aria_label="call", class_="scrub"
    )
    hidden = [element("input", type="hidden", name=name, value=value) for name, value in place.items() if value]
    form = element("form", *hidden, slider, element("button", "Go"), action="/replay", method="get")
    begin = str(current if goes_on or current + 1 < count else 0)
    href = url("/replay", {**place, "call": begin, "play": None if goes_on else "1"}, "call")
    play = element("a", "❚❚ pause" if goes_on else "▶ play", href=href, class_="play") if count > 1 else None
    parts = [to(current - 1, "← previous", "prev"), play, form, to(current + 1, "next →", "next")]
    return element("nav", *parts, class_=f"steps{' playing' if goes_on else ''}", aria_label="calls")


def _range(place: dict[str, str], current: int, coloring: str, chosen: range) -> Html:
    kept = {name: value for name, value in place.items() if value and name != "color"}
    hidden = [element("input", type="hidden", name=name, value=value) for name, value in kept.items()]
    fields = [
        element("label", f"{label} ", element("input", type="number", name=name, min=0, value=value))
        for label, name, value in (("Mark tokens from", "from", chosen.start), ("to", "to", chosen.stop))
    ]
    return element(
        "form",
        *hidden,
        element("input", type="hidden", name="call", value=current),
        select("color", "Colour by", {name: name for name in COLORINGS}, coloring),
        *fields,
        element("button", "Show"),
        action="/replay#token",
        method="get",
        class_="bar",
    )


def _links(one: Recorded) -> Html:
    group = url("/side", {"run": one.rollout.run_id, "group": one.rollout.group_id})
    why = url("/rewards", {"run": one.rollout.run_id, "view": "explain", "rollout": one.rollout.id})
    links = [run_link(one.rollout.run_id, "Its run"), element("a", "Its group side by side", href=group)]
    if one.rollout.fork is not None:
        links.append(replay_link(one.rollout.fork.rollout_id, "The rollout that it continues"))
    if one.rollout.mode == "train":
        links.append(element("a", "Why it earned that", href=why))
    return element("p", join(part for link in links for part in (link, " ")), class_="links")


def _json(value: object) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS, default=str).decode()
