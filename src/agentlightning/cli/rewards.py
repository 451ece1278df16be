"""``agl rewards``: why stored rollouts earned what they did, and what other functions and rules would give."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentlightning.cli.options import (
    REWARD_FUNCTION,
    Json,
    Mode,
    RunId,
    Step,
    Store,
    TrustRun,
    interval,
    number,
    print_columns,
    print_json,
    reward_scorer,
    say,
    with_store,
)
from agentlightning.errors import ConfigError, RewardError

if TYPE_CHECKING:
    from agentlightning.analysis.intervals import Interval
    from agentlightning.analysis.reward_debugger import WhatIfReport
    from agentlightning.analysis.reward_statistics import HackReport, RewardDistribution
    from agentlightning.store.base import LightningStore
    from agentlightning.trainer.data.rescore import RescoredRollout, RewardComparison

SHOWN = 10
"""Rollouts that a table shows."""
SHOWN_CALLS = 20
"""Calls that a table shows; --json has all."""
SPREAD_STEPS = 6
"""Steps over a run whose distributions are shown."""
THREADS = 8
OWN = "reward"
EVERY_S = 5.0
"""Seconds between lines that say how far the scoring is."""

Policy = Annotated[str | None, typer.Option("--policy", help="Alias of the policy; the first one by default.")]

app = typer.Typer(
    help="Explain and recalculate the rewards of stored rollouts.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("explain")
def explain(
    rollout: Annotated[str, typer.Argument(metavar="ROLLOUT", help="Id of a training rollout.")],
    policy: Policy = None,
    trust_run: TrustRun = False,
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Explain a rollout's reward, credit and advantages."""
    from agentlightning.analysis.reward_debugger import explain_rollout

    found = with_store(store, lambda opened: explain_rollout(opened, rollout, policy, trust_run))
    if as_json:
        print_json(found)
        return
    say(f"rollout {rollout}  step {found.step} of {found.run_id}  policy {found.policy}")
    for line in found.lines:
        say(line)


@app.command("what-if")
def what_if(
    run: RunId,
    step: Annotated[int, typer.Option("--step", help="Training step whose rollouts are looked at.")],
    credit: Annotated[
        str | None, typer.Option("--credit", help="Another credit rule; see: agl train --list-algorithms")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--credit-set", help="A setting of the rule: --credit-set gamma=0.9. May be repeated."),
    ] = None,
    advantage: Annotated[
        str | None, typer.Option("--advantage", help="Another advantage; see: agl train --list-algorithms")
    ] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="Weights of rewards by name: answer=1,format=0.2")
    ] = None,
    policy: Policy = None,
    trust_run: TrustRun = False,
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Recalculate a stored step by another rule; writes nothing."""
    from agentlightning.analysis import reward_debugger
    from agentlightning.config.file import setting_of

    change = reward_debugger.RewardChange(
        credit=credit,
        credit_settings=None if settings is None else dict(setting_of(one, "--credit-set") for one in settings),
        advantage=advantage,
        weights=None if weights is None else dict(map(_weight, weights.split(","))),
    )
    found = with_store(store, lambda opened: reward_debugger.what_if(opened, run, step, change, policy, trust_run))
    print_json(found) if as_json else _print_what_if(found)


def _weight(given: str) -> tuple[str, float]:
    name, _, value = given.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        raise ConfigError(f"--weights: expected NAME=NUMBER, separated by commas, got {given!r}") from None


def _print_what_if(report: WhatIfReport) -> None:
    changed = sorted((one for one in report.calls if one.change), key=lambda one: -abs(one.change))
    was, now = ([pair[at] for pair in report.outcomes.values()].count("trained") for at in (0, 1))
    say(
        f"step {report.step} of {report.run_id}: {len(changed)} of {len(report.calls)} calls change; "
        f"{number(report.turned, '.1%')} turn (another sign of the advantage, {report.tokens_turned} tokens), advantages "
        f"move by {number(report.moved, '.1%')} of their size; rollouts trained: {was} -> {now}"
    )
    for name in report.after:
        say(f"{name}: {report.before[name]} -> {report.after[name]}")
    rows = [("rollout", "call", "tokens", "reward", "credit", "advantage")]
    for one in changed[:SHOWN_CALLS]:
        place = one.rollout_id, f"{one.place}{f' by {one.agent}' if one.agent else ''}", str(one.tokens)
        credit = _change(one.credit_before, one.credit_after)
        advantage = _change(one.advantage_before, one.advantage_after)
        rows.append((*place, _change(*report.rewards[one.rollout_id]), credit, advantage))
    print_columns(rows)
    if len(changed) > SHOWN_CALLS:
        say(f"… and {len(changed) - SHOWN_CALLS} calls more that change")


def _say_failures(problems: Sequence[tuple[str, str]]) -> None:
    if problems:
        rollout, problem = problems[0]
        say(f"the function failed on {len(problems)} rollouts, first on {rollout}: {problem}", style="yellow")


def print_reward_report(store: str | None, run: str, as_json: bool) -> None:
    """Prints the distribution of each reward by step and call, and signs of reward hacking."""
    from agentlightning.analysis import reward_statistics as statistics

    async def report_of(opened: LightningStore) -> tuple[list[RewardDistribution], HackReport]:
        steps = await statistics.latest_steps(opened, run, SPREAD_STEPS, spread=True)
        rollouts = await statistics.read_rewarded(opened, run, steps, calls=True)
        return statistics.distributions(rollouts), await statistics.find_hacks(opened, run)

    distributions, hacks = with_store(store, report_of)
    if as_json:
        print_json({"distributions": distributions, "hacks": hacks})
    else:
        _print_distributions(distributions)
        say()
        _print_hacks(hacks)


def _print_distributions(found: Sequence[RewardDistribution]) -> None:
    rows: list[Sequence[str]] = [("reward", "step", "call", "n", "mean", "deviation", "lowest", "quartiles", "highest")]
    for one in found:
        low, *quartiles, high = map(number, one.quartiles)
        figures = str(one.n), number(one.mean), number(one.deviation)
        rows.append((one.name, str(one.step), str(one.call or "-"), *figures, low, " ".join(quartiles), high))
    print_columns(rows)


def _print_hacks(report: HackReport) -> None:
    for hack in report.hacks:
        say(f"{hack.kind}: {hack.text}", style="yellow")
        say(f"  see: {', '.join(hack.evidence)}")
    if not report.hacks:
        say("no sign of a hack")
    say()
    rows = [("reward", "correlation with tokens, within groups", "the same given turns")]
    print_columns(
        [*rows, *((one.reward, *map(_interval, (one.correlation, one.given_turns))) for one in report.lengths)]
    )
    trends: list[Sequence[str]] = [("over the run", "from", "to", "noise", "points")]
    for one in report.trends:
        trends.append((one.name, *map(number, (one.first, one.last, one.noise)), str(one.change.n)))
    print_columns(trends)
    steps = f"{report.steps[0]} to {report.steps[-1]}" if len(report.steps) > 1 else str(report.steps[0])
    say(f"{report.rollouts} rollouts of steps {steps}")


@app.command("rescore")
def rescore(
    run: RunId,
    function: Annotated[str, typer.Option("--with", help=REWARD_FUNCTION)],
    write: Annotated[bool, typer.Option("--write", help="Keep the new rewards, under --name.")] = False,
    name: Annotated[str, typer.Option("--name", help="Name of the rewards that are kept.")] = "rescored",
    mode: Mode = None,
    step: Step = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Rollouts to score, at most.")] = None,
    store: Store = None,
) -> None:
    """Score a run's rollouts with another reward function."""
    from agentlightning.trainer.data.rescore import Rescoring, compare

    if not name or name == OWN:
        raise ConfigError(f"--name: {name!r} is the name of the rollouts' own rewards; choose another")

    async def work(opened: LightningStore) -> list[RescoredRollout]:
        rescoring = Rescoring(
            store=opened,
            run_id=run,
            scorer=scorer,
            mode=mode,
            step=step,
            limit=limit,
            keep_as=name if write else None,
            progress=_progress(),
        )
        await rescoring.score()
        return rescoring.found

    with ThreadPoolExecutor(THREADS) as threads:
        scorer = reward_scorer(function, threads)
        found = with_store(store, work)
    comparison = compare(found)
    _print_rescored(found, comparison)
    kept: dict[str, Any] = {}
    if write:
        kept = {"written": sum(one.score is not None and not one.stood for one in found), "name": name}
        before = comparison.scored - kept["written"]
        had = f"; {before} had one of that name, which stays: they were not scored again" if before else ""
        say(f"rewards of {kept['written']} rollouts written as {name!r}{had}")
    print_json({"run_id": run, **asdict(comparison), **kept})
    if not comparison.scored:
        raise RewardError(f"--with {function}: it scored none of {comparison.rollouts} rollouts")


def _progress() -> Callable[[int], None]:
    """A line to standard error now and then: a judge or a program may take hours over a run."""
    told_at = time.monotonic()

    def progress(done: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= EVERY_S:
            told_at = time.monotonic()
            typer.echo(f"note: {done} rollouts scored", err=True)

    return progress


def _print_rescored(found: Sequence[RescoredRollout], comparison: RewardComparison) -> None:
    changed = sorted((one for one in found if one.change), key=lambda one: -abs(one.change or 0.0))
    rows = [("", "old", "new"), ("mean", number(comparison.old_mean), number(comparison.new_mean))]
    print_columns([*rows, *((one.rollout.id, number(one.old), number(one.new)) for one in changed[:SHOWN])])
    if len(changed) > SHOWN:
        say(f"… and {len(changed) - SHOWN} more that changed")
    say(
        f"{comparison.rollouts} rollouts, {comparison.changed} changed, correlation {number(comparison.correlation)}, "
        f"order within groups kept {number(comparison.order_kept)}"
    )
    new = {one.new for one in found if one.new is not None}
    if len(new) == 1 and comparison.scored > 1:
        say(f"note: all {comparison.scored} new rewards are {new.pop():g}: they tell no rollout from another")
    _say_failures([(one.rollout.id, one.problem) for one in found if one.problem])


def _change(before: float | None, after: float | None) -> str:
    was, now = number(before), number(after)
    return was if was == now else f"{was} -> {now}"


def _interval(one: Interval | None) -> str:
    return "-" if one is None else f"{interval(one, '+.2f')} n={one.n}"
