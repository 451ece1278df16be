"""The rewards of a run: their distribution, where two disagree, signs of hacks, one explained, and what others would give.

All numbers are those of analysis/. A view reads some steps, at most `MAX_READ` rollouts of each, whatever the size of the
run, and computes in a thread. It runs no code of a request or of a run's record: what takes some is told as a command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType

from agentlightning.analysis.intervals import Interval
from agentlightning.analysis.reward_hacks import LAST_STEPS, HackReport, RewardHack, find_hacks
from agentlightning.analysis.reward_statistics import Disagreement, RewardDistribution, disagreement, distributions
from agentlightning.analysis.rewarded_rollouts import OWN, latest_steps, read_rewarded
from agentlightning.console.histogram import histogram
from agentlightning.console.markup import Html, element, join, url
from agentlightning.console.pages.choose import chosen_run
from agentlightning.console.pages.rewards_changes import command, explain_view, hidden, what_if_view
from agentlightning.console.parts import (
    Query,
    choice,
    first,
    number,
    replay_link,
    run_link,
    select,
    shown,
    table,
)
from agentlightning.console.parts import interval as interval_text
from agentlightning.console.reader import Reader
from agentlightning.errors import AgentLightningError
from agentlightning.records import Run

MAX_READ = 256
"""Rollouts of a step that a view reads, with their calls."""
MAX_ROWS = 200
"""Distributions that are shown: rewards times steps times calls may be many."""
SPREAD_STEPS = 6
"""Steps over the run whose distributions are shown where none is named."""

TIMEOUT_S = 60.0

View = Callable[[Reader, Run, Query], Awaitable[Html]]


async def rewards_page(reader: Reader, query: Query) -> Html:
    """The view of the address; without a run, runs to choose from."""
    run = await chosen_run(reader, query, "/rewards", "Rewards")
    if not isinstance(run, Run):
        return run
    names = tuple(VIEWS)
    view = choice(query, "view", names)
    place = {"run": run.id, "step": first(query, "step")}
    links = [
        element(
            "a", title, href=url("/rewards", {**place, "view": name}), aria_current="page" if name == view else None
        )
        for name, (title, _) in VIEWS.items()
    ]
    try:
        async with asyncio.timeout(TIMEOUT_S), reader.analyses:
            content = await VIEWS[view][1](reader, run, query)
    except (AgentLightningError, TimeoutError) as error:  # the way to the other views stays
        wrong = str(error) or f"the store did not answer within {TIMEOUT_S:.0f} s; see: agl rewards --help"
        content = element("p", wrong, class_="wrong", role="alert")
    return join(
        [
            element("h1", f"Rewards of {run.name or run.id}"),
            element("p", "run ", run_link(run.id)),
            element("nav", *links, class_="pages", aria_label="views of the rewards"),
            content,
        ]
    )


async def _distribution_view(reader: Reader, run: Run, query: Query) -> Html:
    step = number(query, "step")
    steps = await latest_steps(reader.store, run.id, SPREAD_STEPS, spread=True) if step is None else [step]
    rollouts = await read_rewarded(reader.store, run.id, steps, calls=True, limit=MAX_READ)
    found = await asyncio.to_thread(distributions, rollouts)
    left = len(found) - MAX_ROWS
    return join(
        [
            _step_form(run, "distribution", step, "steps over the whole run"),
            element("p", _bounds(len(rollouts), steps), class_="note"),
            table(
                ["reward", "step", "call", "n", "mean", "deviation", "lowest", "median", "highest", "values"],
                (_distribution(one) for one in found[:MAX_ROWS]),
                "Distribution of each reward by step and call",
            ),
            element("p", f"{left} more are left out; name a step, or: {command('distribution', run.id, '--json')}",
                    class_="none") if left > 0 else None,
        ]
    )  # fmt: skip


def _distribution(one: RewardDistribution) -> list[Html | str]:
    low, _, middle, _, high = one.quartiles
    numbers = [shown(value) for value in (one.mean, one.deviation, low, middle, high)]
    place = "whole rollout" if one.call is None else f"call {one.call}"
    return [one.name, str(one.step), place, str(one.n), *numbers, histogram(one.bins, low, high)]


async def _disagreement_view(reader: Reader, run: Run, query: Query) -> Html:
    step = number(query, "step")
    steps = await latest_steps(reader.store, run.id, LAST_STEPS) if step is None else [step]
    rollouts = await read_rewarded(reader.store, run.id, steps, limit=MAX_READ)
    names = sorted({name for one in rollouts for name in one.rewards}, key=lambda name: (name != OWN, name))
    rescore = command("rescore", run.id, "--with my_reward.py:score --write --name edited")
    how = element(
        "p",
        "An edited reward function runs where its code is; what it gives stands here, and among the distributions, once it "
        "is stored: ",
        element("code", rescore),
        class_="note",
    )
    if len(names) < 2:
        return join([element("p", f"rollouts of this run have one reward: {', '.join(names)}", class_="none"), how])
    a, b = first(query, "a", names[0]), first(query, "b", names[1])
    options = {name: name for name in names}
    form = element(
        "form",
        *hidden({"run": run.id, "view": "disagree"}),
        select("a", "Reward", options, a),
        select("b", "against", options, b),
        _step_field(step, f"last {LAST_STEPS}"),
        element("button", "Compare"),
        action="/rewards",
        method="get",
        class_="bar",
    )
    found = await asyncio.to_thread(disagreement, rollouts, a, b)
    return join([form, element("p", _bounds(len(rollouts), steps), class_="note"), *_disagreement(found), how])


def _disagreement(found: Disagreement) -> list[Html]:
    a, b = found.names
    sentence = (
        f"{found.rollouts} rollouts have both; rank correlation {_interval(found.correlation)}; within groups, which "
        f"is what advantages see, {_interval(found.within_groups)}"
    )
    rows = [
        [
            replay_link(one.rollout_id),
            str(one.step),
            *(shown(value) for value in one.values),
            *(f"{place:.0%}" for place in one.places),
        ]
        for one in found.most
    ]
    head = ["rollout", "step", a, b, f"earns more than, by {a}", f"by {b}"]
    return [element("p", sentence), table(head, rows, "Rollouts that the two rewards place furthest apart")]


async def _hacks_view(reader: Reader, run: Run, query: Query) -> Html:
    report = await find_hacks(reader.store, run.id, MAX_READ)
    signs = [element("li", *_sign(run, one)) for one in report.hacks]
    found = element("ul", *signs, class_="signs") if signs else element("p", "no sign of a hack", class_="none")
    return join(
        [
            element("p", _bounds(report.rollouts, report.steps), class_="note"),
            element("div", element("h2", "Signs"), found, class_="alarms" if signs else None),
            element("p", "A sign is no proof: read the rollouts that it names.", class_="note"),
            *_hack_numbers(report),
        ]
    )


def _sign(run: Run, hack: RewardHack) -> list[Html | str]:
    ids = hack.kind == "length_explains"  # the others have metrics as evidence, which the run's page draws
    see = [replay_link(one) for one in hack.evidence] if ids else [run_link(run.id, ", ".join(hack.evidence))]
    return [element("strong", hack.kind), f": {hack.text}. See ", join(part for link in see for part in (link, " "))]


def _hack_numbers(report: HackReport) -> list[Html]:
    lengths = [[one.reward, _interval(one.correlation), _interval(one.given_turns)] for one in report.lengths]
    trends = [
        [one.name, shown(one.first), shown(one.last), shown(one.noise), str(one.change.n)] for one in report.trends
    ]
    return [
        element("h2", "Rewards and the length of rollouts"),
        table(
            ["reward", "correlation with sampled tokens, within groups", "the same given the number of calls"],
            lengths,
            "Rewards and the length of rollouts",
        ),
        element("h2", "Over the run"),
        table(["metric", "from", "to", "noise", "points"], trends, "Trends over the run"),
    ]


def _step_form(run: Run, view: str, step: int | None, otherwise: str) -> Html:
    return element(
        "form",
        *hidden({"run": run.id, "view": view}),
        _step_field(step, otherwise),
        element("button", "Show"),
        action="/rewards",
        method="get",
        class_="bar",
    )


def _step_field(step: int | None, otherwise: str) -> Html:
    field = element("input", type="number", name="step", min=0, value=step, placeholder=otherwise)
    return element("label", "Step ", field)


def _bounds(rollouts: int, steps: Sequence[int]) -> str:
    listed = ", ".join(map(str, steps))
    return f"{rollouts} rollouts of step{'s' if len(steps) > 1 else ''} {listed}: the first {MAX_READ} of each step at most"


def _interval(one: Interval | None) -> str:
    return "not known" if one is None else f"{interval_text(one, '+.2f')}, n = {one.n}"


VIEWS: Mapping[str, tuple[str, View]] = MappingProxyType(
    {
        "distribution": ("Distributions", _distribution_view),
        "disagree": ("Disagreement", _disagreement_view),
        "hacks": ("Signs of hacks", _hacks_view),
        "explain": ("One reward step by step", explain_view),
        "what-if": ("What if", what_if_view),
    }
)
"""Views by their name in an address, with their titles; the first is the default."""
