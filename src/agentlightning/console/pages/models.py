"""Models and prompts of a run: the versions that it published and registered, its checkpoints, and its prompt templates."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence

from agentlightning.console.markup import (
    Html,
    Query,
    clipped,
    element,
    first,
    join,
    json_text,
    link,
    note,
    number,
    page,
    run_link,
    table,
    when,
)
from agentlightning.console.reader import Reader
from agentlightning.errors import ConfigError, InputError, MissingExtraError
from agentlightning.prompts.templates import Template, changed_lines
from agentlightning.records import JSON, Resource, Run
from agentlightning.store.models import ModelVersion
from agentlightning.store.templates import read_candidates, validation_rewards

MAX_ROWS = 200
"""Versions that are listed, the newest; a run publishes one a step."""


async def models_page(reader: Reader, query: Query) -> Html:
    """Policy versions of the run of the address, its model versions and its checkpoints."""
    run = await reader.chosen_run(query, "/models", "Models")
    if not isinstance(run, Run):
        return run
    versions = await _resources(reader, run, "policy")
    checkpoints = await reader.store.checkpoints(run.id)
    saved = {one.version: f"of step {one.step}" for one in checkpoints}
    rows = (
        [
            *(one.name, str(one.version), str(one.step), _parent(one), clipped(str(one.value.get("model", "")) or "-")),
            *(saved.get(one.version, "-"), when(one.created_ns)),
        ]
        for one in versions[:MAX_ROWS]
    )
    head = ["policy", "version", "step", "made from", "model", "checkpoint", "published (UTC)"]
    kept = ([str(one.step), str(one.version), clipped(one.path), when(one.created_ns)] for one in checkpoints[::-1])
    return page(
        "Models",
        element("p", run_link(run.id), " ", run.name),
        element("h2", "Published versions"),
        table(head, rows, "Versions of the run's policies, the newest first", "no version was published"),
        _left_out(versions),
        element("h2", "In the registry"),
        await _registered(reader, run),
        element("h2", "Checkpoints"),
        table(["step", "version", "place", "saved (UTC)"], kept, "Checkpoints", "no checkpoint was saved"),
    )


async def _registered(reader: Reader, run: Run) -> Html | None:
    """The run's model versions with the aliases that name them, the newest first."""
    found = await reader.store.models(run_id=run.id)
    try:
        aliases = await reader.store.aliases() if found else []
    except ConfigError:  # a token of one run, and aliases are of all
        aliases = []
    rows = []
    for one in reversed(found[-MAX_ROWS:]):
        named = [f"@{each.alias}" for each in aliases if (each.name, each.number) == (one.name, one.number)]
        cells = one.reference, " ".join(named) or "-", str(one.step), _held_out(one), one.licence or "-"
        rows.append([*map(clipped, cells), "deleted" if one.deleted else "kept", when(one.created_ns)])
    head = ["version", "aliases", "step", "held-out reward", "licence", "weights", "registered (UTC)"]
    return table(head, rows, "Model versions of the run, the newest first", "no model version was registered")


def _held_out(version: ModelVersion) -> str:
    found = version.metrics.get("eval/greedy/reward") or version.metrics.get("eval/sampled/reward")
    return f"{found['mean']:.3f} [{found['low']:.3f}, {found['high']:.3f}]" if found else "-"


async def prompts_page(reader: Reader, query: Query) -> Html:
    """Prompt templates of the run of the address; one version with its text and its difference from its parent."""
    run = await reader.chosen_run(query, "/prompts", "Prompts")
    if not isinstance(run, Run):
        return run
    found = await _resources(reader, run, "prompt_template")
    whose = element("p", run_link(run.id), " ", run.name)
    if not found:
        none = f"this run has no prompt template; add one with: agl prompts add {run.id} NAME FILE"
        return page("Prompts", whose, note(none))
    shown = _shown(found, first(query, "name"), number(query, "version"))
    rows = (
        [_prompt_link(run, one.name, one.name, one.version), str(one.version), _parent(one), str(one.step),
         when(one.created_ns)]
        for one in found[:MAX_ROWS]
    )  # fmt: skip
    return page(
        "Prompts",
        whose,
        table(["prompt", "version", "made from", "step", "made (UTC)"], rows, "Versions, the newest first"),
        _left_out(found),
        await _candidates(reader, run),
        element("h2", f"{shown.name}, version {shown.version}"),
        element("pre", _text(shown.value)),
        _promotion(shown, found),
        _difference(shown, found),
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
        own = {} if one.number is None else rewards.get(one.number, {})
        versions = [_prompt_link(run, f"{name}@{number}", name, number) for name, number in one.versions.items()]
        cells = "-" if one.number is None else str(one.number), f"{statistics.fmean(own.values()):.3f}" if own else "-"
        parents = ", ".join(map(str, one.parents)) or "-"
        named = join(versions, " ") if versions else f"refused: {one.refused}"
        rows.append([*cells, str(len(own)), parents, clipped(one.source), named])
    head = ["candidate", "reward", "validation tasks", "made from", "made by", "versions"]
    return join([element("h2", "Candidates of the search"), table(head, rows, "Candidates of the search, in order")])


def _promotion(shown: Resource, found: Sequence[Resource]) -> Html:
    """The way to make the shown version the newest, where it is not."""
    if shown.version == max(one.version for one in found if one.name == shown.name):
        return element("p", "New rollouts get this version.", class_="note")
    words = ["agl", "prompts", "promote", shown.run_id, f"{shown.name}@{shown.version}"]
    return element("p", "Promote it with: ", element("code", shlex.join(words)))


def _difference(shown: Resource, found: Sequence[Resource]) -> Html | None:
    """The lines that differ from the version that the shown one was made from."""
    parent = next((one for one in found if (one.name, one.version) == (shown.name, shown.parent)), None)
    if parent is None:
        return None
    title = element("h3", f"Difference from version {parent.version}")
    changed = changed_lines(_text(parent.value), _text(shown.value))
    tags = {"+": "ins", "-": "del"}
    lines = [element(tags.get(line[:1], "span"), line + "\n") for line in changed]
    return join([title, element("pre", *lines, class_="diff") if lines else note("both have the same text")])


async def _resources(reader: Reader, run: Run, kind: str) -> list[Resource]:
    """All versions of the run's resources of this kind, the newest first."""
    names = [one.name for one in await reader.store.resources(run.id) if one.kind == kind]
    found = [each for name in names for each in await reader.store.resources(run.id, name, latest=False)]
    return sorted(found, key=lambda one: (-one.created_ns, one.name, -one.version))


def _prompt_link(run: Run, text: str, name: str, version: int) -> Html:
    return link(text, "/prompts", run=run.id, name=name, version=version)


def _left_out(resources: Sequence[Resource]) -> Html | None:
    more = len(resources) - MAX_ROWS
    return note(f"{more} earlier versions are left out" if more > 0 else None)


def _parent(one: Resource) -> str:
    return "-" if one.parent is None else f"version {one.parent}"


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
