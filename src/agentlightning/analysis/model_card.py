"""A version's model card, as model hubs show it: base and licence, held-out figures with intervals, curve, data, settings.

``agl models export --to hub:OWNER/NAME`` puts it beside the weights. All of it is read from the record; names of this host's
folders stay here. Reads three metrics of the version's run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import orjson

from agentlightning.analysis.compare import HELD_OUT, TRAIN, amount_text, read_cost
from agentlightning.analysis.intervals import Z
from agentlightning.analysis.run_settings import flat_settings
from agentlightning.errors import NotFoundError, one_line
from agentlightning.records import Run
from agentlightning.store.base import LightningStore
from agentlightning.store.models import ModelVersion, is_reference
from agentlightning.store.scan import find_model_version, find_run

STDERR = "eval/greedy/reward_stderr"
MAX_POINTS = 20
SHOWN = ("algorithm", "trainer", "model", "data", "eval", "engine")
"""Tables of settings that say how a model was made; the others say where, and how it was watched."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
LICENCE = re.compile(r"[a-z][a-z0-9.-]*")
"""Identifiers of licences as hubs know them."""


async def model_card(store: LightningStore, version: ModelVersion, adapter: bool = False) -> str:
    """The card of a version in Markdown, its front matter for hubs first. adapter: of its adapter alone."""
    base = await _base(store, version)
    try:
        run: Run | None = await find_run(store, version.run_id)
    except NotFoundError:  # entries outlive their runs
        run = None
    lines = [*_front(version, base, adapter), f"# {version.name}, version {version.number}", ""]
    what = "A low-rank adapter for" if adapter else "Made from"
    lines.append(f"{what} {_code(_shown(base))} by Agent Lightning, at step {version.step} of its run.")
    if version.parent and version.parent != base:
        lines.append(f"It continues {_code(_shown(version.parent))}.")
    lines += ["", f"Licence of the base model: {_code(version.licence) if version.licence else 'not recorded'}.", ""]
    lines += [*_figures(version), *_fingerprints(version)]
    if run is not None:
        lines += [*await _curve(store, run, version.step), *await _cost(store, run), *_settings(run)]
    return "\n".join(lines).rstrip() + "\n"


async def _base(store: LightningStore, version: ModelVersion) -> str:
    """The model that the first version of its line was trained from."""
    seen = {version.reference}
    while is_reference(version.base_model) and version.base_model not in seen:
        seen.add(version.base_model)
        try:
            version = await find_model_version(store, version.base_model)
        except NotFoundError:
            break
    return version.base_model


def _front(version: ModelVersion, base: str, adapter: bool) -> Iterator[str]:
    licence = (version.licence or "").strip().lower()
    known = bool(LICENCE.fullmatch(licence))
    yield "---"
    yield f"library_name: {'peft' if adapter else 'transformers'}"
    yield "pipeline_tag: text-generation"
    yield "tags: [agentlightning, reinforcement-learning]"
    if HUB_NAME.fullmatch(base) and not Path(base).exists():
        yield f"base_model: {base}"
    if licence:
        yield f"license: {licence if known else 'other'}"
    if licence and not known:
        yield f"license_name: {orjson.dumps(one_line(version.licence or '')).decode()}"
    yield "---"


def _figures(version: ModelVersion) -> list[str]:
    rows = [
        f"| {_code(name)} | {one['mean']:.3f} | {one['low']:.3f} to {one['high']:.3f} | {one['n']} |"
        for name, one in sorted(version.metrics.items())
    ]
    if not rows:
        return ["No held-out evaluation was recorded.", ""]
    return ["## Held-out", "", "| measure | mean | 95% interval | tasks |", "| --- | --- | --- | --- |", *rows, ""]


def _fingerprints(version: ModelVersion) -> list[str]:
    given = {"tasks": version.data_hash, "agent's code": version.code_hash, "settings": version.config_hash}
    rows = [f"| {name} | {_code(value)} |" for name, value in given.items() if value]
    return ["## Fingerprints", "", "| of | hash |", "| --- | --- |", *rows, ""] if rows else []


async def _curve(store: LightningStore, run: Run, until: int) -> list[str]:
    """Held-out and training rewards of the evaluated steps up to the version's."""
    series = await store.series(run.id, [HELD_OUT, TRAIN, STDERR], max_points=2 * MAX_POINTS)
    train, errors = ({one.step: one.value for one in series.get(name, ())} for name in (TRAIN, STDERR))
    points = [one for one in series.get(HELD_OUT, ()) if one.step <= until]
    rows = [
        f"| {one.step} | {one.value:.3f} ± {Z * errors.get(one.step, 0.0):.3f} | "
        f"{'' if one.step not in train else format(train[one.step], '.3f')} |"
        for one in points[:: -(-len(points) // MAX_POINTS) or 1]
    ]
    head = ["## Curve", "", "| step | held-out reward, greedy | training reward |", "| --- | --- | --- |"]
    return [*head, *rows, ""] if rows else []


async def _cost(store: LightningStore, run: Run) -> list[str]:
    amounts = (await read_cost(store, run.id)).amounts
    told = ", ".join(f"{amount_text(value)} {name}" for name, value in amounts.items())
    return [f"The training steps of the whole run took {told}.", ""] if told else []


def _settings(run: Run) -> list[str]:
    rows = [
        f"| {_code(name)} | {_code(_shown(value))} |"
        for name, value in sorted(flat_settings(run.config).items())
        if (name.partition(".")[0] in SHOWN or name == "env.name") and value is not None
    ]
    return ["## Settings", "", "| setting | value |", "| --- | --- |", *rows, ""] if rows else []


def _shown(value: object) -> str:
    """A value as text, without the folders of this host.

    >>> _shown("/home/me/models/tiny"), _shown("Qwen/Qwen2.5-0.5B"), _shown(0.1)
    ('tiny', 'Qwen/Qwen2.5-0.5B', '0.1')
    """
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    if isinstance(value, str):
        return Path(value).name if value.startswith(("/", ".", "~")) or Path(value).exists() else value
    return orjson.dumps(value, default=str).decode()


def _code(value: str) -> str:
    """Text of a record as code of one line: it cannot end its cell, nor be read as markup."""
    return f"`{one_line(value).replace('`', chr(39)).replace('|', '¦')}`"
