"""Advice about a run: where the time of its steps goes and what bounds it; what earlier runs say about its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from agentlightning.analysis.bottlenecks import LATEST, Bottleneck, BottleneckReport, Lane, read_bottlenecks
from agentlightning.analysis.suggestions import AlarmRule, EarlierRun, Suggestions
from agentlightning.console.markup import (
    Html,
    Query,
    element,
    join,
    link,
    note,
    number,
    page,
    run_link,
    setting,
    shown,
    table,
)
from agentlightning.console.reader import Reader
from agentlightning.records import Run

MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "sampler": "had a call of the policy",
        "gateway": "had a call, of a policy or an external model; its own work on a call is not recorded apart",
        "workers": "share of the slots of the run's workers in which a rollout ran",
        "agents": "share of these slots before and between calls: tools and the agents' own code",
        "reward": "share of these slots after the last call: the agents' end and their rewards",
        "learner": "updated weights",
    }
)
PARTS: Mapping[str, str] = MappingProxyType(
    {
        "queued": "waited for a worker",
        "model": "calls of the policy",
        "between calls": "before and between calls: tools and the agent's own code",
        "after calls": "after the last call: the agent's end and its reward",
    }
)
MAX_EVIDENCE = 20
"""Runs of a rule that are named, with it and without."""
NO_BOTTLENECK = "nothing bounds it by itself: no rule finds more than a tenth of the time"


async def bottlenecks_page(reader: Reader, query: Query) -> Html:
    """The report of the run of the address over its latest steps."""
    run = await reader.chosen_run(query, "/bottlenecks", "Bottlenecks")
    if not isinstance(run, Run):
        return run
    latest = number(query, "steps")
    found = await read_bottlenecks(reader.store, run.id, LATEST if latest is None else latest)
    whose = element("p", run_link(run.id), " ", run.name)
    if not found.steps:
        return page("Bottlenecks", whose, note("no training step has ended yet"))
    findings = element("ol", *map(_finding, found.findings), class_="findings")
    return page(
        "Bottlenecks",
        whose,
        element("p", f"A step takes {found.step_s:.3g} s, mean of the latest {found.steps}."),
        element("h2", "What bounds it"),
        findings if found.findings else note(NO_BOTTLENECK),
        element("h2", "Where the time goes"),
        _busy(found),
        _lanes("Phases of a step", "phase", found.phases, {}),
        _lanes("A rollout, from queueing to its end", "part", found.rollout, PARTS) if found.rollout else None,
    )


def _finding(one: Bottleneck) -> Html:
    names = join((element("code", name) for name in one.settings), ", ")
    gain = element("span", f"up to {one.gain:.0%} of the time per rollout", class_="of")
    change = element("p", "Change: ", one.change, ": ", names)
    return element("li", element("h3", one.name, gain), element("p", one.text), change)


def _busy(found: BottleneckReport) -> Html:
    shares = {lane.name: lane.share for lane in found.busy}
    rows = [[name, f"{shares[name]:.0%}", MEANINGS[name]] for name in MEANINGS if name in shares]
    missing = ", ".join(name for name in MEANINGS if name not in shares)
    head = ["lane", "busy", "share of the step in which it"]
    left = note(f"not recorded in these steps: {missing}" if missing else None)
    return join([table(head, rows, "Busy during a step"), left])


def _lanes(title: str, name: str, of: Sequence[Lane], meanings: Mapping[str, str]) -> Html:
    rows = [[lane.name, f"{lane.share:.0%}", shown(lane.seconds), meanings.get(lane.name, "")] for lane in of]
    return join([element("h3", title), table([name, "share", "seconds", ""], rows, title)])


async def suggestions_page(reader: Reader, query: Query) -> Html:
    """The suggestions for the configuration of the run of the address, as ``agl runs suggest`` makes them of a file."""
    run = await reader.chosen_run(query, "/suggestions", "Suggestions")
    if not isinstance(run, Run):
        return run
    found = await reader.suggestions(run)
    counts = f"{found.comparable} comparable runs, {found.finished} of them finished with a held-out reward"
    return page(
        "Suggestions",
        element("p", "For the configuration of ", run_link(run.id), " ", run.name),
        element("p", f"{counts}: of the same model, tasks, agent, reward and kind of algorithm, this one included."),
        *(_parts(found) if not found.active else [_active(found)]),
    )


def _active(found: Suggestions) -> Html:
    items = [
        element("li", run_link(one.run_id), " has alarm ", element("strong", one.name), f": {one.text}")
        for one in found.active
    ]
    then = element("p", "Nothing else is suggested until it is gone.")
    return element("div", element("h2", "An alarm is active"), then, element("ul", *items), class_="alarms")


def _parts(found: Suggestions) -> list[Html | None]:
    rules = element("ul", *map(_rule, found.rules), class_="findings") if found.rules else note("no rule concerns it")
    head = ["run", "held-out", "state", "alarms", "differs in"]
    return [
        element("h2", "Rules"),
        rules,
        element("h2", "Best runs"),
        table(head, map(_earlier, found.best), "Runs with the highest held-out reward", "no run has one yet"),
        element("h2", "Settings to try"),
        *_proposals(found),
    ]


def _rule(rule: AlarmRule) -> Html:
    runs = [*rule.alarmed[:10], *rule.quiet[:10]]
    compare = element("p", link("Compare these runs", "/compare", run=",".join(runs))) if len(runs) > 1 else None
    evidence = element("p", "With it: ", _evidence(rule.alarmed), "; without: ", _evidence(rule.quiet))
    return element("li", element("strong", rule.alarm), f": {rule.text}", evidence, compare)


def _evidence(runs: Sequence[str]) -> Html:
    more = len(runs) - MAX_EVIDENCE
    links = join(map(run_link, runs[:MAX_EVIDENCE]), ", ")
    return join([links if runs else "none", f" and {more} more" if more > 0 else None])


def _earlier(one: EarlierRun) -> list[Html | str]:
    differs = "; ".join(f"{each.name} {setting(each.values[1])}" for each in one.differs) or "nothing"
    return [run_link(one.run_id), shown(one.held_out), one.state, ", ".join(one.alarms) or "-", differs]


def _proposals(found: Suggestions) -> list[Html | None]:
    if found.no_proposals is not None:
        return [element("p", f"No settings are suggested: {found.no_proposals}")]
    shares = ", ".join(f"{name} {share:.0%}" for name, share in found.importances.items())
    rows = [[", ".join(f"{name} = {setting(value)}" for name, value in one.items())] for one in found.proposals]
    importance = element("p", f"Settings by importance, over {found.finished} runs: {shares}.")
    return [importance, table(["settings"], rows, "Settings to try")]
