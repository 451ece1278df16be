"""``agl models``: versions of trained models, their aliases, pins and tags, and their weights for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentlightning.cli import models_canary, models_compare, models_tiny
from agentlightning.cli.options import Json, Runs, Store, print_columns, print_json, trained_checkpoint, with_store
from agentlightning.errors import InputError, NotFoundError

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore
    from agentlightning.store.model_versions import ModelAlias, ModelVersion

app = typer.Typer(
    help="List, show, compare, promote, roll back, pin, tag and export versions of trained models.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command("compare")(models_compare.compare)
app.add_typer(models_canary.app, name="canary")
app.command("tiny")(models_tiny.tiny)

Reference = Annotated[
    str, typer.Argument(metavar="NAME@VERSION", help="A number or an alias: support@40, support@best.")
]
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

    async def work(opened: LightningStore) -> tuple[ModelVersion, list[str]]:
        version = await find_model_version(opened, reference)
        aliases = await opened.aliases(version.name)
        return version, [one.alias for one in aliases if one.number == version.number]

    version, aliases = with_store(store, work)
    if as_json:
        print_json({**asdict(version), "aliases": aliases})
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
    print_columns(screen(), rows)


@app.command("promote")
def promote_model(
    reference: Reference,
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="The alias that is to name it: production, best.")],
    notes: Notes = "",
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Move an alias to a version. What serves the alias gives new sessions the version; the move is in the audit log."""
    from agentlightning.store.scan import find_model_version

    async def work(opened: LightningStore) -> ModelAlias:
        version = await find_model_version(opened, reference)
        reason = {"by": "agl models promote", "notes": notes, "metrics": version.metrics}
        return await opened.set_alias(version.name, alias.removeprefix("@"), version.number, reason)

    _tell(with_store(store, work), as_json)


@app.command("rollback")
def roll_back_model(
    name: Annotated[str, typer.Argument(metavar="NAME[@ALIAS]", help="The alias; NAME alone is NAME@production.")],
    notes: Notes = "",
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Move an alias back to the version that it named before."""
    from agentlightning.store.model_versions import parse_reference

    parsed = parse_reference(name if "@" in name else f"{name}@production", "NAME[@ALIAS]")
    if parsed.alias is None:
        raise InputError(f"NAME[@ALIAS]: expected an alias, which is what moves, got {name!r}")

    async def work(opened: LightningStore) -> ModelAlias:
        found = [one for one in await opened.aliases(parsed.name) if one.alias == parsed.alias]
        if not found:
            raise NotFoundError(f"no such alias: {parsed.name}@{parsed.alias}")
        if found[0].previous is None:
            raise NotFoundError(f"{parsed.name}@{parsed.alias}: named no other version before {found[0].number}")
        reason = {"by": "agl models rollback", "notes": notes}
        return await opened.set_alias(parsed.name, found[0].alias, found[0].previous, reason)

    _tell(with_store(store, work), as_json)


@app.command("pin")
def pin_model(reference: Reference, store: Store = None) -> None:
    """Keep a version's weights, whatever trainer.keep_checkpoints says."""
    typer.echo(f"{_describe(store, reference, pinned=True).reference}: pinned")


@app.command("unpin")
def unpin_model(reference: Reference, store: Store = None) -> None:
    """Let a version's weights go with old checkpoints."""
    typer.echo(f"{_describe(store, reference, pinned=False).reference}: not pinned")


@app.command("tag")
def tag_model(
    reference: Reference,
    tags: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="KEY= takes one away.")] = None,
    notes: Annotated[str | None, typer.Option("--notes", help="Text to keep with the version.")] = None,
    store: Store = None,
) -> None:
    """Give a version tags and notes, beside the tags that it has."""
    given = {}
    for tag in tags or []:
        key, separator, value = tag.partition("=")
        if not separator:
            raise InputError(f"{tag}: expected KEY=VALUE")
        given[key] = value
    version = _describe(store, reference, tags=given, notes=notes)
    typer.echo(
        f"{version.reference}: {' '.join(f'{key}={value}' for key, value in sorted(version.tags.items())) or 'no tag'}"
    )


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
    from agentlightning.trainer.model_files import version_folder
    from agentlightning.trainer.model_weights import export_version

    async def work(opened: LightningStore) -> tuple[ModelVersion, Path]:
        version = await find_model_version(opened, what)
        return version, await version_folder(version, runs)

    version, folder = with_store(store, work)
    typer.echo(f"{version.reference}: {export_version(version, folder, to, format)}")


def _export_run(run: str, to: Path, policy: str | None, store: str | None, runs: Path) -> None:
    from agentlightning.trainer.checkpoint import RunFolder, export_policy
    from agentlightning.trainer.run_config import run_config

    folder = RunFolder(runs, run)
    checkpoint = trained_checkpoint(store or run_config(folder).store.url, folder)
    export_policy(Path(checkpoint.path), to, policy)
    typer.echo(f"step {checkpoint.step}, version {checkpoint.version}: {to}")


def _describe(
    store: str | None,
    reference: str,
    *,
    tags: dict[str, str] | None = None,
    notes: str | None = None,
    pinned: bool | None = None,
) -> ModelVersion:
    from agentlightning.store.scan import find_model_version

    async def work(opened: LightningStore) -> ModelVersion:
        version = await find_model_version(opened, reference)
        return await opened.describe_model(version.name, version.number, tags=tags, notes=notes, pinned=pinned)

    return with_store(store, work)


def _tell(moved: ModelAlias, as_json: bool) -> None:
    if as_json:
        print_json(moved)
        return
    before = "" if moved.previous is None else f"; before it was {moved.name}@{moved.previous}"
    typer.echo(f"{moved.name}@{moved.alias} is {moved.name}@{moved.number}{before}")


def _reward(version: ModelVersion) -> str:
    found = version.metrics.get("eval/greedy/reward") or version.metrics.get("eval/sampled/reward")
    return f"{found['mean']:.3f} [{found['low']:.3f}, {found['high']:.3f}]" if found else "-"
