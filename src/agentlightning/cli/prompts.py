"""``agl prompts``: versions of a run's prompt templates, compared on real tasks and promoted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agentlightning.cli.options import (
    Json,
    RunId,
    Runs,
    Settings,
    Store,
    own_config,
    print_columns,
    print_json,
    run_shown,
    with_store,
)
from agentlightning.errors import InputError, printable

if TYPE_CHECKING:
    from rich.console import Console

    from agentlightning.analysis.version_comparison import PairedComparison
    from agentlightning.prompts.templates import Template
    from agentlightning.records import Resource
    from agentlightning.store.base import LightningStore

app = typer.Typer(
    help="List, show, compare, add, test and promote prompt templates of a run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Reference = Annotated[str, typer.Argument(metavar="NAME@VERSION", help="A version; NAME alone is its newest.")]


@app.command("list")
def list_templates(
    run: RunId,
    candidates: Annotated[
        bool, typer.Option("--candidates", help="List the candidates of a search, with parents and validation rewards.")
    ] = False,
    as_json: Json = False,
    store: Store = None,
) -> None:
    """List every version of a run's templates. New rollouts get the last of each."""
    if candidates:
        _list_candidates(run, as_json, store)
        return
    from agentlightning.store.templates import template_versions
    from agentlightning.trainer.display import screen

    found = with_store(store, lambda opened: template_versions(opened, run))
    if as_json:
        print_json(found)
        return
    rows = [("template", "format", "placeholders", "made by", "from")]
    for each in found:
        names = ", ".join(map(str, each.value.get("placeholders") or ())) or "-"
        parent = "-" if each.parent is None else f"@{each.parent}"
        source = str(each.value.get("source") or "-")
        rows.append((f"{each.name}@{each.version}", str(each.value.get("format")), names, source, parent))
    print_columns(screen(), rows) if found else screen().print("no prompt template yet; add one with: agl prompts add")


@app.command("show")
def show_template(
    run: RunId,
    version: Reference,
    other: Annotated[
        str | None, typer.Argument(metavar="[NAME@VERSION]", help="Print the difference to this version instead.")
    ] = None,
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Print a version as it is stored, or the difference between two."""
    from agentlightning.store.templates import find_version

    async def work(opened: LightningStore) -> list[Resource]:
        return [await find_version(opened, run, each) for each in (version, other) if each is not None]

    found = with_store(store, work)
    if len(found) == 2:
        _show_difference(found[0], found[1], as_json)
    elif as_json:
        print_json(found[0])
    else:
        typer.echo(printable("\n".join(_parsed(found[0]).lines())))


def _show_difference(old: Resource, new: Resource, as_json: bool) -> None:
    from agentlightning.prompts.templates import diff

    names = f"{old.name}@{old.version}", f"{new.name}@{new.version}"
    text = diff(_parsed(old), _parsed(new), names)
    if as_json:
        print_json({"before": names[0], "after": names[1], "diff": text})
    else:
        typer.echo(printable(text) or "the two are the same")


@app.command("add")
def add_template(
    run: RunId,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the template.")],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The text, or JSON for messages; - reads standard input.")
    ],
    format: Annotated[
        Literal["fstring", "jinja", "messages"], typer.Option("--format", help="Language of the template.")
    ] = "fstring",
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Add the next version, which new rollouts get. It must have the placeholders of the one before."""
    from agentlightning.store.templates import add_version

    template = _read(file, format)
    stored = with_store(store, lambda opened: add_version(opened, run, name, template))
    print_json(stored) if as_json else typer.echo(f"{stored.name}@{stored.version}: new rollouts of {run} get it")


@app.command("promote")
def promote_template(run: RunId, version: Reference, as_json: Json = False, store: Store = None) -> None:
    """Make a version the newest, which new rollouts get; rollouts that have begun keep theirs."""
    from agentlightning.store.templates import find_version, promote_version

    async def work(opened: LightningStore) -> tuple[Resource, Resource]:
        chosen = await find_version(opened, run, version)
        return chosen, await promote_version(opened, chosen)

    chosen, newest = with_store(store, work)
    if as_json:
        print_json(newest)
    elif chosen.version == newest.version:
        typer.echo(f"{newest.name}@{newest.version} is the newest already")
    else:
        typer.echo(f"{newest.name}@{newest.version} is {chosen.name}@{chosen.version}: new rollouts of {run} get it")


@app.command("test")
def compare_templates(
    run: RunId,
    versions: Annotated[
        list[str], typer.Argument(metavar="NAME@VERSION...", help="Two or more; the first is the baseline.")
    ],
    tasks: Annotated[int, typer.Option("--tasks", min=1, help="Held-out tasks, at most.")] = 20,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, help="Sampling temperature; 0 is greedy.")
    ] = 0.0,
    transcripts: Annotated[int, typer.Option("--transcripts", min=0, help="Tasks to show side by side.")] = 1,
    data: Annotated[
        str | None, typer.Option("--data", help="Other tasks than the run's: file, hub:NAME or file.py:name.")
    ] = None,
    settings: Settings = None,
    as_json: Json = False,
    store: Store = None,
    runs: Runs = Path("runs"),
) -> None:
    """Run versions of a template side by side on the same tasks, with the run's agent and its last model."""
    from agentlightning.analysis.version_comparison import ComparisonRule, compare_prompts
    from agentlightning.store.templates import find_version
    from agentlightning.trainer.checkpoint import RunFolder, policies_in
    from agentlightning.trainer.checkpoint_files import last_checkpoint
    from agentlightning.trainer.display import screen
    from agentlightning.trainer.policies import with_models

    folder = RunFolder(runs, run)
    config = own_config(folder, settings or [], store)
    if data is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"val": data})})

    async def work(opened: LightningStore) -> tuple[list[Resource], list[Resource], str | None]:
        found = [await find_version(opened, run, each) for each in versions]
        newest = [each for each in await opened.resources(run) if each.kind == "prompt_template"]
        checkpoint = await last_checkpoint(opened, folder)
        others = [each for each in newest if each.name != found[0].name]
        return found, others, None if checkpoint is None else checkpoint.path

    found, others, trained = with_store(config.store.url, work)
    config = config if trained is None else with_models(config, policies_in(Path(trained)))
    rule = ComparisonRule(tasks=tasks, temperature=temperature)
    tested = run_shown(
        f"test {found[0].name}",
        runs,
        lambda own, display: compare_prompts(config, own, display, found, others, rule),
    )
    print_json(tested) if as_json else _print_test(screen(), tested, run, transcripts)


def _list_candidates(run: str, as_json: bool, store: str | None) -> None:
    from dataclasses import asdict
    from statistics import fmean

    from agentlightning.store.templates import CandidateRecord, read_candidates, validation_rewards
    from agentlightning.trainer.display import screen

    async def work(opened: LightningStore) -> tuple[list[CandidateRecord], dict[int, dict[int, float]]]:
        candidates = await read_candidates(opened, run)
        return candidates, await validation_rewards(opened, run)

    found, rewards = with_store(store, work)
    scored = [(each, rewards.get(-1 if each.number is None else each.number, {})) for each in found]
    if as_json:
        print_json([{**asdict(each), "rewards": own} for each, own in scored])
        return
    rows = [("candidate", "reward", "tasks", "from", "made by", "versions")]
    for each, own in scored:
        versions = ", ".join(f"{name}@{version}" for name, version in each.versions.items())
        parents = ", ".join(map(str, each.parents)) or "-"
        number, mean = "-" if each.number is None else str(each.number), f"{fmean(own.values()):.3f}" if own else "-"
        rows.append((number, mean, str(len(own)), parents, each.source, versions or f"refused: {each.refused}"))
    print_columns(screen(), rows) if found else screen().print(f"{run}: no search for prompts yet; see: agl optimize")


def _parsed(resource: Resource) -> Template:
    from agentlightning.prompts.templates import Template

    try:
        return Template.parse(resource.value)
    except InputError as cause:
        raise InputError(f"{resource.name}@{resource.version}: {cause}") from None


def _read(file: Path, format: Literal["fstring", "jinja", "messages"]) -> Template:
    import json

    from agentlightning.prompts.templates import Template

    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        given: Any = json.loads(text) if format == "messages" else text
    except (OSError, ValueError) as cause:
        raise InputError(f"{file}: cannot be read: {cause}") from cause
    return Template.of(given, format, "agl prompts add")


def _print_test(console: Console, tested: PairedComparison, run: str, transcripts: int) -> None:
    from agentlightning.cli.paired import print_comparison

    print_comparison(console, tested, transcripts)
    best = max(tested.figures, key=lambda one: one.reward_mean)
    console.print(f"rollouts: agl rollouts list {tested.runs[best.version]}", soft_wrap=True)
    console.print(f"promote one: agl prompts promote {run} {best.version}", soft_wrap=True)
