"""``agl prompts`` and ``agl optimize``: versions of a run's prompt templates, compared, promoted and searched for."""

from __future__ import annotations

import difflib
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agentlightning.cli.options import (
    Json,
    RunId,
    Runs,
    Server,
    Settings,
    Store,
    Temperature,
    number,
    one_store,
    own_config,
    print_columns,
    print_json,
    run_shown,
    say,
    store_setting,
    with_store,
)
from agentlightning.errors import ConfigError, InputError, printable

if TYPE_CHECKING:
    from agentlightning.analysis.intervals import Interval
    from agentlightning.analysis.version_comparison import PairedComparison
    from agentlightning.prompts.templates import Template
    from agentlightning.records import Resource
    from agentlightning.store.base import LightningStore
    from agentlightning.trainer.prompts.optimization import OptimizeResult


Reference = Annotated[str, typer.Argument(metavar="NAME@VERSION", help="A version; NAME alone is its newest.")]
Format = Literal["fstring", "jinja", "messages"]

app = typer.Typer(
    help="List, show, add and test versions of a run's prompt templates.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


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

    found = with_store(store, lambda opened: template_versions(opened, run))
    if as_json:
        print_json(found)
        return
    rows = [("template", "format", "placeholders", "made by", "from")]
    for each in found:
        names = ", ".join(map(str, each.value.get("placeholders") or ())) or "-"
        made = str(each.value.get("source") or "-"), "-" if each.parent is None else f"@{each.parent}"
        rows.append((f"{each.name}@{each.version}", str(each.value.get("format")), names, *made))
    print_columns(rows, "no prompt template yet; add one with: agl prompts add")


def _list_candidates(run: str, as_json: bool, store: str | None) -> None:
    from dataclasses import asdict

    from agentlightning.store.templates import CandidateRecord, read_candidates, validation_rewards

    async def work(opened: LightningStore) -> tuple[list[CandidateRecord], dict[int, dict[int, float]]]:
        return await read_candidates(opened, run), await validation_rewards(opened, run)

    found, rewards = with_store(store, work)
    scored = [(each, rewards.get(-1 if each.number is None else each.number, {})) for each in found]
    if as_json:
        print_json([{**asdict(each), "rewards": own} for each, own in scored])
        return
    rows = [("candidate", "reward", "tasks", "from", "made by", "versions")]
    for each, own in scored:
        versions = ", ".join(f"{name}@{version}" for name, version in each.versions.items())
        parents = ", ".join(map(str, each.parents)) or "-"
        figures = number(each.number, "d"), number(_mean(own)), str(len(own))
        rows.append((*figures, parents, each.source, versions or f"refused: {each.refused}"))
    print_columns(rows, f"{run}: no search for prompts yet; see: agl optimize")


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
    from agentlightning.prompts.templates import diff
    from agentlightning.store.templates import find_version

    async def work(opened: LightningStore) -> list[Resource]:
        return [await find_version(opened, run, each) for each in (version, other) if each is not None]

    old, *rest = with_store(store, work)
    if not rest:
        print_json(old) if as_json else typer.echo(printable("\n".join(_parsed(old).lines())))
        return
    before, after = (f"{each.name}@{each.version}" for each in (old, rest[0]))
    text = diff(_parsed(old), _parsed(rest[0]), (before, after))
    if as_json:
        print_json({"before": before, "after": after, "diff": text})
    else:
        typer.echo(printable(text) or "the two are the same")


@app.command("add")
def add_template(
    run: RunId,
    name: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="Name of the template; or an earlier version.")],
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="The text, or JSON for messages; - reads standard input."),
    ] = None,
    format: Annotated[Format, typer.Option("--format", help="Language of the template.")] = "fstring",
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Add a version of a template, which new rollouts get.

    It comes from a file or from an earlier version. It must have the placeholders of the one before. Rollouts that have
    begun keep theirs.
    """
    from agentlightning.store.templates import add_version, find_version, promote_version

    async def work(opened: LightningStore) -> tuple[Resource, str]:
        if file is not None:
            stored = await add_version(opened, run, name, _read_template(file, format))
            return stored, f"new rollouts of {run} get it"
        chosen = await find_version(opened, run, name)
        stored = await promote_version(opened, chosen)
        newest = chosen.version == stored.version
        return stored, "is the newest already" if newest else f"is {name}: new rollouts of {run} get it"

    if (file is None) != ("@" in name):
        raise ConfigError("agl prompts add: give NAME and a FILE, or an earlier NAME@VERSION alone")
    stored, note = with_store(store, work)
    print_json(stored) if as_json else typer.echo(f"{stored.name}@{stored.version}{':' if file else ''} {note}")


def _read_template(file: Path, format: Format) -> Template:
    import json

    from agentlightning.prompts.templates import Template

    try:
        text = sys.stdin.read().removeprefix("\ufeff") if str(file) == "-" else file.read_text(encoding="utf-8-sig")
        given: Any = json.loads(text) if format == "messages" else text
    except (OSError, ValueError) as cause:
        raise InputError(f"{file}: cannot be read: {cause}") from cause
    return Template.of(given, format, "agl prompts add")


@app.command("test")
def compare_templates(
    run: RunId,
    versions: Annotated[
        list[str], typer.Argument(metavar="NAME@VERSION...", help="Two or more; the first is the baseline.")
    ],
    tasks: Annotated[int, typer.Option("--tasks", min=1, help="Held-out tasks, at most.")] = 20,
    temperature: Temperature = 0.0,
    data: Annotated[
        str | None, typer.Option("--data", help="Other tasks than the run's: file, hub:NAME or file.py:name.")
    ] = None,
    settings: Settings = None,
    as_json: Json = False,
    store: Store = None,
    runs: Runs = Path("runs"),
) -> None:
    """Run versions of a template on the same tasks.

    The agent is the run's, and so is the model, by its last checkpoint.
    """
    from agentlightning.analysis.version_comparison import ComparisonRule, compare_prompts
    from agentlightning.store.templates import find_version
    from agentlightning.trainer.checkpoint import RunFolder, policies_in
    from agentlightning.trainer.checkpoint_files import last_checkpoint
    from agentlightning.trainer.policies import with_models

    folder = RunFolder(runs, run)
    config = own_config(folder, settings, store)
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
    title = f"test {found[0].name}"
    tested = run_shown(title, runs, lambda own, shown: compare_prompts(config, own, shown, found, others, rule))
    if as_json:
        print_json(tested)
        return
    print_comparison(tested)
    best = max(tested.figures, key=lambda one: one.reward_mean)
    say(f"rollouts: agl rollouts list {tested.runs[best.version]}")
    say(f"make it the newest: agl prompts add {run} {best.version}")


def print_comparison(compared: PairedComparison) -> None:
    """Print figures, differences from the first version and reasons of failures; --json has the transcripts, too."""
    rows: list[Sequence[str]] = [("version", "reward", "failed", "calls", "prompt tokens", "sampled tokens")]
    for one in compared.figures:
        counts = one.failed, one.calls, one.prompt_tokens, one.sampled_tokens
        rows.append((one.version, number(one.reward_mean), *map(str, counts)))
    print_columns(rows)
    for each in compared.differences:
        wins = f"better on {each.better} of {len(compared.tasks)} tasks, worse on {each.worse}"
        test = "" if each.p_value is None else f"; McNemar p = {each.p_value:.3g}"
        say(f"{each.version} - {each.baseline}: {wins}{_difference_text(each.difference)}{test}")
    for one in compared.figures:
        for reason, count in one.failures.items():
            say(f"{one.version} failed {count} times: {reason}")


def _difference_text(found: Interval | None) -> str:
    if found is None:
        return ""
    sure = "" if found.excludes_zero else ", which chance alone may do"
    return f"; {found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]{sure}"


def _parsed(resource: Resource) -> Template:
    from agentlightning.prompts.templates import Template

    try:
        return Template.parse(resource.value)
    except InputError as cause:
        raise InputError(f"{resource.name}@{resource.version}: {cause}") from None


def optimize(
    config: Annotated[Path | None, typer.Argument(help="TOML file with the configuration.")] = None,
    resume: Annotated[str | None, typer.Option("--resume", help="Go on with this run.")] = None,
    promote: Annotated[
        bool, typer.Option("--promote/--no-promote", help="Make the best texts the newest versions of their templates.")
    ] = True,
    settings: Settings = None,
    as_json: Json = False,
    store: Store = None,
    runs: Runs = Path("runs"),
    server: Server = None,
) -> None:
    """Search for better prompts of an agent; trains nothing. Ctrl-C ends after the batch that is under way."""
    from agentlightning.config.file import load_config
    from agentlightning.trainer.checkpoint import RunFolder
    from agentlightning.trainer.display import Display
    from agentlightning.trainer.interrupts import run_interruptible
    from agentlightning.trainer.prompts.optimization import Optimization
    from agentlightning.trainer.training import new_run_id

    url = one_store(store, server)
    if config is None and resume is None:
        raise ConfigError("agl optimize: give a TOML file, or --resume RUN")
    if config is not None and resume is not None:
        raise ConfigError("--resume goes on with the run's own configuration; give no file with it")
    folder = RunFolder(runs, resume or new_run_id())
    loaded = own_config(folder, settings, url) if resume else load_config(config, settings or [], store_setting(url))
    with Display(folder.run_id) as display:
        search = Optimization(loaded, folder, display, promote=promote)
        result = run_interruptible(partial(search.run, resume=resume is not None), search.stop)
    print_json(_told(result)) if as_json else _print_result(result, promote)


def _told(result: OptimizeResult) -> dict[str, Any]:
    difference = _difference(result)
    before, after = map(_mean, result.rewards)
    return {
        "run_id": result.run_id,
        "finished": result.finished,
        "reason": result.reason,
        "before": before,
        "after": after,
        "difference": None if difference is None else [difference.value, difference.low, difference.high],
        "best": result.best.number,
        "texts": dict(result.best.texts),
        "candidates": result.means,
        "versions": result.promoted,
        "rollouts": result.rollouts,
        "tokens": result.tokens,
    }


def _print_result(result: OptimizeResult, promote: bool) -> None:
    say(f"run {result.run_id}: {result.reason} Used: {result.rollouts} rollouts, {result.tokens:,} tokens.")
    before, after = map(_mean, result.rewards)
    if result.best.number == result.seed.number:
        say("nothing better was found" + ("" if before is None else f"; validation reward {before:.3f}"))
    elif before is not None and after is not None:
        told = f"validation reward {before:.3f} before, {after:.3f} after, over {len(result.rewards[0])} tasks"
        say(f"{told}{_difference_text(_difference(result))}; the tasks that chose flatter it")
        for name, text in result.best.texts.items():
            old = result.seed.texts[name].splitlines()
            names = f"{name} before", f"{name} after"
            for line in difflib.unified_diff(old, text.splitlines(), *names, lineterm=""):
                say(line)
    if result.finished:
        versions = ", ".join(f"{name}@{version}" for name, version in result.promoted.items())
        say(f"{'' if promote else 'not promoted; '}rollouts of this run get {versions}")
        say(f"candidates: agl prompts list --candidates {result.run_id}")


def _mean(rewards: dict[int, float]) -> float | None:
    return statistics.fmean(rewards.values()) if rewards else None


def _difference(result: OptimizeResult) -> Interval | None:
    """The paired interval of the mean difference; None where the two have other tasks."""
    from agentlightning.analysis.intervals import paired_bootstrap

    before, after = result.rewards
    if before.keys() != after.keys() or result.best.number == result.seed.number:
        return None
    return paired_bootstrap([after[task] - before[task] for task in before])
