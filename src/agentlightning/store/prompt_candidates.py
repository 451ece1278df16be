"""Candidates of a prompt search in a store: their record, the rollouts that score them, and their lineage read back.

The search writes one version of the resource CANDIDATES for each candidate and each refused proposal; the texts are versions
of the run's prompt templates, which rollouts name. Whoever shows a search reads it here. Knows no algorithm.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from agentlightning.errors import StoreError
from agentlightning.records import JSON, Resource
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.scan import find_run, read_rollouts

CANDIDATES = "prompt:candidates"
"""Name of the resource; no template's, which has no colon."""
GROUP = "optimize"
"""First part of the group ids of a search's rollouts."""
_VALIDATION = re.compile(rf"{GROUP}:(\d{{1,9}}):val:(\d{{1,9}})(?::(\d{{1,9}}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateRecord:
    """One proposal of a search."""

    number: int | None
    """Position in the order of candidates, from 0, the texts that the search started from; None: it was refused."""
    texts: Mapping[str, str]
    """By name of the template; of messages NAME.0, NAME.1 and so on."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """Versions of all templates of the run, with which its rollouts are run."""
    parents: tuple[int, ...] = ()
    """Numbers of the candidates it was made from."""
    source: str = ""
    refused: str = ""
    """Sentence that says why it is no candidate."""

    def resource(self, run_id: str) -> Resource:
        return Resource(run_id=run_id, name=CANDIDATES, kind="prompt_candidate", value=asdict(self))


def group_id(number: int, split: str, task: int, again: int = 0) -> str:
    """The group of a candidate's rollouts on one task; its replicas are rollouts of it.

    again: of the candidate that a search starts from, counted up where all its rollouts failed and the search with them.
    """
    return f"{GROUP}:{number}:{split}:{task}" + (f":{again}" if again else "")


async def read_candidates(store: LightningStore, run_id: str) -> list[CandidateRecord]:
    """The proposals of a run's search in their order, refused ones among them; none where it had no search.

    One that was recorded twice, by a store that was cut off, is read once. NotFoundError where there is no such run.
    """
    await find_run(store, run_id)
    known: dict[tuple[tuple[str, str], ...], CandidateRecord] = {}
    for each in await store.resources(run_id, CANDIDATES, latest=False):
        record = _parsed(each)
        known.setdefault(tuple(sorted(record.texts.items())), record)
    return list(known.values())


def _parsed(resource: Resource) -> CandidateRecord:
    value: JSON = resource.value
    try:
        return CandidateRecord(**{**value, "parents": tuple(value["parents"])})
    except (KeyError, TypeError) as cause:
        raise StoreError(
            f"{resource.name}@{resource.version}: expected a candidate of a prompt search: {cause}"
        ) from cause


async def validation_rewards(store: LightningStore, run_id: str) -> dict[int, dict[int, float]]:
    """By candidate, the mean reward of its finished rollouts on each validation task; a rollout that failed counts as 0."""
    rewards: defaultdict[tuple[int, int], defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    async for portion in read_rollouts(store, RolloutQuery(run_id=run_id, mode="eval", states=["succeeded", "failed"])):
        for rollout in portion:
            found = _VALIDATION.fullmatch(rollout.group_id)  # others, which whoever may enqueue can name, are none
            if found is None:
                continue
            number, task, again = (int(each or 0) for each in found.groups())
            rewards[number, again][task].append(rollout.reward or 0.0)
    return {  # of a start that was made again the last counts
        number: {task: statistics.fmean(values) for task, values in sorted(by_task.items())}
        for (number, _), by_task in sorted(rewards.items())
    }
