"""The rewards of a run: their distribution, signs of hacks, one explained step by step, another credit rule.

All numbers are those of analysis/, which imports nothing that a record names: whoever wants that gets the command, and runs
it with their own rights. A view reads some steps, at most `MAX_READ` rollouts of each.
"""

from __future__ import annotations

import asyncio
import shlex
import statistics
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from agentlightning.algorithms.credit import CREDIT
from agentlightning.algorithms.lightning_rl import TREE
from agentlightning.algorithms.selection import is_predicate
from agentlightning.analysis.reward_debugger import (
    RewardChange,
    RewardExplanation,
    consuming_step,
    explain_rollout,
    what_if,
)
from agentlightning.analysis.reward_statistics import distributions, find_hacks, latest_steps, read_rewarded
from agentlightning.console.measures import FULL_ADVANTAGE, away_from_zero, shade_style
from agentlightning.console.reader import Reader
from agentlightning.console.render import Page, Query, choice, first, number, signed, whole
from agentlightning.errors import AgentLightningError, ConfigError, InputError, NotFoundError
from agentlightning.records import Run
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
"""Rollouts to choose from, and calls that another rule changes most."""
TIMEOUT_S = 60.0
RULES = {name: name for name, rule in CREDIT.items() if not rule.needs and name != TREE}
"""Credit rules of recorded rewards alone: the others read earlier steps, ask a model, or are of trees."""

View = Callable[[Reader, Run, Query], Awaitable[dict[str, Any]]]


async def rewards_page(reader: Reader, run: Run, query: Query) -> Page:
    """The view of the address."""
    view = choice(query, "view", tuple(VIEWS))
    values: dict[str, Any] = {"why": ""}
    try:
        async with asyncio.timeout(TIMEOUT_S), reader.analyses:
            values |= await VIEWS[view][1](reader, run, query)
    except (AgentLightningError, TimeoutError) as error:  # the way to the other views stays
        values["why"] = str(error) or f"the store did not answer within {TIMEOUT_S:.0f} s; see: agl rewards --help"
    titles = {name: title for name, (title, _) in VIEWS.items()}
    values |= {"view": view, "views": titles, "step": whole(query, "step"), "full": FULL_ADVANTAGE}
    return Page(template="rewards.html", title="Rewards", values=values, run=run)


async def _distribution_view(reader: Reader, run: Run, query: Query) -> dict[str, Any]:
    step = whole(query, "step")
    steps = await latest_steps(reader.store, run.id, SPREAD_STEPS, spread=True) if step is None else [step]
    rollouts = await read_rewarded(reader.store, run.id, steps, calls=True, limit=MAX_READ)
    found = await asyncio.to_thread(distributions, rollouts)
    return {
        "rollouts": len(rollouts),
        "steps": steps,
        "most": MAX_READ,
        "rows": found[:MAX_ROWS],
        "more": len(found) - MAX_ROWS,
    }


async def _hacks_view(reader: Reader, run: Run, query: Query) -> dict[str, Any]:
    report = await find_hacks(reader.store, run.id, MAX_READ)
    return {"report": report, "rollouts": report.rollouts, "steps": report.steps, "most": MAX_READ}


async def _explain_view(reader: Reader, run: Run, query: Query) -> dict[str, Any]:
    """The calculation of one rollout's reward, credit and advantages; without a rollout, some to choose from."""
    rollout_id, policies = first(query, "rollout"), run.config.get("policies")
    values: dict[str, Any] = {
        "rollout_id": rollout_id,
        "policy": first(query, "policy"),
        "policies": list(policies) if isinstance(policies, dict) and len(policies) > 1 else [],
    }
    if not rollout_id:
        step = whole(query, "step")
        where = "mode = 'train'" + ("" if step is None else f" and step = {step}")
        found = await reader.store.summaries(SummaryQuery(run_id=run.id, where=where, limit=MAX_LISTED))
        return values | {"choices": found.rows}
    rollouts = await reader.store.rollouts(RolloutQuery(run_id=run.id, ids=[rollout_id]))
    if not rollouts:
        raise NotFoundError(f"{rollout_id[:80]}: no such rollout of run {run.id}")
    typed = f"agl rewards explain {shlex.quote(rollouts[0].id)}"
    check_readable(run, typed)
    step = await consuming_step(reader.store, rollouts[0])
    await check_size(reader, run.id, rollouts[0].step if step is None else step, typed)
    explained = await explain_rollout(reader.store, rollouts[0].id, values["policy"] or None)
    stored = await reader.advantages(rollouts[0].id)
    return values | {
        "explained": explained,
        "verdict": _verdict(explained),
        "stored": stored,
        "shade": _shade,
    }


def _verdict(found: RewardExplanation) -> str:
    """The explanation in one sentence, with this rollout's own numbers."""
    own = found.rollout
    known = [reward for reward in found.group.values() if reward is not None]
    if own.reward is None or not own.calls or not known:
        return f"Step {found.step} learned nothing from it: its outcome is {own.outcome}."
    mean = statistics.fmean(known)
    advantage = statistics.fmean(call.advantage for call in own.calls)
    way = "more" if advantage > 0 else "less"
    effect = f"on average its tokens were made {way} probable" if advantage else "it moved no token"
    return (
        f"It earned {number(own.reward, 2)}, and its group of {len(known)} earned {number(mean, 2)} on average: the mean "
        f"advantage of its calls is {signed(advantage)}, so {effect}."
    )


async def _what_if_view(reader: Reader, run: Run, query: Query) -> dict[str, Any]:
    """The latest step, or the one of the address, under another credit rule: what would have been learned differently."""
    step = whole(query, "step")
    if step is None:
        step = (await latest_steps(reader.store, run.id, 1))[-1]
    algorithm = run.config.get("algorithm")
    given = algorithm.get("credit") if isinstance(algorithm, Mapping) else None
    own = given.get("type") if isinstance(given, Mapping) else given or "uniform"
    others = tuple(name for name in RULES if name != own)
    credit = choice(query, "credit", others)
    typed = f"agl rewards what-if {run.id} --step {step} --credit {credit}"
    values = {"what_step": step, "own": own, "rules": others, "credit": credit, "typed": typed}
    try:
        check_readable(run, typed)
        await check_size(reader, run.id, step, typed)
        report = await what_if(reader.store, run.id, step, RewardChange(credit=credit))
    except AgentLightningError as error:
        return values | {"why": str(error)}
    changed = sorted((call for call in report.calls if call.change), key=lambda call: -abs(call.change))
    return values | {"what": report, "changed": changed[:MAX_LISTED], "more": len(changed) - MAX_LISTED}


def _shade(advantage: float) -> str:
    """The colour of an advantage, as its tokens have it."""
    return shade_style(away_from_zero(advantage))


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


VIEWS: Mapping[str, tuple[str, View]] = MappingProxyType(
    {
        "distribution": ("Distributions", _distribution_view),
        "hacks": ("Signs of hacks", _hacks_view),
        "explain": ("One reward step by step", _explain_view),
        "what-if": ("What if", _what_if_view),
    }
)
"""Views by their name in an address, with their titles; the first is the default."""
