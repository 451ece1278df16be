"""CandidateBook: the candidates of one search, checked, recorded in the store, and found again.

`store_search.py` drives it. A candidate's texts are versions of the run's templates; its record names them. What a search
wrote before it was killed is used again, so that proposing equal texts twice changes nothing. Knows nothing of rollouts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from agentlightning.algorithms.prompts.search import PromptCandidate
from agentlightning.errors import InputError
from agentlightning.prompts.templates import Template, check_candidate
from agentlightning.records import Resource
from agentlightning.store.base import LightningStore
from agentlightning.store.templates import CandidateRecord, read_candidates

Texts = tuple[tuple[str, str], ...]


class CandidateBook:
    """Use from one event loop, after `open`."""

    def __init__(self, store: LightningStore, run_id: str, searched: Sequence[str]) -> None:
        """searched: names of the templates whose texts candidates differ in."""
        self._store = store
        self._run_id = run_id
        self._searched = searched
        self._writing = asyncio.Lock()
        self._records: dict[Texts, CandidateRecord] = {}
        self._candidates: dict[Texts, PromptCandidate] = {}
        self._versions: dict[int, Mapping[str, int]] = {}
        self._stored: dict[str, dict[object, int]] = {}
        """By template, the first version of each text."""
        self._templates: dict[str, Template] = {}
        """Those that the search starts from."""
        self.proposed: list[PromptCandidate] = []
        """The candidates that this process has met, in order."""

    def versions(self, number: int) -> Mapping[str, int]:
        """Versions of all templates of the run for the rollouts of a candidate."""
        return self._versions[number]

    async def open(self) -> PromptCandidate:
        """The candidate that the search starts from: the newest versions, or those that it began with."""
        records = await read_candidates(self._store, self._run_id)
        self._records = {_key(each.texts): each for each in records}
        versions = [
            each for each in await self._store.resources(self._run_id, latest=False) if each.kind == "prompt_template"
        ]
        for each in versions:
            template = Template.parse(each.value)
            self._stored.setdefault(each.name, {}).setdefault(_content(template), each.version)
        first = next((each for each in records if each.number == 0), None)
        start = {each.name: each.version for each in versions} if first is None else dict(first.versions)
        self._templates = {
            each.name: Template.parse(each.value) for each in versions if each.version == start.get(each.name)
        }
        texts = {
            name: text for one in self._searched for name, text in component_texts(one, self._templates[one]).items()
        }
        if first is None:
            first = await self._record(CandidateRecord(number=0, texts=texts, versions=start, source="seed"))
        return self._met(first)

    async def propose(
        self, texts: Mapping[str, str], parents: Sequence[PromptCandidate], source: str
    ) -> PromptCandidate:
        """As of `SearchRun.propose`."""
        whole = {**self.proposed[0].texts, **(parents[0].texts if parents else {}), **texts}
        async with self._writing:
            known = self._records.get(_key(whole))
            if known is None:
                known = await self._new(whole, parents, source)
            if known.number is None:
                raise InputError(known.refused)
            return self._met(known)

    async def added_meanwhile(self) -> list[str]:
        """NAME@VERSION of what somebody else added since the search began: no candidate has its text."""
        known = {(name, version) for each in self._records.values() for name, version in each.versions.items()}
        found = []
        for each in await self._store.resources(self._run_id, latest=False):
            if each.kind == "prompt_template" and each.version > self._versions[0].get(each.name, 0):
                content = _content(Template.parse(each.value))
                if (each.name, self._stored.get(each.name, {}).get(content, each.version)) not in known:
                    found.append(f"{each.name}@{each.version}")
        return found

    async def _new(self, texts: Mapping[str, str], parents: Sequence[PromptCandidate], source: str) -> CandidateRecord:
        numbers = tuple(each.number for each in parents)
        record = CandidateRecord(number=None, texts=texts, parents=numbers, source=source)
        try:
            if unknown := sorted(set(texts) - set(self.proposed[0].texts)):
                raise InputError(f"{unknown[0]}: expected a text of {', '.join(self.proposed[0].texts)}")
            templates = {name: self._template(name, texts, source) for name in self._searched}
        except InputError as refused:
            return await self._record(replace(record, refused=str(refused)))
        versions = dict(self._versions[0])
        new = []
        for name, template in templates.items():
            if (stored := self._stored[name].get(_content(template))) is not None:
                versions[name] = stored
                continue
            made_from = [self._versions[each.number][name] for each in parents] or [self._versions[0][name]]
            value = replace(template, parents=tuple(dict.fromkeys(made_from))).value()
            new.append(
                Resource(run_id=self._run_id, name=name, kind="prompt_template", value=value, parent=made_from[0])
            )
        # The versions first: a record names nothing that is not there, and a version without one is found by its text.
        for resource in await self._store.put_resources(new) if new else []:
            versions[resource.name] = resource.version
            self._stored[resource.name][_content(templates[resource.name])] = resource.version
        number = 1 + max(each.number for each in self._records.values() if each.number is not None)
        return await self._record(replace(record, number=number, versions=versions))

    def _template(self, name: str, texts: Mapping[str, str], source: str) -> Template:
        old = self._templates[name]
        try:
            template = with_texts(name, replace(old, source=source, parents=()), texts)
            check_candidate(old, template)
        except InputError as refused:
            raise InputError(f"{name}: {refused}") from None
        return template

    async def _record(self, record: CandidateRecord) -> CandidateRecord:
        await self._store.put_resources([record.resource(self._run_id)])
        self._records[_key(record.texts)] = record
        return record

    def _met(self, record: CandidateRecord) -> PromptCandidate:
        key = _key(record.texts)
        assert record.number is not None  # those that were refused are not met
        if key not in self._candidates:
            self._candidates[key] = PromptCandidate(
                number=record.number, texts=dict(record.texts), parents=record.parents, source=record.source
            )
            self._versions[record.number] = record.versions
            self.proposed.append(self._candidates[key])
        return self._candidates[key]


def component_texts(name: str, template: Template) -> dict[str, str]:
    """The texts of a template that a search may change: NAME, or of messages NAME.0, NAME.1 and so on."""
    if isinstance(template.template, str):
        return {name: template.template}
    return {f"{name}.{place}": each["content"] for place, each in enumerate(template.template)}


def with_texts(name: str, template: Template, texts: Mapping[str, str]) -> Template:
    """The template with other texts. InputError where it does not parse."""
    changed: object = texts.get(name)
    if not isinstance(template.template, str):
        changed = [{**each, "content": texts[f"{name}.{place}"]} for place, each in enumerate(template.template)]
    value = template.value() | {"template": changed}
    del value["placeholders"]  # found anew, so that the sentence names both lists
    return Template.parse(value)


def _key(texts: Mapping[str, str]) -> Texts:
    return tuple(sorted(texts.items()))


def _content(template: Template) -> object:
    """The template without who made it."""
    text = template.template
    return template.format, text if isinstance(text, str) else tuple((one["role"], one["content"]) for one in text)
