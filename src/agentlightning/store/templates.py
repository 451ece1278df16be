"""Versions of prompt templates in a store, and the candidates of a prompt search.

`TemplateReader` is driven by workers and gateways; a version never changes, so that what was read stays true. The others are
driven by the command line and by optimizers. A search writes one version of the resource CANDIDATES for each candidate and
each refused proposal; the texts are versions of the run's templates, which rollouts name. Knows no algorithm.
"""

from __future__ import annotations

import asyncio
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from agentlightning.errors import InputError, NotFoundError, StoreError
from agentlightning.prompts.rollout_prompts import NAME, RolloutPrompts
from agentlightning.prompts.templates import Template, check_candidate
from agentlightning.records import JSON, Resource, Rollout
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.scan import find_run, read_rollouts

MAX_TEMPLATES = 1024  # versions kept by one reader

_Key = tuple[str, str, int]


class TemplateReader:
    """Use from one event loop."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._known: dict[_Key, Template] = {}
        self._reading = asyncio.Lock()

    async def of(self, rollout: Rollout) -> RolloutPrompts:
        """The templates that the rollout keeps. InputError where one does not parse, and the errors of the store."""
        templates = {
            name: await self._template((rollout.run_id, name, version)) for name, version in rollout.prompts.items()
        }
        return RolloutPrompts(rollout.task, templates, rollout.prompts)

    async def _template(self, key: _Key) -> Template:
        if (known := self._known.get(key)) is not None:
            return known
        async with self._reading:  # rollouts that begin together need the same versions
            if (known := self._known.get(key)) is None:
                if len(self._known) >= MAX_TEMPLATES:
                    self._known.clear()
                known = self._known[key] = await self._read(*key)
        return known

    async def _read(self, run_id: str, name: str, version: int) -> Template:
        for resource in await self._store.resources(run_id, name, version=version):
            if resource.kind == "prompt_template":
                try:
                    return Template.parse(resource.value)
                except InputError as cause:
                    raise InputError(f"prompt {name!r}, version {version}: {cause}") from None
        raise NotFoundError(f"prompt {name!r}: run {run_id} has no version {version} of it")


async def template_versions(store: LightningStore, run_id: str, name: str | None = None) -> list[Resource]:
    """Every version of the run's templates, or of one, by name and version. NotFoundError where there is no such run, and
    where it has no template of this name."""
    await find_run(store, run_id)
    found = [each for each in await store.resources(run_id, latest=False) if each.kind == "prompt_template"]
    if name is not None and all(each.name != name for each in found):
        known = ", ".join(sorted({each.name for each in found})) or "none"
        raise NotFoundError(f"{name}: run {run_id} has no prompt template of this name; it has {known}")
    return [each for each in found if name in (None, each.name)]


async def find_version(store: LightningStore, run_id: str, reference: str) -> Resource:
    """The version that ``NAME@VERSION`` names, or the newest of NAME. NotFoundError."""
    name, separator, number = reference.partition("@")
    if separator and not number.isdecimal():
        raise InputError(f"{reference}: expected NAME@VERSION with a number, or NAME for its newest version")
    versions = await template_versions(store, run_id, name)
    found = [each for each in versions if not separator or each.version == int(number)]
    if not found:
        raise NotFoundError(f"{reference}: run {run_id} has no such version; the newest is {versions[-1].version}")
    return found[-1]


async def add_version(store: LightningStore, run_id: str, name: str, template: Template) -> Resource:
    """Stores the next version, which rollouts that begin from now on get.

    InputError where its placeholders are others than those of the version before, and where the name is no template's.
    """
    if not NAME.fullmatch(name):
        raise InputError(f"{name}: expected a name of letters, digits, '_' and '-'")
    await find_run(store, run_id)
    before = await store.resources(run_id, name)
    if before and before[0].kind != "prompt_template":
        raise InputError(f"{name}: expected another name, since a resource of kind {before[0].kind} has it")
    if before:
        check_candidate(Template.parse(before[0].value), template)
    parent = before[0].version if before else None
    new = Resource(run_id=run_id, name=name, kind="prompt_template", value=template.value(), parent=parent)
    [stored] = await store.put_resources([new])
    return stored


async def promote_version(store: LightningStore, chosen: Resource) -> Resource:
    """Makes this version the newest, as a version of its own: rollouts that begin from now on get it. The newest stays."""
    [newest] = await store.resources(chosen.run_id, chosen.name)
    if newest.version == chosen.version:
        return chosen
    template = replace(Template.parse(chosen.value), source="promoted", parents=(chosen.version,))
    [stored] = await store.put_resources(
        [replace(chosen, value=template.value(), parent=chosen.version, version=0, created_ns=0)]
    )
    return stored


async def promote_candidate(store: LightningStore, run_id: str, versions: Mapping[str, int]) -> dict[str, int]:
    """Makes these versions the newest of their templates, unless the newest have the same texts; returns which are."""
    newest = {}
    for name, version in versions.items():
        [chosen] = await store.resources(run_id, name, version=version)
        [last] = await store.resources(run_id, name)
        same = Template.parse(chosen.value).template == Template.parse(last.value).template
        newest[name] = (last if same else await promote_version(store, chosen)).version
    return newest


# --- candidates of a search -------------------------------------------------------------------------------------------

CANDIDATES = "prompt:candidates"  # name of the resource; no template's, which has no colon
GROUP = "optimize"  # first part of the group ids of a search's rollouts
_VALIDATION = re.compile(rf"{GROUP}:(\d{{1,9}}):val:(\d{{1,9}})(?::(\d{{1,9}}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateRecord:
    """One proposal of a search."""

    number: int | None
    """Position in the order of candidates, from 0, the texts that the search started from; None: it was refused."""
    texts: Mapping[str, str]  # by name of the template; of messages NAME.0, NAME.1 and so on
    versions: Mapping[str, int] = field(default_factory=dict)
    """Versions of all templates of the run, with which its rollouts are run."""
    parents: tuple[int, ...] = ()  # numbers of the candidates it was made from
    source: str = ""
    refused: str = ""  # sentence that says why it is no candidate

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
            if found is None or not rollout.judged:
                continue
            number, task, again = (int(each or 0) for each in found.groups())
            rewards[number, again][task].append(rollout.reward or 0.0)
    return {  # of a start that was made again the last counts
        number: {task: statistics.fmean(values) for task, values in sorted(by_task.items())}
        for (number, _), by_task in sorted(rewards.items())
    }
