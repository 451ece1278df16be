"""Models and prompts of a run: the versions that it published and registered, its checkpoints, and its prompt templates."""

from __future__ import annotations

import asyncio
import shlex
import statistics
from collections.abc import Mapping, Sequence

import orjson

from agentlightning.console.markup import Html, element, join, url
from agentlightning.console.pages.choose import chosen_run
from agentlightning.console.parts import Query, clipped, first, number, run_link, table, when
from agentlightning.console.reader import Reader
from agentlightning.errors import ConfigError, InputError, MissingExtraError
from agentlightning.prompts.templates import Template, changed_lines
from agentlightning.records import JSON, Checkpoint, Resource, Run
from agentlightning.store.models import ModelVersion
from agentlightning.store.templates import read_candidates, validation_rewards

MAX_ROWS = 200
"""Versions that are listed, the newest; a run publishes one a step."""


async def models_page(reader: Reader, query: Query) -> Html:
    """Policy versions of the run of the address, and its checkpoints."""
    run = await chosen_run(reader, query, "/models", "Models")
    if not isinstance(run, Run):
        return run
    versions = await reader.resources(run.id, "policy")
    checkpoints = await reader.checkpoints(run.id)
    saved = {one.version: one for one in checkpoints}
    head = ["policy", "version", "step", "made from", "model", "checkpoint", "published (UTC)"]
    rows = [_version(one, saved.get(one.version)) for one in _newest(versions)]
    kept = [[str(one.step), str(one.version), clipped(one.path), when(one.created_ns)] for one in reversed(checkpoints)]
    return join(
        [
            *_head("Models", run),
            element("h2", "Published versions"),
            table(head, rows, "Versions of the run's policies, the newest first")
            if rows
            else element("p", "no version was published", class_="none"),
            _left_out(versions),
            element("h2", "In the registry"),
            await _registered(reader, run),
            element("h2", "Checkpoints"),
            table(["step", "version", "place", "saved (UTC)"], kept, "Checkpoints, the newest first")
            if kept
            else element("p", "no checkpoint was saved", class_="none"),
        ]
    )


async def _registered(reader: Reader, run: Run) -> Html:
    """The run's model versions with the aliases that name them, the newest first."""
    found = await reader.store.models(run_id=run.id)
    if not found:
        return element("p", "no model version was registered", class_="none")
    try:
        aliases = await reader.store.aliases()
    except ConfigError:  # a token of one run, and aliases are of all
        aliases = []
    rows = []
    for one in reversed(found[-MAX_ROWS:]):
        named = [f"@{each.alias}" for each in aliases if (each.name, each.number) == (one.name, one.number)]
        kept = "deleted" if one.deleted else "pinned" if one.pinned else "kept"
        tags = ", ".join(f"{name}={value}" for name, value in sorted(one.tags.items()))
        cells = one.reference, " ".join(named) or "-", str(one.step), _held_out(one), tags or "-", one.licence or "-"
        rows.append([*map(clipped, cells), kept, when(one.created_ns)])
    head = [
        "version",
        "aliases",
        "step",
        "held-out reward",
        "tags",
        "licence of the base",
        "weights",
        "registered (UTC)",
    ]
    return table(head, rows, "Model versions of the run, the newest first")


def _held_out(version: ModelVersion) -> str:
    found = version.metrics.get("eval/greedy/reward") or version.metrics.get("eval/sampled/reward")
    return f"{found['mean']:.3f} [{found['low']:.3f}, {found['high']:.3f}]" if found else "-"


async def prompts_page(reader: Reader, query: Query) -> Html:
    """Prompt templates of the run of the address; one version with its text and its difference from its parent."""
    run = await chosen_run(reader, query, "/prompts", "Prompts")
    if not isinstance(run, Run):
        return run
    found = await reader.resources(run.id, "prompt_template")
    if not found:
        none = f"this run has no prompt template; add one with: agl prompts add {run.id} NAME FILE"
        return join([*_head("Prompts", run), element("p", none, class_="none")])
    shown = _shown(found, first(query, "name"), number(query, "version"))
    rows = (
        [element("a", one.name, href=url("/prompts", {"run": run.id, "name": one.name, "version": one.version})),
         str(one.version), _parent(one), str(one.step), when(one.created_ns)]
        for one in _newest(found)
    )  # fmt: skip
    parent = next((one for one in found if (one.name, one.version) == (shown.name, shown.parent)), None)
    return join(
        [
            *_head("Prompts", run),
            table(["prompt", "version", "made from", "step", "made (UTC)"], rows, "Versions, the newest first"),
            _left_out(found),
            await _candidates(reader, run),
            element("h2", f"{shown.name}, version {shown.version}"),
            element("pre", template_text(shown.value)),
            _promotion(shown, found),
            element("h3", f"Difference from version {parent.version}") if parent else None,
            await asyncio.to_thread(difference, template_text(parent.value), template_text(shown.value))
            if parent
            else None,
        ]
    )


async def _candidates(reader: Reader, run: Run) -> Html | None:
    """The candidates of the run's search, where it is one: their lineage, and their rewards on validation tasks."""
    found = await read_candidates(reader.store, run.id)
    if not found:
        return None
    async with reader.analyses:
        rewards = await validation_rewards(reader.store, run.id)
    rows = []
    for one in found[:MAX_ROWS]:
        own = rewards.get(one.number, {}) if one.number is not None else {}
        versions = [
            element("a", f"{name}@{version}", href=url("/prompts", {"run": run.id, "name": name, "version": version}))
            for name, version in one.versions.items()
        ]
        rows.append(
            [
                "-" if one.number is None else str(one.number),
                f"{statistics.fmean(own.values()):.3f}" if own else "-",
                str(len(own)),
                ", ".join(map(str, one.parents)) or "-",
                clipped(one.source),
                join(part for link in versions for part in (link, " ")) if versions else f"refused: {one.refused}",
            ]
        )
    head = ["candidate", "reward", "validation tasks", "made from", "made by", "versions"]
    more = len(found) - MAX_ROWS
    return join(
        [
            element("h2", "Candidates of the search"),
            table(head, rows, "Candidates of the search, in their order"),
            element("p", f"{more} later candidates are left out", class_="none") if more > 0 else None,
        ]
    )


def _promotion(shown: Resource, found: Sequence[Resource]) -> Html:
    """The way to make the shown version the newest, where it is not."""
    newest = max(one.version for one in found if one.name == shown.name)
    if newest == shown.version:
        return element("p", "New rollouts get this version.", class_="note")
    words = ["agl", "prompts", "promote", shown.run_id, f"{shown.name}@{shown.version}"]
    return element("p", "Promote it with: ", element("code", shlex.join(words)))


def _head(title: str, run: Run) -> list[Html]:
    return [element("h1", title), element("p", run_link(run.id), " ", run.name)]


def _newest(resources: Sequence[Resource]) -> list[Resource]:
    return sorted(resources, key=lambda one: (-one.created_ns, one.name, -one.version))[:MAX_ROWS]


def _left_out(resources: Sequence[Resource]) -> Html | None:
    more = len(resources) - MAX_ROWS
    return element("p", f"{more} earlier versions are left out", class_="none") if more > 0 else None


def _version(one: Resource, checkpoint: Checkpoint | None) -> list[Html | str]:
    model = str(one.value.get("model", "")) or "-"
    return [
        one.name,
        str(one.version),
        str(one.step),
        _parent(one),
        clipped(model),
        "-" if checkpoint is None else f"of step {checkpoint.step}",
        when(one.created_ns),
    ]


def _parent(one: Resource) -> str:
    return "-" if one.parent is None else f"version {one.parent}"


def _shown(found: Sequence[Resource], name: str, version: int | None) -> Resource:
    """The version of the address, by default the newest of its prompt, or of any."""
    fitting = [one for one in found if (not name or one.name == name) and version in (None, one.version)]
    if not fitting:
        raise InputError(f"version: expected one of a prompt of this run, got {name[:80]!r}, version {version}")
    return _newest(fitting)[0]


def template_text(value: JSON) -> str:
    """The template's text, or its messages; a value that is no template as JSON."""
    try:
        return "\n".join(Template.parse(value).lines())
    except (InputError, MissingExtraError):
        return orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode()


def difference(before: str, after: str) -> Html:
    """The lines that differ."""
    changed = changed_lines(before, after)
    if not changed:
        return element("p", "both have the same text", class_="none")
    tags: Mapping[str, str] = {"+": "ins", "-": "del"}
    return element("pre", *(element(tags.get(line[:1], "span"), line + "\n") for line in changed), class_="diff")
