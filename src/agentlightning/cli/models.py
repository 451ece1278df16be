"""``agl models``: versions of trained models, their aliases, the sessions they get, and their weights for other programs."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentlightning.cli.options import (
    Json,
    Runs,
    Settings,
    Store,
    Temperature,
    own_config,
    print_columns,
    print_json,
    run_shown,
    say,
    store_setting,
    trained_checkpoint,
    with_store,
)
from agentlightning.errors import ConfigError, InputError, NotFoundError

if TYPE_CHECKING:
    from agentlightning.analysis.version_comparison import ComparedModel
    from agentlightning.config.run import Config
    from agentlightning.records import JSON
    from agentlightning.store.base import LightningStore
    from agentlightning.store.models import ModelAlias, ModelVersion
    from agentlightning.trainer.checkpoint import RunFolder

LOAD_TIMEOUT_S = 600.0
ALPHA = 0.05
HIDDEN = ("name", "number", "metrics", "created_ns")
"""Fields of a version that `agl models show` prints otherwise, or not."""

Reference = Annotated[
    str, typer.Argument(metavar="NAME@VERSION", help="A number or an alias: support@40, support@best.")
]
Model = Annotated[
    str,
    typer.Argument(help="NAME@NUMBER, NAME@ALIAS, a run (its last checkpoint), or the folder or hub name of a model."),
]

app = typer.Typer(
    help="Versions of trained models, and the aliases that are served.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("list")
def list_models(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Of this name alone.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also versions whose weights were deleted.")] = False,
    as_json: Json = False,
    store: Store = None,
) -> None:
    """List model versions with their aliases, by name and number."""

    async def work(opened: LightningStore) -> tuple[list[ModelVersion], list[ModelAlias]]:
        return await opened.models(name), await opened.aliases(name)

    found, aliases = with_store(store, work)
    found = [version for version in found if everything or not version.deleted]
    if as_json:
        print_json({"versions": found, "aliases": aliases})
        return
    rows = [("version", "aliases", "run", "step", "held-out reward", "weights")]
    for version in found:
        named = " ".join(f"@{one.alias}" for one in aliases if (one.name, one.number) == (version.name, version.number))
        weights = "deleted" if version.deleted else str(version.weights["kind"])
        figures = version.run_id, str(version.step), _reward(version)
        rows.append((version.reference, named or "-", *figures, weights))
    print_columns(rows, "no model version yet; a training run makes them")


@app.command("show")
def show_model(reference: Reference, as_json: Json = False, store: Store = None) -> None:
    """Show a version: its run, its metrics, and where its weights are."""
    from agentlightning.store.scan import find_model_version

    async def work(opened: LightningStore) -> tuple[ModelVersion, list[str], JSON]:
        version = await find_model_version(opened, reference)
        aliases = await opened.aliases(version.name)
        named = [one.alias for one in aliases if one.number == version.number]
        return version, named, await _split_rows(opened, version)

    version, aliases, splits = with_store(store, work)
    if as_json:
        print_json({**asdict(version), "aliases": aliases, "canary_of": splits})
        return
    rows = [("version", version.reference)]
    table = {**asdict(version), "aliases": " ".join(f"@{alias}" for alias in aliases)}
    for name, value in ((name, value) for name, value in table.items() if name not in HIDDEN):
        lines = value.items() if isinstance(value, dict) else [("", value)]
        rows += [(f"{name} {key}".strip(), str(each)) for key, each in lines if each not in (None, "", False)]
    for name, each in version.metrics.items():
        rows.append((name, f"{each['mean']:.4g} [{each['low']:.4g}, {each['high']:.4g}], n = {each['n']}"))
    for run_id, split in splits.items():
        rows.append(("canary of", f"{run_id}, {split['weight']:.1%} of new sessions"))
        rows += [(f"canary {measure}", _evidence(one)) for measure, one in split["figures"].items()]
    print_columns(rows)


@app.command("promote")
def promote_model(
    reference: Reference,
    alias: Annotated[str, typer.Argument(metavar="[ALIAS]", help="The alias that is to name it.")] = "production",
    share: Annotated[
        float | None,
        typer.Option("--share", min=0.001, max=0.999, help="First give it this share of new sessions, as a canary."),
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Id of the run that serves, with --share, if several serve the model.")
    ] = None,
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Move an alias to a version, at once or as a canary.

    Servers of the alias use the version for new sessions.

    With --share the alias stays, and the serving run gives the version that share of new sessions until it is promoted or
    rolled back; agl serve rolls it back once its rewards or failures are shown to be worse.
    """
    from agentlightning.store.scan import find_model_version

    async def work(opened: LightningStore) -> JSON | ModelAlias:
        version = await find_model_version(opened, reference)
        if share is not None:
            return await _start_canary(opened, version, share, run)
        return await opened.set_alias(version.name, alias.removeprefix("@"), version.number)

    _print_moved(with_store(store, work), as_json, f"{reference} gets {share or 0:.1%} of new sessions")


@app.command("rollback")
def roll_back_model(
    name: Annotated[str, typer.Argument(metavar="NAME[@ALIAS]", help="The alias; NAME alone is NAME@production.")],
    as_json: Json = False,
    store: Store = None,
) -> None:
    """End a canary, or move the alias back.

    Without a canary of the model the alias names the version again that it named before.
    """
    from agentlightning.store.models import parse_reference

    parsed = parse_reference(name if "@" in name else f"{name}@production", "NAME[@ALIAS]")
    if parsed.alias is None:
        raise InputError(f"NAME[@ALIAS]: expected an alias, which is what moves, got {name!r}")

    async def work(opened: LightningStore) -> JSON | ModelAlias:
        if (stopped := await _stop_canaries(opened, parsed.name)) is not None:
            return stopped
        found = [one for one in await opened.aliases(parsed.name) if one.alias == parsed.alias]
        if not found:
            raise NotFoundError(f"no such alias: {parsed.name}@{parsed.alias}")
        if found[0].previous is None:
            raise NotFoundError(f"{parsed.name}@{parsed.alias}: named no other version before {found[0].number}")
        return await opened.set_alias(parsed.name, found[0].alias, found[0].previous)

    _print_moved(with_store(store, work), as_json, f"the canary of {parsed.name} gets no new sessions any more")


def _print_moved(moved: JSON | ModelAlias, as_json: bool, canary: str) -> None:
    """canary: the sentence for a share that changed in place of an alias."""
    if as_json:
        print_json(moved)
    elif isinstance(moved, dict):
        typer.echo(canary)
    else:
        before = "" if moved.previous is None else f"; before it was {moved.name}@{moved.previous}"
        typer.echo(f"{moved.name}@{moved.alias} is {moved.name}@{moved.number}{before}")


async def _serving_runs(store: LightningStore, name: str) -> list[str]:
    return [one.id for one in await store.runs() if one.name == f"serve {name}" and one.state == "running"]


async def _start_canary(store: LightningStore, version: ModelVersion, share: float, run: str | None) -> JSON:
    """Loads a version alongside the stable one, then gives it its share. ConfigError if several runs serve the model."""
    from agentlightning.serving.split import Split, put_split, read_trial

    runs = [run] if run is not None else await _serving_runs(store, version.name)
    if not runs:
        start = f"agl serve --policy {version.name}@production"
        raise NotFoundError(f"{version.name}: no run serves it; start one with: {start}")
    if len(runs) > 1:
        raise ConfigError(f"--run: is required, since several runs serve {version.name}: {', '.join(runs)}")
    before = await read_trial(store, runs[0])
    stable = before.split.stable
    if version.number == stable:
        raise ConfigError(f"{version.reference}: is the stable version already")
    # Without a share at first: no session begins with a version that is not loaded yet.
    waiting = await put_split(store, runs[0], Split(stable=stable, canary=version.number), after=before.version)
    await _wait_loaded(store, runs[0], version)
    split = Split(stable=stable, canary=version.number, weight=share)
    await put_split(store, runs[0], split, after=waiting.version)
    return {"run_id": runs[0], **split.model_dump(mode="json")}


async def _wait_loaded(store: LightningStore, run_id: str, version: ModelVersion) -> None:
    """Returns when a version is served. NotFoundError where that takes too long."""
    from agentlightning.serving.split import version_alias

    alias, known = version_alias(version.name, version.number), dict[str, int]()
    end_s = time.monotonic() + LOAD_TIMEOUT_S
    while (left_s := end_s - time.monotonic()) > 0:
        for one in await store.wait_resources(run_id, known, min(30.0, left_s)):
            known[one.name] = one.version
            if one.name == alias and not one.value.get("released"):
                return
    raise NotFoundError(
        f"{version.reference}: is not served within {LOAD_TIMEOUT_S:.0f} s; the log of agl serve says why"
    )


async def _stop_canaries(store: LightningStore, name: str) -> JSON | None:
    """Takes the canary out of the split of each run that serves a model; None where there is none."""
    from agentlightning.serving.split import Split, put_split, read_trial

    stopped: JSON | None = None
    for run_id in await _serving_runs(store, name):
        trial = await read_trial(store, run_id)
        if trial.split.canary is not None:
            stopped = {"decision": "rollback", "canary": f"{name}@{trial.split.canary}"}
            await put_split(store, run_id, Split(stable=trial.split.stable, reason=stopped), after=trial.version)
    return stopped


async def _split_rows(store: LightningStore, version: ModelVersion) -> JSON:
    """The evidence of each run in which a version is the canary, by run."""
    from agentlightning.serving.settings import ServeConfig
    from agentlightning.serving.split import read_evidence, read_trial

    found = {}
    for run_id in await _serving_runs(store, version.name):
        trial = await read_trial(store, run_id)
        if trial.split.canary == version.number:
            [run] = await store.runs([run_id])
            table = {key: value for key, value in run.config["serve"].items() if key != "model"}
            evidence = await read_evidence(store, run_id, trial, ServeConfig(**table))
            found[run_id] = {"weight": trial.split.weight, "figures": evidence.figures}
    return found


def _evidence(one: JSON) -> str:
    """One measure of a canary and its stable version."""
    arms = [
        f"{name} {'-' if one[name]['mean'] is None else format(one[name]['mean'], '.3f')} of {one[name]['sessions']}"
        for name in ("stable", "canary")
    ]
    return f"{', '.join(arms)}; evidence that it is worse {one['wealth']:.3g} of {one['bound']:.3g}"


def _reward(version: ModelVersion) -> str:
    found = version.metrics.get("eval/greedy/reward") or version.metrics.get("eval/sampled/reward")
    return f"{found['mean']:.3f} [{found['low']:.3f}, {found['high']:.3f}]" if found else "-"


@app.command("import")
def import_weights(
    source: Annotated[
        str,
        typer.Argument(
            help="FILE.gguf, as llama.cpp and Ollama run it; a model's or an adapter's folder; hub:NAME; or FILE.jsonl of "
            'conversations {"messages": [{"role", "content"}, …]}, which a small Llama learns to imitate.'
        ),
    ],
    to: Annotated[
        Path | None,
        typer.Option("--to", help="New folder for the model.", show_default="models/ and the source's name"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Of FILE.jsonl: the weights and the order of conversations.", show_default="0"),
    ] = None,
) -> None:
    """Make a model folder to train from, and record its licence."""
    from agentlightning.engines.import_model import import_model

    name = Path(source.removeprefix("hub:")).name.removesuffix(".gguf").removesuffix(".jsonl")
    folder = to or Path("models") / name
    if source.endswith(".jsonl"):
        _imitate(Path(source), folder, seed or 0)
        return
    if seed is not None:
        raise InputError("--seed: expected FILE.jsonl; nothing else is random")
    found = import_model(source, folder)
    lost = f", de-quantised from {' and '.join(found.quantization)}" if found.quantization else ""
    say(f"license {found.license or 'unknown'}{lost}; sha256 {found.sha256[:12]}")
    typer.echo(folder)


@app.command("export")
def export_model(
    what: Annotated[
        str,
        typer.Argument(metavar="RUN|NAME@VERSION", help="A run, for its last checkpoint; or a version: support@best."),
    ],
    to: Annotated[
        str, typer.Option("--to", help="New folder for the files; or hub:OWNER/NAME, which gets a model card, too.")
    ],
    format: Annotated[
        Literal["hf", "peft", "gguf"],
        typer.Option("--format", help="hf: for transformers and vLLM. peft: the adapter alone. gguf: for llama.cpp."),
    ] = "hf",
    policy: Annotated[str | None, typer.Option("--policy", help="With RUN, which of its policies.")] = None,
    store: Store = None,
    runs: Runs = Path("runs"),
) -> None:
    """Write trained weights as files that other programs load."""
    from agentlightning.store.scan import find_model_version
    from agentlightning.trainer.checkpoint import RunFolder, export_policy, run_config
    from agentlightning.trainer.model_weights import export_version, push_folder, version_folder

    hub = to.removeprefix("hub:") if to.startswith("hub:") else None
    if "@" not in what:
        if hub is not None:
            raise InputError("--to hub: expected NAME@VERSION, whose record makes the model card")
        if format != "hf":
            raise InputError(f"--format {format}: expected NAME@VERSION; a run is exported as hf")
        checkpoint = trained_checkpoint(store or run_config(RunFolder(runs, what)).store.url, RunFolder(runs, what))
        export_policy(Path(checkpoint.path), Path(to), policy)
        typer.echo(f"step {checkpoint.step}, version {checkpoint.version}: {to}")
        return
    if policy is not None:
        raise InputError("--policy: expected a run; a version belongs to one policy")

    async def work(opened: LightningStore) -> tuple[ModelVersion, Path, str]:
        from agentlightning.analysis.model_card import model_card

        version = await find_model_version(opened, what)
        card = await model_card(opened, version, adapter=format == "peft") if hub is not None else ""
        return version, await version_folder(version, runs), card

    version, folder, card = with_store(store, work)
    if hub is None:
        typer.echo(f"{version.reference}: {export_version(version, folder, Path(to), format)}")
        return
    with TemporaryDirectory() as place:
        export_version(version, folder, made := Path(place) / "model", format)
        (made / "README.md").write_text(card, encoding="utf-8")
        typer.echo(f"{version.reference}: {push_folder(made, hub)}")


@app.command("compare")
def compare(
    first: Model,
    second: Model,
    tasks: Annotated[
        str | None, typer.Option("--tasks", help="Held-out tasks: file, hub:NAME or file.py:name. [data.val]")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="TOML file with the agent and its settings; default: those of a run named."),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Tasks at most.")] = None,
    temperature: Temperature = 0.0,
    stop_early: Annotated[
        bool, typer.Option("--stop-early", help="Stop as soon as one is shown to be better, at an error of 5% at most.")
    ] = False,
    settings: Settings = None,
    as_json: Json = False,
    store: Store = None,
    runs: Runs = Path("runs"),
) -> None:
    """Run an agent with two models on the same held-out tasks.

    Both models are served at the same time. The agent is that of --config, else of the run that the first model named has.
    """
    from agentlightning.analysis.version_comparison import ComparisonRule, compare_models
    from agentlightning.cli.prompts import print_comparison
    from agentlightning.trainer.checkpoint import RunFolder
    from agentlightning.trainer.training import new_run_id

    base = _config(config, (first, second), settings, store, runs)
    if tasks is not None:
        base = base.model_copy(update={"data": base.data.model_copy(update={"val": tasks})})
    models = _with_model(first, base, runs), _with_model(second, base, runs)
    rule = ComparisonRule(tasks=limit, temperature=temperature, alpha=ALPHA if stop_early else None)
    other = RunFolder(runs, new_run_id())
    title = f"compare {first} {second}"
    found = run_shown(title, runs, lambda own, display: compare_models(models, (own, other), display, rule))
    if as_json:
        print_json(found)
        return
    print_comparison(found)
    if (test := found.sequential) is not None:
        which = "neither is shown to be better" if test.better is None else f"{test.better} is better"
        wealth = ", ".join(f"{name} {value:.3g}" for name, value in test.wealth.items())
        left = f"{test.tasks_left} tasks were not needed"
        say(f"sequential test at {test.alpha:g}: {which}; wealth {wealth} of {test.bound:.3g}; {left}")
    for name, run in found.runs.items():
        say(f"rollouts of {name}: agl rollouts list {run}")


def _config(
    file: Path | None, names: tuple[str, str], settings: list[str] | None, store: str | None, runs: Path
) -> Config:
    """The configuration of both sides, but for the model."""
    from agentlightning.config.file import load_config
    from agentlightning.store.models import is_reference
    from agentlightning.store.scan import find_model_version
    from agentlightning.trainer.checkpoint import RunFolder

    if file is not None:
        return load_config(file, settings or [], store_setting(store))
    for name in names:
        folder = _run_folder(name, runs)
        if folder is None and is_reference(name) and not Path(name).exists():
            version = with_store(store, partial(find_model_version, reference=name))
            folder = RunFolder(runs, version.run_id)
        if folder is not None:
            return own_config(folder, settings, store)
    raise ConfigError("--config: is required, since neither model is of a run; name a TOML file with [agent]")


def _run_folder(name: str, runs: Path) -> RunFolder | None:
    """The run that a model is named by; None where it is none."""
    from agentlightning.trainer.checkpoint import RunFolder

    found = [path for path in (runs / name, Path(name)) if (path / "checkpoints").is_dir()]
    return RunFolder(found[0].parent, found[0].name) if found else None


def _with_model(name: str, base: Config, runs: Path) -> ComparedModel:
    from agentlightning.analysis.version_comparison import ComparedModel
    from agentlightning.trainer.checkpoint import policies_in
    from agentlightning.trainer.model_weights import with_versions
    from agentlightning.trainer.policies import with_models

    run = _run_folder(name, runs)
    path = Path(name) if run is None else Path(trained_checkpoint(base.store.url, run).path)
    folders = policies_in(path) if path.is_dir() else {}
    if len(base.policies) > 1 and set(folders) != set(base.policies):
        wanted = ", ".join(base.policies)
        raise ConfigError(f"{name}: expected a run or a checkpoint with the policies {wanted}; name those to compare")
    return ComparedModel(name=name, config=with_versions(with_models(base, folders or {"": path}), runs))


def _imitate(demos: Path, to: Path, seed: int) -> None:
    """Makes a tokenizer and a small Llama, warm-started on demonstrations: what `agl train` can then train on reward."""
    from agentlightning.demo.imitation import make_policy, read_demonstrations
    from agentlightning.engines.folders import new_folder
    from agentlightning.trainer.display import Display

    read = read_demonstrations(demos)
    with new_folder(to) as made, Display(f"import {demos}") as display:
        progress = lambda row: display.phase(row["phase"], row["step"], row["of"])  # noqa: E731
        facts = make_policy(read, made, seed=seed, threads=None, report=progress) | {"folder": str(to)}
    display.note(
        f"{facts['parameters']:,} parameters imitate {facts['demonstrations']:,} demonstrations; those held out cost "
        f"{facts['heldout_loss']:.2f} nats per token. Next: agl check TOML, with model.path = '{to}', says how often the "
        "agent succeeds with it; agl train TOML, with trainer.learning_rate = 1e-3, trains it on reward"
    )
    print_json(facts)
