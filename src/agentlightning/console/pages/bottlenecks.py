"""Bottlenecks of a run: where the time of its steps goes, what bounds it, and what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentlightning.analysis.bottlenecks import LATEST, Bottleneck, BottleneckReport, Lane, read_bottlenecks
from agentlightning.console.markup import Html, element, join
from agentlightning.console.pages.choose import chosen_run
from agentlightning.console.parts import Query, number, run_link, shown, table
from agentlightning.console.reader import Reader
from agentlightning.records import Run

MEANINGS: Mapping[str, str] = {
    "sampler": "had a call of the policy",
    "gateway": "had a call, of a policy or an external model; its own work on a call is not recorded apart from the model's",
    "workers": "share of the slots of the run's workers in which a rollout ran",
    "agents": "share of these slots before and between calls: tools and the agents' own code",
    "reward": "share of these slots after the last call: the agents' end and their rewards, which are not recorded apart",
    "learner": "updated weights",
}
PARTS: Mapping[str, str] = {
    "queued": "waited for a worker",
    "model": "calls of the policy",
    "between calls": "before and between calls: tools and the agent's own code",
    "after calls": "after the last call: the agent's end and its reward",
}


async def bottlenecks_page(reader: Reader, query: Query) -> Html:
    """The report of the run of the address over its latest steps."""
    run = await chosen_run(reader, query, "/bottlenecks", "Bottlenecks")
    if not isinstance(run, Run):
        return run
    latest = number(query, "steps")
    found = await read_bottlenecks(reader.store, run.id, LATEST if latest is None else latest)
    head = [element("h1", "Bottlenecks"), element("p", run_link(run.id), " ", run.name)]
    if not found.steps:
        return join([*head, element("p", "no training step has ended yet", class_="none")])
    return join(
        [
            *head,
            element("p", f"A step takes {found.step_s:.3g} s, mean of the latest {found.steps}."),
            element("h2", "What bounds it"),
            _findings(found),
            element("h2", "Where the time goes"),
            _busy(found),
            _table("Phases of a step", "phase", found.phases, {}),
            _table("A rollout, from queueing to its end", "part", found.rollout, PARTS) if found.rollout else None,
        ]
    )


def _findings(found: BottleneckReport) -> Html:
    if not found.findings:
        none = "nothing bounds it by itself: no rule finds more than a tenth of the time"
        return element("p", none, class_="none")
    return element("ol", *map(_finding, found.findings), class_="findings")


def _finding(one: Bottleneck) -> Html:
    return element(
        "li",
        element("h3", one.name, element("span", f"up to {one.gain:.0%} of the time per rollout", class_="of")),
        element("p", one.text),
        element("p", "Change: ", one.change, ": ", join(_names(one.settings))),
    )


def _names(settings: Sequence[str]) -> list[Html | str]:
    return [part for name in settings for part in (", ", element("code", name))][1:]


def _busy(found: BottleneckReport) -> Html:
    shares = {lane.name: lane.share for lane in found.busy}
    rows = [[name, f"{shares[name]:.0%}", MEANINGS[name]] for name in MEANINGS if name in shares]
    missing = [name for name in MEANINGS if name not in shares]
    note = f"not recorded in these steps: {', '.join(missing)}" if missing else None
    return join(
        [
            table(["lane", "busy", "share of the step in which it"], rows, "Busy during a step"),
            element("p", note, class_="none") if note else None,
        ]
    )


def _table(title: str, name: str, of: Sequence[Lane], meanings: Mapping[str, str]) -> Html:
    rows = [[lane.name, f"{lane.share:.0%}", shown(lane.seconds), meanings.get(lane.name, "")] for lane in of]
    return join([element("h3", title), table([name, "share", "seconds", ""], rows, title)])
