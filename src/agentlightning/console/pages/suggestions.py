"""Suggestions: what earlier runs say about a run's configuration, as ``agl runs suggest`` says it of a file."""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.analysis.suggestions import ActiveAlarm, AlarmRule, EarlierRun, Suggestions
from agentlightning.console.markup import Html, element, join, url
from agentlightning.console.pages.choose import chosen_run
from agentlightning.console.parts import Query, run_link, setting, shown, table
from agentlightning.console.reader import Reader
from agentlightning.records import Run

MAX_EVIDENCE = 20
"""Runs of a rule that are named, with it and without."""


async def suggestions_page(reader: Reader, query: Query) -> Html:
    """The suggestions for the configuration of the run of the address."""
    run = await chosen_run(reader, query, "/suggestions", "Suggestions")
    if not isinstance(run, Run):
        return run
    found = await reader.suggestions(run)
    counts = f"{found.comparable} comparable runs, {found.finished} of them finished with a held-out reward"
    return join(
        [
            element("h1", "Suggestions"),
            element("p", "For the configuration of ", run_link(run.id), " ", run.name),
            element(
                "p", f"{counts}: of the same model, tasks, agent, reward and kind of algorithm, this one included."
            ),
            *(_parts(found) if not found.active else [_active(found.active)]),
        ]
    )


def _active(alarms: Sequence[ActiveAlarm]) -> Html:
    items = [
        element("li", run_link(one.run_id), " has alarm ", element("strong", one.name), f": {one.text}")
        for one in alarms
    ]
    return element(
        "div",
        element("h2", "An alarm is active"),
        element("p", "Nothing else is suggested until it is gone."),
        element("ul", *items),
        class_="alarms",
    )


def _parts(found: Suggestions) -> list[Html]:
    rules = [_rule(one) for one in found.rules]
    nearest = list(found.nearest)
    if found.best is not None and found.best.run_id not in {one.run_id for one in nearest}:
        nearest.append(found.best)
    best = None if found.best is None else found.best.run_id
    head = ["run", "distance", "held-out", "state", "alarms", "differs in"]
    return [
        element("h2", "Rules"),
        element("ul", *rules, class_="findings") if rules else element("p", "no rule concerns it", class_="none"),
        element("h2", "Nearest runs"),
        table(head, (_row(one, best) for one in nearest), "Runs whose settings are nearest, and the best one")
        if nearest
        else element("p", "no comparable run", class_="none"),
        element("h2", "Settings to try"),
        *_proposals(found),
    ]


def _rule(rule: AlarmRule) -> Html:
    compared = url("/compare", {"run": ",".join([*rule.alarmed[:10], *rule.quiet[:10]])})
    enough = len(rule.alarmed) + len(rule.quiet) > 1
    return element(
        "li",
        element("strong", rule.alarm),
        f": {rule.text}",
        element("p", "With it: ", *_evidence(rule.alarmed), "; without: ", *_evidence(rule.quiet)),
        element("p", element("a", "Compare these runs", href=compared)) if enough else None,
    )


def _evidence(runs: Sequence[str]) -> list[Html | str]:
    if not runs:
        return ["none"]
    links = [part for one in runs[:MAX_EVIDENCE] for part in (", ", run_link(one))][1:]
    more = len(runs) - MAX_EVIDENCE
    return [*links, f" and {more} more"] if more > 0 else links


def _row(one: EarlierRun, best: str | None) -> list[Html | str]:
    differs = "; ".join(f"{each.name} {setting(each.values[1])}" for each in one.differs) or "nothing"
    return [
        join([run_link(one.run_id), " (the best)" if one.run_id == best else None]),
        f"{one.distance:.2f}",
        shown(one.held_out) or "-",
        one.state,
        ", ".join(one.alarms) or "-",
        differs,
    ]


def _proposals(found: Suggestions) -> list[Html]:
    if found.no_proposals is not None:
        return [element("p", f"No settings are suggested: {found.no_proposals}")]
    shares = ", ".join(f"{name} {share:.0%}" for name, share in found.importances.items())
    rows = [[", ".join(f"{name} = {setting(value)}" for name, value in one.items())] for one in found.proposals]
    return [
        element("p", f"Settings by importance, over {found.finished} runs: {shares}."),
        table(["settings"], rows, "Settings to try"),
    ]
