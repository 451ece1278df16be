"""``agl rewards explain``, ``what-if`` and ``report``: why rollouts earned what they did."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentlightning.cli.options import (
    REWARD_FUNCTION,
    Json,
    RunId,
    Step,
    Store,
    print_columns,
    print_json,
    reward_scorer,
    with_store,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from agentlightning.analysis.intervals import Interval
    from agentlightning.analysis.reward_debugger import WhatIfReport
    from agentlightning.analysis.reward_statistics import Disagreement, HackReport, RewardDistribution
    from agentlightning.store.base import LightningStore

THREADS = 8
SHOWN = 20
"""Calls that a table shows; --json has all."""
SPREAD_STEPS = 6
"""Steps over a run whose distributions are shown where none is named."""

Policy = Annotated[str | None, typer.Option("--policy", help="Alias of the policy; the first one by default.")]


def explain(
    rollout: Annotated[str, typer.Argument(metavar="ROLLOUT", help="Id of a training rollout.")],
    policy: Policy = None,
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Explain a rollout's reward, and the credit and advantage of its calls, step by step."""
    from agentlightning.analysis.reward_debugger import explain_rollout
    from agentlightning.trainer.display import screen

    found = with_store(store, lambda opened: explain_rollout(opened, rollout, policy))
    if as_json:
        print_json(found)
        return
    console = screen()
    console.print(f"rollout {rollout}  step {found.step} of {found.run_id}  policy {found.policy}", soft_wrap=True)
    for line in found.lines:
        console.print(line, soft_wrap=True)


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
    function: Annotated[str | None, typer.Option("--with", help=REWARD_FUNCTION)] = None,
    policy: Policy = None,
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Show what another credit rule, advantage, weighting or reward function would make of a stored step; writes nothing."""
    from concurrent.futures import ThreadPoolExecutor

    from agentlightning.analysis import reward_debugger
    from agentlightning.trainer.display import screen

    with ExitStack() as stack:
        scorer = None
        if function is not None:
            scorer = reward_scorer(function, stack.enter_context(ThreadPoolExecutor(THREADS)))
        change = reward_debugger.RewardChange(
            credit=credit,
            credit_settings=_settings(settings),
            advantage=advantage,
            weights=_weights(weights),
            scorer=scorer,
        )
        report = with_store(store, lambda opened: reward_debugger.what_if(opened, run, step, change, policy))
    if as_json:
        print_json(report)
    else:
        _print_what_if(screen(), report)


def report(
    run: RunId,
    step: Step = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option("--compare", metavar="REWARD OTHER", help="Show where two rewards, by name, disagree most."),
    ] = None,
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Show the distribution of each reward by step and call, and signs of reward hacking; or where two rewards disagree."""
    if compare is not None:
        _disagreement(run, step, compare, as_json, store)
        return
    from agentlightning.analysis.reward_statistics import distributions, find_hacks, latest_steps, read_rewarded
    from agentlightning.trainer.display import screen

    async def work(opened: LightningStore) -> tuple[list[RewardDistribution], HackReport]:
        steps = await latest_steps(opened, run, SPREAD_STEPS, spread=True) if step is None else [step]
        return distributions(await read_rewarded(opened, run, steps, calls=True)), await find_hacks(opened, run)

    found, hacks = with_store(store, work)
    if as_json:
        print_json({"distributions": found, "hacks": hacks})
        return
    rows: list[Sequence[str]] = [("reward", "step", "call", "n", "mean", "deviation", "lowest", "quartiles", "highest")]
    for one in found:
        low, *quartiles, high = one.quartiles
        numbers = [str(one.n), *(f"{number:.3f}" for number in (one.mean, one.deviation, low))]
        middle = " ".join(f"{number:.3f}" for number in quartiles)
        rows.append((one.name, str(one.step), str(one.call or "-"), *numbers, middle, f"{high:.3f}"))
    console = screen()
    print_columns(console, rows)
    console.print()
    _print_hacks(console, hacks)


def _disagreement(run: str, step: int | None, names: tuple[str, str], as_json: bool, store: str | None) -> None:
    from agentlightning.analysis.reward_statistics import LAST_STEPS, disagreement, latest_steps, read_rewarded
    from agentlightning.trainer.display import screen

    name, other = names

    async def work(opened: LightningStore) -> Disagreement:
        steps = await latest_steps(opened, run, LAST_STEPS) if step is None else [step]
        return disagreement(await read_rewarded(opened, run, steps), name, other)

    found = with_store(store, work)
    if as_json:
        print_json(found)
        return
    console = screen()
    console.print(
        f"{found.rollouts} rollouts; rank correlation {_interval(found.correlation)}, "
        f"within groups {_interval(found.within_groups)}",
        soft_wrap=True,
    )
    rows: list[Sequence[str]] = [("rollout", "step", name, other, f"place by {name}", f"by {other}")]
    for one in found.most:
        values, places = (f"{value:.3f}" for value in one.values), (f"{place:.0%}" for place in one.places)
        rows.append((one.rollout_id, str(one.step), *values, *places))
    print_columns(console, rows)


def _print_what_if(console: Console, report: WhatIfReport) -> None:
    for name in report.after:
        console.print(f"{name}: {report.before[name]} -> {report.after[name]}", soft_wrap=True)
    changed = sorted((one for one in report.calls if one.change), key=lambda one: -abs(one.change))
    rows = [("rollout", "call", "tokens", "reward", "credit", "advantage")]
    for one in changed[:SHOWN]:
        rows.append(
            (
                one.rollout_id,
                f"{one.place}{f' by {one.agent}' if one.agent else ''}",
                str(one.tokens),
                _change(*report.rewards[one.rollout_id]),
                _change(one.credit_before, one.credit_after),
                _change(one.advantage_before, one.advantage_after),
            )
        )
    print_columns(console, rows)
    if len(changed) > SHOWN:
        console.print(f"… and {len(changed) - SHOWN} calls more that change")
    turned, moved = (f"{one:.1%}" if one is not None else "-" for one in (report.turned, report.moved))
    was, now = ([pair[at] for pair in report.outcomes.values()].count("trained") for at in (0, 1))
    console.print(
        f"step {report.step} of {report.run_id}: {len(changed)} of {len(report.calls)} calls change; {turned} turn (another "
        f"sign of the advantage, {report.tokens_turned} tokens), advantages move by {moved} of their size; rollouts "
        f"trained: {was} -> {now}",
        soft_wrap=True,
    )
    if report.problems:
        rollout, problem = next(iter(report.problems.items()))
        console.print(
            f"the function failed on {len(report.problems)} rollouts, first on {rollout}: {problem}",
            soft_wrap=True,
            style="yellow",
        )


def _print_hacks(console: Console, report: HackReport) -> None:
    for hack in report.hacks:
        console.print(f"{hack.kind}: {hack.text}", soft_wrap=True, style="yellow")
        console.print(f"  see: {', '.join(hack.evidence)}", soft_wrap=True)
    if not report.hacks:
        console.print("no sign of a hack")
    console.print()
    rows: list[Sequence[str]] = [("reward", "correlation with tokens, within groups", "the same given turns")]
    rows += [(one.reward, _interval(one.correlation), _interval(one.given_turns)) for one in report.lengths]
    print_columns(console, rows)
    rows = [("over the run", "from", "to", "noise", "points")]
    rows += [
        (one.name, f"{one.first:.3f}", f"{one.last:.3f}", f"{one.noise:.3f}", str(one.change.n))
        for one in report.trends
    ]
    print_columns(console, rows)
    steps = f"{report.steps[0]} to {report.steps[-1]}" if len(report.steps) > 1 else str(report.steps[0])
    console.print(f"{report.rollouts} rollouts of steps {steps}")


def _settings(given: Sequence[str] | None) -> dict[str, Any] | None:
    from agentlightning.config.file import setting_of

    return None if given is None else dict(setting_of(one, "--credit-set") for one in given)


def _weights(given: str | None) -> dict[str, float] | None:
    from agentlightning.errors import ConfigError

    if given is None:
        return None
    found = {}
    for part in given.split(","):
        name, _, number = part.partition("=")
        try:
            found[name.strip()] = float(number)
        except ValueError:
            raise ConfigError(f"--weights: expected NAME=NUMBER, separated by commas, got {part!r}") from None
    return found


def _change(before: float | None, after: float | None) -> str:
    was, now = ("-" if one is None else f"{one:.3f}" for one in (before, after))
    return was if was == now else f"{was} -> {now}"


def _interval(one: Interval | None) -> str:
    return "-" if one is None else f"{one.value:+.2f} [{one.low:+.2f}, {one.high:+.2f}] n={one.n}"
