"""Advice about a run: where the time of its steps goes and what bounds it; what earlier runs say about its settings."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from agentlightning.analysis.bottlenecks import LATEST, read_bottlenecks
from agentlightning.console.reader import Reader
from agentlightning.console.render import Page, Query, whole
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


async def bottlenecks_page(reader: Reader, run: Run, query: Query) -> Page:
    """The report of the run over its latest steps."""
    latest = whole(query, "steps")
    found = await read_bottlenecks(reader.store, run.id, LATEST if latest is None else latest)
    values = {"found": found, "meanings": MEANINGS, "parts": PARTS}
    return Page(template="bottlenecks.html", title="Bottlenecks", values=values, run=run)


async def suggestions_page(reader: Reader, run: Run, query: Query) -> Page:
    """The suggestions for the configuration of the run, as ``agl runs suggest`` makes them of a file."""
    found = await reader.suggestions(run)
    best = [one for one in found.best if one.run_id != run.id]
    values = {"found": found, "best": best, "most": MAX_EVIDENCE}
    return Page(template="suggestions.html", title="Suggestions", values=values, run=run)
