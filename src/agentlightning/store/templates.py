"""TemplateReader: the prompt templates of a rollout, read from the store once per version.

Driven by workers and gateways. A version never changes, so that what was read stays true; who made a template is not known
here, and what it may do is templates.py's affair.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from agentlightning.errors import InputError, NotFoundError
from agentlightning.prompts.rollout_prompts import RolloutPrompts
from agentlightning.prompts.templates import Template
from agentlightning.store.base import LightningStore
from agentlightning.types import Rollout

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
        for resource in await self._store.resources(run_id, name, latest=False):
            if resource.version == version and resource.kind == "prompt_template":
                try:
                    return Template.parse(resource.value)
                except InputError as cause:
                    raise InputError(f"prompt {name!r}, version {version}: {cause}") from None
        raise NotFoundError(f"prompt {name!r}: run {run_id} has no version {version} of it")
