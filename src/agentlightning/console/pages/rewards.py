"""The rewards of a run: their distribution, signs of hacks, and one explained step by step.

All numbers are those of analysis/, which imports nothing that a record names: whoever wants that gets the command, and runs
it with their own rights. A view reads some steps, at most `MAX_READ` rollouts of each.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from agentlightning.algorithms.credit import CREDIT
from agentlightning.algorithms.lightning_rl import TREE
from agentlightning.algorithms.selection import is_predicate
from agentlightning.analysis.intervals import Interval
from agentlightning.analysis.reward_debugger import RewardExplanation, consuming_step, explain_rollout
from agentlightning.analysis.reward_statistics import (
    HackReport,
    RewardDistribution,
    RewardHack,
    distributions,
    find_hacks,
    latest_steps,
    read_rewarded,
)
from agentlightning.console.charts import histogram
from agentlightning.console.markup import (
    Html,
    Query,
    choice,
    element,
    field,
    first,
    form,
    join,
    link,
    note,
    number,
    page,
    replay_link,
    run_link,
    select,
    shown,
    table,
    url,
    wrong,
)
from agentlightning.console.markup import interval as interval_text
from agentlightning.console.measures import away_from_zero
from agentlightning.console.reader import Reader
from agentlightning.errors import AgentLightningError, ConfigError, InputError, NotFoundError
from agentlightning.records import CallCredit, Run
from agentlightning.runtime.code_loader import is_code
from agentlightning.store.base import RolloutQuery
from agentlightning.store.summaries import SummaryQuery

MAX_READ = 256
"""Rollouts of a step that a view reads, with their calls."""
MAX_ROWS = 200
"""Distributions that are shown: rewards times steps times calls may be many."""
SPREAD_STEPS = 6
"""Steps over the run whose distributions are shown where none is named."""
MAX_STEP_ROLLOUTS = 1000
"""Rollouts of a step that is explained; the command has no bound."""
MAX_LISTED = 50
"""Rollouts to choose from."""
TIMEOUT_S = 60.0
RULES = {name: name for name, rule in CREDIT.items() if not rule.needs and name != TREE}
"""Credit rules of recorded rewards alone: the others read earlier steps, ask a model, or are of trees."""

View = Callable[[Reader, Run, Query], Awaitable[Html]]


async def rewards_page(reader: Reader, query: Query) -> Html:
    """The view of the address; without a run, runs to choose from."""
    run = await reader.chosen_run(query, "/rewards", "Rewards")
    if not isinstance(run, Run):
        return run
    view = choice(query, "view", tuple(VIEWS))
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
        content = wrong(str(error) or f"the store did not answer within {TIMEOUT_S:.0f} s; see: agl rewards --help")
    views = element("nav", *links, class_="pages", aria_label="views of the rewards")
    return page(f"Rewards of {run.name or run.id}", element("p", "run ", run_link(run.id)), views, content)


async def _distribution_view(reader: Reader, run: Run, query: Query) -> Html:
    step = number(query, "step")
    steps = await latest_steps(reader.store, run.id, SPREAD_STEPS, spread=True) if step is None else [step]
    rollouts = await read_rewarded(reader.store, run.id, steps, calls=True, limit=MAX_READ)
    found = await asyncio.to_thread(distributions, rollouts)
    chosen = field("Step", "step", step, type="number", min=0, placeholder="steps over the whole run")
    head = ["reward", "step", "call", "n", "mean", "deviation", "lowest", "median", "highest", "values"]
    rows = table(head, map(_distribution, found[:MAX_ROWS]), "Distribution of each reward by step and call")
    left = f"{len(found) - MAX_ROWS} more are left out; name a step" if len(found) > MAX_ROWS else None
    shown_form = form("/rewards", chosen, hidden={"run": run.id, "view": "distribution"})
    return join([shown_form, _bounds(len(rollouts), steps), rows, note(left)])


def _distribution(one: RewardDistribution) -> list[Html | str]:
    low, _, middle, _, high = one.quartiles
    numbers = [shown(value) for value in (one.mean, one.deviation, low, middle, high)]
    place = "whole rollout" if one.call is None else f"call {one.call}"
    return [one.name, str(one.step), place, str(one.n), *numbers, histogram(one.bins, low, high)]


async def _hacks_view(reader: Reader, run: Run, query: Query) -> Html:
    report = await find_hacks(reader.store, run.id, MAX_READ)
    signs = [element("li", *_sign(run, one)) for one in report.hacks]
    found = element("ul", *signs, class_="signs") if signs else note("no sign of a hack")
    return join(
        [
            _bounds(report.rollouts, report.steps),
            element("div", element("h2", "Signs"), found, class_="alarms" if signs else None),
            element("p", "A sign is no proof: read the rollouts that it names.", class_="note"),
            *_hack_numbers(report),
        ]
    )


def _sign(run: Run, hack: RewardHack) -> list[Html | str]:
    ids = hack.kind == "length_explains"  # the others have metrics as evidence, which the run's page draws
    see = [replay_link(one) for one in hack.evidence] if ids else [run_link(run.id, ", ".join(hack.evidence))]
    return [element("strong", hack.kind), f": {hack.text}. See ", join(see, " ")]


def _hack_numbers(report: HackReport) -> list[Html | None]:
    lengths = [[one.reward, _interval(one.correlation), _interval(one.given_turns)] for one in report.lengths]
    trends = [
        [one.name, shown(one.first), shown(one.last), shown(one.noise), str(one.change.n)] for one in report.trends
    ]
    head = ["reward", "correlation with sampled tokens, within groups", "the same given the number of calls"]
    return [
        element("h2", "Rewards and the length of rollouts"),
        table(head, lengths, "Rewards and the length of rollouts"),
        element("h2", "Over the run"),
        table(["metric", "from", "to", "noise", "points"], trends, "Trends over the run"),
    ]


async def _explain_view(reader: Reader, run: Run, query: Query) -> Html:
    """The calculation of one rollout's reward, credit and advantages."""
    rollout_id = first(query, "rollout")
    fields = [field("Rollout", "rollout", rollout_id, class_="wide"), _policy_field(run, query)]
    asked = form("/rewards", *fields, button="Explain", hidden={"run": run.id, "view": "explain"})
    if not rollout_id:
        return join([asked, await _rollouts(reader, run, number(query, "step"))])
    found = await reader.store.rollouts(RolloutQuery(run_id=run.id, ids=[rollout_id]))
    if not found:
        raise NotFoundError(f"{rollout_id[:80]}: no such rollout of run {run.id}")
    typed = f"agl rewards explain {shlex.quote(found[0].id)}"
    check_readable(run, typed)
    step = await consuming_step(reader.store, found[0])
    await check_size(reader, run.id, found[0].step if step is None else step, typed)
    explained = await explain_rollout(reader.store, found[0].id, first(query, "policy") or None)
    stored = {one.call_id: one for one in await reader.store.credit([found[0].id])}
    return join([asked, *_explanation(explained, stored)])


async def _rollouts(reader: Reader, run: Run, step: int | None) -> Html | None:
    where = "mode = 'train'" + ("" if step is None else f" and step = {step}")
    found = await reader.store.summaries(SummaryQuery(run_id=run.id, where=where, limit=MAX_LISTED))
    rows = (
        [
            link(row.id, "/rewards", run=run.id, view="explain", rollout=row.id),
            *(str(row.step), row.title, shown(row.reward) or "-", row.outcome or row.state),
        ]
        for row in found.rows
    )
    head = ["explain", "step", "task", "reward", "outcome"]
    return table(head, rows, "Training rollouts, newest first", "no training rollout has finished")


def _explanation(found: RewardExplanation, stored: Mapping[str, CallCredit]) -> list[Html | None]:
    own = found.rollout
    rows = [
        [
            _call_link(own.rollout_id, one.call_id, f"call {one.place}"),
            *(one.agent, str(one.tokens), shown(one.step_reward), f"{one.credit:.4g}", _shaded(one.advantage)),
            _shaded(stored[one.call_id].advantage) if one.call_id in stored else "not stored",
        ]
        for one in own.calls
    ]
    group = [
        [replay_link(key), shown(reward) or "not known", "this one" if key == own.rollout_id else None]
        for key, reward in found.group.items()
    ]
    head = ["call", "agent", "trained tokens", "step reward", "credit", "advantage", "as the step recorded it"]
    return [
        element("h2", "Step by step"),
        element("pre", "\n".join(found.lines), class_="explained"),
        table(head, rows, "Credit and advantage of its calls"),
        element("p", "Each of a call's trained tokens has its advantage.", class_="note"),
        element(
            "p", "Under another rule: ", element("code", f"agl rewards what-if {found.run_id} --step {found.step}")
        ),
        element("h2", "Its group"),
        table(["rollout", "reward", ""], group, "Rewards of its group"),
    ]


def _policy_field(run: Run, query: Query) -> Html | None:
    """A choice of the policy whose calls are meant, where the run trains several."""
    policies = run.config.get("policies")
    if not isinstance(policies, dict) or len(policies) < 2:
        return None
    return select("policy", "Policy", {name: name for name in policies}, first(query, "policy"))


def check_readable(run: Run, typed: str) -> None:
    """ConfigError, with the command to type, where the run's algorithm is not built in, or reads more than one step."""
    for name, text in _texts({name: run.config.get(name) for name in ("algorithm", "policies")}):
        if is_predicate(text) if name == "agents" else is_code(text):
            raise ConfigError(
                f"{name}: the run names code of its own, {text[:80]!r}, which the console never runs; type: {typed} "
                "--trust-run"
            )
        if name == "credit" and text in CREDIT and text not in RULES:
            raise ConfigError(f"credit: {text!r} reads more than the rewards of one step; type: {typed}")


def _texts(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a configuration, with the name of its setting."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _texts(part, str(key))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part, name)


async def check_size(reader: Reader, run_id: str, step: int, typed: str, limit: int = MAX_STEP_ROLLOUTS) -> None:
    """InputError, with the command to type, for a step of more rollouts than these views compute."""
    opened = [one for one in await reader.store.steps(run_id, after=step - 1, limit=1) if one.step == step]
    if opened:
        many = len(opened[0].consumed) > limit
    else:
        query = SummaryQuery(run_id=run_id, where=f"step = {step} and mode = 'train'", limit=limit)
        many = (await reader.store.summaries(query)).next is not None
    if many:
        raise InputError(f"step: expected one of at most {limit} rollouts here, {step} has more; type: {typed}")


def _call_link(rollout_id: str, call_id: str, text: str) -> Html:
    place = {"rollout": rollout_id, "call_id": call_id, "color": "advantage"}
    return element("a", text, href=url("/replay", place, "call"))


def _shaded(advantage: float | None) -> Html | str:
    """An advantage in the colour of its tokens."""
    if not advantage:
        return "none" if advantage is None else "0"
    shade = away_from_zero(advantage)
    return element("span", f"{advantage:+.4g}", class_=f"token {f's{shade}' if shade >= 0 else f'b{-shade}'}")


def _bounds(rollouts: int, steps: Sequence[int]) -> Html:
    listed = ", ".join(map(str, steps))
    many = "s" if len(steps) > 1 else ""
    text = f"{rollouts} rollouts of step{many} {listed}: the first {MAX_READ} of each step at most"
    return element("p", text, class_="note")


def _interval(one: Interval | None) -> str:
    return "not known" if one is None else f"{interval_text(one, '+.2f')}, n = {one.n}"


VIEWS: Mapping[str, tuple[str, View]] = MappingProxyType(
    {
        "distribution": ("Distributions", _distribution_view),
        "hacks": ("Signs of hacks", _hacks_view),
        "explain": ("One reward step by step", _explain_view),
    }
)
"""Views by their name in an address, with their titles; the first is the default."""
