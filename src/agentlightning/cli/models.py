"""``agl models``: versions of trained models, their aliases, the sessions they get, and their weights for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentlightning.cli import models_compare, models_tiny
from agentlightning.cli.options import Json, Runs, Store, print_columns, print_json, trained_checkpoint, with_store
from agentlightning.errors import ConfigError, InputError, NotFoundError

if TYPE_CHECKING:
    from agentlightning.records import JSON
    from agentlightning.store.base import LightningStore
    from agentlightning.store.models import ModelAlias, ModelVersion

app = typer.Typer(
    help="List, show, compare, promote, roll back and export versions of trained models.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command("compare")(models_compare.compare)
app.command("tiny")(models_tiny.tiny)

Reference = Annotated[
    str, typer.Argument(metavar="NAME@VERSION", help="A number or an alias: support@40, support@best.")
]
LOAD_TIMEOUT_S = 600.0
Notes = Annotated[str, typer.Option("--notes", help="The reason, for the audit log.")]


@app.command("list")
def list_models(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Of this name alone.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also versions whose weights were deleted.")] = False,
    as_json: Json = False,
    store: Store = None,
) -> None:
    """List model versions with their aliases, by name and number."""
    from agentlightning.trainer.display import screen

    async def work(opened: LightningStore) -> tuple[list[ModelVersion], list[ModelAlias]]:
        return await opened.models(name), await opened.aliases(name)

    found, aliases = with_store(store, work)
    found = [version for version in found if everything or not version.deleted]
    if as_json:
        print_json({"versions": found, "aliases": aliases})
        return
    rows = [("version", "aliases", "run", "step", "held-out reward", "tags", "weights")]
    for version in found:
        named = " ".join(f"@{one.alias}" for one in aliases if (one.name, one.number) == (version.name, version.number))
        tags = " ".join(f"{key}={value}" for key, value in sorted(version.tags.items()))
        weights = "deleted" if version.deleted else f"{version.weights['kind']}{', pinned' if version.pinned else ''}"
        figures = version.reference, named or "-", version.run_id, str(version.step), _reward(version), tags or "-"
        rows.append((*figures, weights))
    print_columns(screen(), rows) if found else screen().print("no model version yet; a training run makes them")


@app.command("show")
def show_model(reference: Reference, as_json: Json = False, store: Store = None) -> None:
    """Show a version: its run, what it was made of, its metrics with intervals, and where its weights are."""
    from dataclasses import asdict

    from agentlightning.store.scan import find_model_version
    from agentlightning.trainer.display import screen

    async def work(opened: LightningStore) -> tuple[ModelVersion, list[str], JSON]:
        version = await find_model_version(opened, reference)
        aliases = await opened.aliases(version.name)
        named = [one.alias for one in aliases if one.number == version.number]
        return version, named, await _split_rows(opened, version)

    version, aliases, splits = with_store(store, work)
    if as_json:
        print_json({**asdict(version), "aliases": aliases, "canary_of": splits})
        return
    table = {**asdict(version), "aliases": " ".join(f"@{alias}" for alias in aliases)}
    rows = [("version", version.reference)]
    for name, value in table.items():
        if name in ("name", "number", "metrics", "created_ns"):
            continue
        lines = value.items() if isinstance(value, dict) else [("", value)]
        rows += [(f"{name} {key}".strip(), str(each)) for key, each in lines if each not in (None, "", False)]
    for name, each in version.metrics.items():
        rows.append((name, f"{each['mean']:.4g} [{each['low']:.4g}, {each['high']:.4g}], n = {each['n']}"))
    for run_id, split in splits.items():
        rows.append(("canary of", f"{run_id}, {split['weight']:.1%} of new sessions"))
        rows += [(f"canary {measure}", _evidence(one)) for measure, one in split["figures"].items()]
    print_columns(screen(), rows)


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
    notes: Notes = "",
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Move an alias to a version: whoever serves the alias gives new sessions the version.

    With --share the alias stays, and the serving run gives the version that share of new sessions until it is promoted or
    rolled back; agl serve rolls it back once its rewards or failures are shown to be worse.
    """
    from agentlightning.store.scan import find_model_version

    async def work(opened: LightningStore) -> JSON | ModelAlias:
        version = await find_model_version(opened, reference)
        if share is not None:
            return await _start_canary(opened, version, share, run)
        reason = {"by": "agl models promote", "notes": notes, "metrics": version.metrics}
        return await opened.set_alias(version.name, alias.removeprefix("@"), version.number, reason)

    done = with_store(store, work)
    if as_json or not isinstance(done, dict):
        _print_moved(done, as_json)
    else:
        typer.echo(f"{reference} gets {share:.1%} of new sessions of run {done['run_id']}")


@app.command("rollback")
def roll_back_model(
    name: Annotated[str, typer.Argument(metavar="NAME[@ALIAS]", help="The alias; NAME alone is NAME@production.")],
    notes: Notes = "",
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Take a canary of the model out of service; without one move the alias back to the version that it named before."""
    from agentlightning.store.models import parse_reference

    parsed = parse_reference(name if "@" in name else f"{name}@production", "NAME[@ALIAS]")
    if parsed.alias is None:
        raise InputError(f"NAME[@ALIAS]: expected an alias, which is what moves, got {name!r}")

    async def work(opened: LightningStore) -> JSON | ModelAlias:
        if (stopped := await _stop_canaries(opened, parsed.name, notes)) is not None:
            return stopped
        found = [one for one in await opened.aliases(parsed.name) if one.alias == parsed.alias]
        if not found:
            raise NotFoundError(f"no such alias: {parsed.name}@{parsed.alias}")
        if found[0].previous is None:
            raise NotFoundError(f"{parsed.name}@{parsed.alias}: named no other version before {found[0].number}")
        reason = {"by": "agl models rollback", "notes": notes}
        return await opened.set_alias(parsed.name, found[0].alias, found[0].previous, reason)

    done = with_store(store, work)
    if as_json or not isinstance(done, dict):
        _print_moved(done, as_json)
    else:
        typer.echo(f"{done['canary']} gets no new sessions any more")


@app.command("export")
def export_model(
    what: Annotated[
        str,
        typer.Argument(metavar="RUN|NAME@VERSION", help="A run, for its last checkpoint; or a version: support@best."),
    ],
    to: Annotated[Path, typer.Option("--to", help="New folder for the files.")],
    format: Annotated[
        Literal["hf", "peft", "gguf"],
        typer.Option("--format", help="hf: for transformers and vLLM. peft: the adapter alone. gguf: for llama.cpp."),
    ] = "hf",
    policy: Annotated[str | None, typer.Option("--policy", help="With RUN, which of its policies.")] = None,
    store: Store = None,
    runs: Runs = Path("runs"),
) -> None:
    """Write trained weights as files that other programs load."""
    if "@" not in what:
        if format != "hf":
            raise InputError(f"--format {format}: expected NAME@VERSION; a run is exported as hf")
        _export_run(what, to, policy, store, runs)
        return
    if policy is not None:
        raise InputError("--policy: expected a run; a version belongs to one policy")
    from agentlightning.store.scan import find_model_version
    from agentlightning.trainer.model_weights import export_version, version_folder

    async def work(opened: LightningStore) -> tuple[ModelVersion, Path]:
        version = await find_model_version(opened, what)
        return version, await version_folder(version, runs)

    version, folder = with_store(store, work)
    typer.echo(f"{version.reference}: {export_version(version, folder, to, format)}")


def _export_run(run: str, to: Path, policy: str | None, store: str | None, runs: Path) -> None:
    from agentlightning.trainer.checkpoint import RunFolder, export_policy, run_config

    folder = RunFolder(runs, run)
    checkpoint = trained_checkpoint(store or run_config(folder).store.url, folder)
    export_policy(Path(checkpoint.path), to, policy)
    typer.echo(f"step {checkpoint.step}, version {checkpoint.version}: {to}")


async def _serving_runs(store: LightningStore, name: str) -> list[str]:
    return [one.id for one in await store.runs() if one.name == f"serve {name}" and one.state == "running"]


async def _start_canary(store: LightningStore, version: ModelVersion, share: float, run: str | None) -> JSON:
    """Loads a version alongside the stable one, then gives it its share. ConfigError if several runs serve the model."""
    from agentlightning.serving.split import Split, put_split, read_trial

    runs = [run] if run is not None else await _serving_runs(store, version.name)
    if not runs:
        raise NotFoundError(
            f"{version.name}: no run serves it; start one with: agl serve --policy {version.name}@production"
        )
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
    import time

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


async def _stop_canaries(store: LightningStore, name: str, notes: str) -> JSON | None:
    """Takes the canary out of the split of each run that serves a model; None where there is none."""
    from agentlightning.serving.split import Split, put_split, read_trial

    stopped: JSON | None = None
    for run_id in await _serving_runs(store, name):
        trial = await read_trial(store, run_id)
        if trial.split.canary is not None:
            stopped = {"decision": "rollback", "canary": f"{name}@{trial.split.canary}", "notes": notes}
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


def _print_moved(moved: JSON | ModelAlias, as_json: bool) -> None:
    if as_json or isinstance(moved, dict):
        print_json(moved)
        return
    before = "" if moved.previous is None else f"; before it was {moved.name}@{moved.previous}"
    typer.echo(f"{moved.name}@{moved.alias} is {moved.name}@{moved.number}{before}")


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
