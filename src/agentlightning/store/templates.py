"""Versions of prompt templates in a store: read for rollouts, found by ``NAME@VERSION``, added and promoted.

`TemplateReader` is driven by workers and gateways; a version never changes, so that what was read stays true. The others are
driven by the command line and by optimizers. What a template may do is templates.py's affair.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

from agentlightning.errors import InputError, NotFoundError
from agentlightning.prompts.rollout_prompts import NAME, RolloutPrompts
from agentlightning.prompts.templates import Template, check_candidate
from agentlightning.records import Resource, Rollout
from agentlightning.store.base import LightningStore
from agentlightning.store.scan import find_run

MAX_TEMPLATES = 1024
"""Versions kept by one reader; the ones that were not used for longest are read again when needed."""

_Key = tuple[str, str, int]


class TemplateReader:
    """Use from one event loop."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._known: OrderedDict[_Key, Template] = OrderedDict()
        self._reading = asyncio.Lock()

    async def of(self, rollout: Rollout) -> RolloutPrompts:
        """The templates that the rollout keeps. InputError where one does not parse, and the errors of the store."""
        templates = {
            name: await self._template((rollout.run_id, name, version)) for name, version in rollout.prompts.items()
        }
        return RolloutPrompts(rollout.task, templates, rollout.prompts)

    async def _template(self, key: _Key) -> Template:
        if key not in self._known:
            async with self._reading:  # rollouts that begin together need the same versions
                if key not in self._known:
                    self._known[key] = await self._read(*key)
        self._known.move_to_end(key)
        while len(self._known) > MAX_TEMPLATES:
            self._known.popitem(last=False)
        return self._known[key]

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
