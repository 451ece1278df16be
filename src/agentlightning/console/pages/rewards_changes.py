"""One reward step by step, and a stored step under another credit rule, advantage or weights.

Both are computed by analysis/reward_debugger.py, from the rollouts of one training step. The rules are built-in ones that
need recorded rewards alone. A run with code of its own, and an edited reward function, get the command that runs them with
the rights of whoever types it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from agentlightning.algorithms.advantage import ADVANTAGES
from agentlightning.algorithms.credit import CREDIT
from agentlightning.algorithms.lightning_rl import TREE
from agentlightning.algorithms.selection import is_predicate
from agentlightning.analysis.reward_debugger import (
    CallChange,
    RewardChange,
    RewardExplanation,
    WhatIfReport,
    consuming_step,
    explain_rollout,
    what_if,
)
from agentlightning.analysis.rewarded_rollouts import read_rewarded
from agentlightning.config.file import setting_of
from agentlightning.console.markup import Html, element, join, url
from agentlightning.console.measures import away_from_zero
from agentlightning.console.parts import (
    Query,
    choice,
    figures,
    first,
    number,
    replay_link,
    select,
    setting,
    shown,
    table,
)
from agentlightning.console.reader import Reader
from agentlightning.errors import AgentLightningError, ConfigError, InputError, NotFoundError, printable
from agentlightning.records import CallCredit, Run
from agentlightning.runtime.code_loader import is_code
from agentlightning.store.base import RolloutQuery
from agentlightning.store.summaries import SummaryQuery

MAX_STEP_ROLLOUTS = 1000
"""Rollouts of a step that these views compute; the commands have no bound."""
MAX_LISTED = 50
"""Rollouts to choose from, and calls of a change that are shown."""
RULES = {name: name for name, rule in CREDIT.items() if not rule.needs and name != TREE}
"""Credit rules of recorded rewards alone: the others read earlier steps, ask a model, or are of trees."""


async def explain_view(reader: Reader, run: Run, query: Query) -> Html:
    """The calculation of one rollout's reward, credit and advantages."""
    rollout_id = first(query, "rollout")
    form = element(
        "form",
        *hidden({"run": run.id, "view": "explain"}),
        element("label", "Rollout ", element("input", name="rollout", value=rollout_id, class_="wide")),
        _policy_field(run, query),
        element("button", "Explain"),
        action="/rewards",
        method="get",
        class_="bar",
    )
    if not rollout_id:
        return join([form, await _rollouts(reader, run, number(query, "step"))])
    found = await reader.store.rollouts(RolloutQuery(run_id=run.id, ids=[rollout_id]))
    if not found:
        raise NotFoundError(f"{rollout_id[:80]}: no such rollout of run {run.id}")
    typed = command("explain", found[0].id)
    check_readable(run, typed)
    step = await consuming_step(reader.store, found[0])
    await check_size(reader, run.id, found[0].step if step is None else step, typed)
    explained = await explain_rollout(reader.store, found[0].id, first(query, "policy") or None)
    stored = {one.call_id: one for one in await reader.store.credit([found[0].id])}
    return join([form, *_explanation(explained, stored)])


async def _rollouts(reader: Reader, run: Run, step: int | None) -> Html:
    where = "mode = 'train'" + ("" if step is None else f" and step = {step}")
    page = await reader.summaries(SummaryQuery(run_id=run.id, where=where, limit=MAX_LISTED))
    rows = [
        [
            element("a", row.id, href=url("/rewards", {"run": run.id, "view": "explain", "rollout": row.id})),
            str(row.step),
            row.title,
            shown(row.reward) or "-",
            row.outcome or row.state,
        ]
        for row in page.rows
    ]
    if not rows:
        return element("p", "no training rollout has finished", class_="none")
    return table(["explain", "step", "task", "reward", "outcome"], rows, "Training rollouts, newest first")


def _explanation(found: RewardExplanation, stored: Mapping[str, CallCredit]) -> list[Html]:
    rows = [
        [
            _call_link(found.rollout.rollout_id, one.call_id, f"call {one.place}"),
            one.agent,
            str(one.tokens),
            shown(one.step_reward),
            f"{one.credit:.4g}",
            _shaded(one.advantage),
            _shaded(stored[one.call_id].advantage) if one.call_id in stored else "not stored",
        ]
        for one in found.rollout.calls
    ]
    group = [
        [replay_link(one), shown(reward) or "not known", "this one" if one == found.rollout.rollout_id else None]
        for one, reward in found.group.items()
    ]
    head = ["call", "agent", "trained tokens", "step reward", "credit", "advantage", "as the step recorded it"]
    return [
        element("h2", "Step by step"),
        element("pre", "\n".join(found.lines), class_="explained"),
        table(head, rows, "Credit and advantage of its calls"),
        element("p", "Each of a call's trained tokens has its advantage.", class_="note"),
        element("h2", "Its group"),
        table(["rollout", "reward", ""], group, "Rewards of its group"),
    ]


async def what_if_view(reader: Reader, run: Run, query: Query) -> Html:
    """A step's rollouts as the run learned from them, and under the change of the address."""
    step, last = number(query, "step"), run.summary.get("step")
    step = step if step is not None else last if isinstance(last, int) else 1
    names = await _reward_names(reader, run, step)
    parts = [_change_form(run, step, query, names)]
    options: list[str] = []
    try:
        change, options = _asked_change(query, names)
        if options:
            typed = command("what-if", run.id, f"--step {step}", *options)
            check_readable(run, typed)
            await check_size(reader, run.id, step, typed)
            parts += _changes(await what_if(reader.store, run.id, step, change, first(query, "policy") or None))
    except AgentLightningError as error:  # the form stays, to mend it
        parts.append(element("p", str(error), class_="wrong", role="alert"))
    return join([*parts, *_own_function(run, command("what-if", run.id, f"--step {step}", *options))])


def _asked_change(query: Query, names: Sequence[str]) -> tuple[RewardChange, list[str]]:
    """The change of the address, and the same as options of the command. InputError or ConfigError for what is none."""
    credit, advantage = choice(query, "credit", ("", *RULES)), choice(query, "advantage", ("", *ADVANTAGES))
    sets = [part.strip() for part in first(query, "settings").split(",") if part.strip()]
    pairs = zip(query.get("reward", ()), query.get("weight", ()), strict=False)
    stored = {
        printable(name): name for name in names
    }  # a form has no character that a terminal or a reader's eye obeys
    weights = {stored.get(name, name): _weight(text) for name, text in pairs if text}
    weighed = ",".join(f"{name}={weight:g}" for name, weight in weights.items())
    given = [("--credit", credit), *(("--credit-set", one) for one in sets), ("--advantage", advantage)]
    change = RewardChange(
        credit=credit or None,
        credit_settings=dict(setting_of(one, "settings") for one in sets) if sets else None,
        advantage=advantage or None,
        weights=weights or None,
    )
    return change, [f"{name} {shlex.quote(value)}" for name, value in (*given, ("--weights", weighed)) if value]


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"weight: expected a number, got {text[:80]!r}") from None


async def _reward_names(reader: Reader, run: Run, step: int) -> list[str]:
    try:
        some = await read_rewarded(reader.store, run.id, [step], limit=MAX_LISTED)
    except NotFoundError:
        return []
    return sorted({name for one in some for name in one.rewards})


def _change_form(run: Run, step: int, query: Query, names: Sequence[str]) -> Html:
    given = dict(zip(query.get("reward", ()), query.get("weight", ()), strict=False))
    weights = [
        element(
            "label",
            f"{name} ",
            element("input", type="hidden", name="reward", value=name),
            element("input", type="number", step="any", name="weight", value=given.get(printable(name))),
        )
        for name in names
    ]
    return element(
        "form",
        *hidden({"run": run.id, "view": "what-if"}),
        element("label", "Step ", element("input", type="number", name="step", min=0, value=step)),
        select("credit", "Credit rule", {"": "as the run", **RULES}, first(query, "credit")),
        element("label", "Its settings ", element("input", name="settings", value=first(query, "settings"),
                                                  placeholder="gamma=0.9")),
        select("advantage", "Advantage", {"": "as the run", **dict(zip(ADVANTAGES, ADVANTAGES, strict=True))},
               first(query, "advantage")),
        _policy_field(run, query),
        element("fieldset", element("legend", "Weights of rewards"), *weights) if weights else None,
        element("button", "Show"),
        action="/rewards",
        method="get",
        class_="bar",
    )  # fmt: skip


def _policy_field(run: Run, query: Query) -> Html | None:
    """A choice of the policy whose calls are meant, where the run trains several."""
    policies = run.config.get("policies")
    if not isinstance(policies, dict) or len(policies) < 2:
        return None
    return select("policy", "Policy", {name: name for name in policies}, first(query, "policy"))


def _own_function(run: Run, typed: str) -> list[Html]:
    """The way to try an edited reward function."""
    return [
        element("h2", "An edited reward function"),
        element("p", "runs where its code is, with your rights, never here. This prints the same and writes nothing:"),
        element("pre", f"{typed} --with my_reward.py:score"),
        element("p", "This stores its rewards beside the others; Disagreement and Distributions then have them:"),
        element("pre", command("rescore", run.id, "--with my_reward.py:score --write --name edited")),
    ]  # fmt: skip


def _changes(report: WhatIfReport) -> list[Html]:
    changed = sorted((one for one in report.calls if one.change), key=lambda one: -abs(one.change))
    was, now = ([pair[at] for pair in report.outcomes.values()].count("trained") for at in (0, 1))
    settings = [[name, setting(report.before[name]), setting(report.after[name])] for name in report.after]
    left = len(changed) - MAX_LISTED
    return [
        element("h2", f"Step {report.step} under the change"),
        table(["setting", "as it was", "under the change"], settings, "Settings that differ"),
        figures(
            {
                "calls that change": f"{len(changed)} of {len(report.calls)}",
                "calls that turn": "not known" if report.turned is None else f"{report.turned:.1%}",
                "tokens that turn": f"{report.tokens_turned:,}",
                "advantages move by": "not known" if report.moved is None else f"{report.moved:.1%} of their size",
                "rollouts trained": f"{was} → {now}",
            }
        ),
        element(
            "p",
            "A call turns where its advantage gets another sign, gets one or loses it: its tokens would then be made more "
            "probable instead of less, or the other way.",
            class_="note",
        ),
        table(
            ["call", "agent", "tokens", "reward", "credit", "advantage of each token", "under the change"],
            (_change(one, report.rewards[one.rollout_id]) for one in changed[:MAX_LISTED]),
            "Calls that change, those that change most first",
        ),
        element("p", f"{left} more calls change", class_="none") if left > 0 else element("span"),
    ]


def _change(one: CallChange, rewards: tuple[float | None, float | None]) -> list[Html | str | None]:
    return [
        _call_link(one.rollout_id, one.call_id, f"{one.rollout_id}, call {one.place}"),
        one.agent,
        str(one.tokens),
        _pair(*rewards),
        _pair(one.credit_before, one.credit_after),
        _shaded(one.advantage_before),
        _shaded(one.advantage_after),
    ]


def check_readable(run: Run, typed: str) -> None:
    """ConfigError, with the command to type, where the run's algorithm is not built in, or reads more than one step."""
    for name, text in _texts({name: run.config.get(name) for name in ("algorithm", "policies")}):
        if is_predicate(text) if name == "agents" else is_code(text):
            raise ConfigError(
                f"{name}: the run names code of its own, {text[:80]!r}, which the console never runs; type: {typed}"
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
        where = f"step = {step} and mode = 'train'"
        page = await reader.summaries(SummaryQuery(run_id=run_id, where=where, limit=limit))
        many = page.next is not None
    if many:
        raise InputError(f"step: expected one of at most {limit} rollouts here, {step} has more; type: {typed}")


def command(name: str, target: str, *options: str) -> str:
    """Returns a command of ``agl rewards`` about a run or rollout, as it is typed."""
    return " ".join(["agl rewards", name, shlex.quote(target), *options])


def hidden(fields: Mapping[str, str]) -> list[Html]:
    """Returns fields of a form that nobody edits."""
    return [element("input", type="hidden", name=name, value=value) for name, value in fields.items()]


def _call_link(rollout_id: str, call_id: str, text: str) -> Html:
    return element(
        "a", text, href=url("/replay", {"rollout": rollout_id, "call_id": call_id, "color": "advantage"}, "call")
    )


def _shaded(advantage: float | None) -> Html | str:
    """An advantage in the colour of its tokens."""
    if not advantage:
        return "none" if advantage is None else "0"
    shade = away_from_zero(advantage)
    return element("span", f"{advantage:+.4g}", class_=f"token {f's{shade}' if shade >= 0 else f'b{-shade}'}")


def _pair(before: float | None, after: float | None) -> str:
    was, now = (shown(one) or "none" for one in (before, after))
    return was if was == now else f"{was} → {now}"
