"""Models and prompts of a run: the versions that it registered, checkpoints, what it published, and its prompt templates."""

from __future__ import annotations

import asyncio
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentlightning.analysis.intervals import Interval, paired_bootstrap
from agentlightning.console.reader import Reader
from agentlightning.console.render import Page, Query, first, json_text, url, whole
from agentlightning.errors import ConfigError, InputError, MissingExtraError
from agentlightning.prompts.templates import Template, changed_lines
from agentlightning.records import JSON, Resource, Run
from agentlightning.store.models import ModelAlias, ModelVersion
from agentlightning.store.scan import find_model_version
from agentlightning.store.templates import CandidateRecord, read_candidates, validation_rewards

MAX_ROWS = 200
"""Versions that are listed, the newest; a run publishes one a step."""
MAX_PAIRED = 20
"""Candidates that are compared with the start: each takes a bootstrap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A model version and the aliases that name it."""

    version: ModelVersion
    aliases: list[str]

    @property
    def held_out(self) -> JSON | None:
        """Mean, low and high of its held-out reward, as it was registered."""
        metrics = self.version.metrics
        return metrics.get("eval/greedy/reward") or metrics.get("eval/sampled/reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedCandidate:
    """A proposal of a search and its rewards on validation tasks."""

    record: CandidateRecord
    rewards: list[float]
    against_start: Interval | None
    """The mean difference from the start, over the tasks that both were tried on."""


async def models_page(reader: Reader, run: Run, query: Query) -> Page:
    """The run's model versions with their aliases, its checkpoints, and what it published at each step."""
    published = await _resources(reader, run, "policy")
    registered, aliases = await _registered(reader, run)
    values = {
        "registered": registered,
        "aliases": aliases,
        "checkpoints": (await reader.store.checkpoints(run.id))[::-1],
        "published": published[:MAX_ROWS],
        "more": len(published) - MAX_ROWS,
    }
    return Page(template="models.html", title="Models", values=values, run=run)


async def _registered(reader: Reader, run: Run) -> tuple[list[Registered], list[ModelAlias]]:
    """Versions, the newest first, without those whose weights are gone; and all aliases of their names."""
    found = [one for one in await reader.store.models(run_id=run.id) if not one.deleted]
    try:
        every = await reader.store.aliases() if found else []
    except ConfigError:  # a token of one run, and aliases are of all
        every = []
    aliases = [one for one in every if one.number is not None and one.name in {version.name for version in found}]
    registered = [
        Registered(
            version=one,
            aliases=[each.alias for each in aliases if (each.name, each.number) == (one.name, one.number)],
        )
        for one in reversed(found[-MAX_ROWS:])
    ]
    return registered, aliases


async def move_alias(reader: Reader, form: Mapping[str, str], role: str) -> str:
    """Moves an alias to the version that a form names, forward or back; the address of the page that shows it.

    InputError for a role that only reads, NotFoundError for a version that is not there.
    """
    if role != "admin":
        raise InputError("promote: expected the server's key; a reader's token only reads")
    run = await reader.run(form.get("run", ""))
    version = await find_model_version(reader.store, form.get("version", ""))
    await reader.store.set_alias(version.name, form.get("alias", "").strip().removeprefix("@"), version.number)
    return url("/models", "aliases", run=run.id)


async def prompts_page(reader: Reader, run: Run, query: Query) -> Page:
    """Prompt templates of the run; one version with its text and its difference from its parent."""
    found = await _resources(reader, run, "prompt_template")
    values: dict[str, object] = {"found": found[:MAX_ROWS], "more": len(found) - MAX_ROWS}
    if found:
        shown = _shown(found, first(query, "name"), whole(query, "version"))
        values |= {
            "shown": shown,
            "text": _text(shown.value),
            "changed": _changed(shown, found),
            "promote": _promotion(shown, found),
            "candidates": await _candidates(reader, run),
        }
    return Page(template="prompts.html", title="Prompts", values=values, run=run)


async def _candidates(reader: Reader, run: Run) -> list[RankedCandidate]:
    """The candidates of the run's search, where it is one, the best first."""
    found = await read_candidates(reader.store, run.id)
    if not found:
        return []
    async with reader.analyses:
        rewards = await validation_rewards(reader.store, run.id)
        return await asyncio.to_thread(_ranked, found, rewards)


def _ranked(found: Sequence[CandidateRecord], rewards: Mapping[int, Mapping[int, float]]) -> list[RankedCandidate]:
    """The best first, with their differences from the texts that the search started from, over the tasks of both."""
    own = [({} if one.number is None else rewards.get(one.number, {})) for one in found]
    order = sorted(range(len(found)), key=lambda place: -statistics.fmean(own[place].values()) if own[place] else 1.0)
    start, ranked = rewards.get(0, {}), list[RankedCandidate]()
    for rank, place in enumerate(order[:MAX_ROWS]):
        both = [own[place][task] - start[task] for task in own[place] if task in start]
        paired = paired_bootstrap(both) if rank < MAX_PAIRED and found[place].number else None
        ranked.append(RankedCandidate(record=found[place], rewards=list(own[place].values()), against_start=paired))
    return ranked


def _promotion(shown: Resource, found: Sequence[Resource]) -> str:
    """The command that makes the shown version the newest; '' where it is."""
    if shown.version == max(one.version for one in found if one.name == shown.name):
        return ""
    return shlex.join(["agl", "prompts", "promote", shown.run_id, f"{shown.name}@{shown.version}"])


def _changed(shown: Resource, found: Sequence[Resource]) -> list[str] | None:
    """Lines of the difference from the version that it was made from; None where there is none."""
    parent = next((one for one in found if one.name == shown.name and one.version == shown.parent), None)
    return None if parent is None else changed_lines(_text(parent.value), _text(shown.value))


async def _resources(reader: Reader, run: Run, kind: str) -> list[Resource]:
    """All versions of the run's resources of this kind, the newest first."""
    names = [one.name for one in await reader.store.resources(run.id) if one.kind == kind]
    found = [each for name in names for each in await reader.store.resources(run.id, name, latest=False)]
    return sorted(found, key=lambda one: (-one.created_ns, one.name, -one.version))


def _shown(found: Sequence[Resource], name: str, version: int | None) -> Resource:
    """The version of the address, by default the newest of its prompt, or of any."""
    fitting = [one for one in found if (not name or one.name == name) and version in (None, one.version)]
    if not fitting:
        raise InputError(f"version: expected one of a prompt of this run, got {name[:80]!r}, version {version}")
    return fitting[0]


def _text(value: JSON) -> str:
    """The template's text, or its messages; a value that is no template as JSON."""
    try:
        return "\n".join(Template.parse(value).lines())
    except (InputError, MissingExtraError):
        return json_text(value)
