"""``agl models compare``: two models on the same tasks, with paired statistics."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentlightning.cli.options import (
    Json,
    Runs,
    Settings,
    Store,
    own_config,
    print_json,
    run_shown,
    store_setting,
    with_store,
)
from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from agentlightning.analysis.version_comparison import ComparedModel, PairedComparison
    from agentlightning.config.run import Config
    from agentlightning.trainer.checkpoint import RunFolder

Model = Annotated[
    str,
    typer.Argument(help="NAME@NUMBER, NAME@ALIAS, a run (its last checkpoint), or the folder or hub name of a model."),
]


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
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, help="Sampling temperature; 0 is greedy.")
    ] = 0.0,
    stop_early: Annotated[
        bool, typer.Option("--stop-early", help="Stop as soon as one is shown to be better.")
    ] = False,
    alpha: Annotated[
        float | None,
        typer.Option("--alpha", min=0.0001, max=0.5, help="Error of --stop-early at most. [0.05]"),
    ] = None,
    transcripts: Annotated[int, typer.Option("--transcripts", min=0, help="Tasks to show side by side.")] = 0,
    settings: Settings = None,
    as_json: Json = False,
    store: Store = None,
    runs: Runs = Path("runs"),
) -> None:
    """Run an agent with two models on the same held-out tasks, and print what the second does better or worse.

    Both models are served at the same time. The agent is that of --config, else of the run that the first model named has.
    """
    from agentlightning.analysis.version_comparison import ComparisonRule, compare_models
    from agentlightning.trainer.checkpoint import RunFolder
    from agentlightning.trainer.display import screen
    from agentlightning.trainer.training import new_run_id

    if alpha is not None and not stop_early:
        raise ConfigError("--alpha: has no effect without --stop-early")
    base = _config(config, (first, second), settings or [], store, runs)
    if tasks is not None:
        base = base.model_copy(update={"data": base.data.model_copy(update={"val": tasks})})
    models = _with_model(first, base, runs), _with_model(second, base, runs)
    rule = ComparisonRule(tasks=limit, temperature=temperature, alpha=(alpha or 0.05) if stop_early else None)
    compared = run_shown(
        f"compare {first} {second}",
        runs,
        lambda own, display: compare_models(models, (own, RunFolder(runs, new_run_id())), display, rule),
    )
    print_json(compared) if as_json else _print_models(screen(), compared, transcripts)


def _config(file: Path | None, names: tuple[str, str], settings: list[str], store: str | None, runs: Path) -> Config:
    """The configuration of both sides, but for the model."""
    from functools import partial

    from agentlightning.config.file import load_config
    from agentlightning.store.scan import find_model_version
    from agentlightning.trainer.checkpoint import RunFolder

    if file is not None:
        return load_config(file, settings, store_setting(store))
    for name in names:
        folder = _run_folder(name, runs)
        if folder is None and _is_version(name):
            version = with_store(store, partial(find_model_version, reference=name))
            folder = RunFolder(runs, version.run_id)
        if folder is not None:
            return own_config(folder, settings, store)
    raise ConfigError("--config: is required, since neither model is of a run; name a TOML file with [agent]")


def _run_folder(name: str, runs: Path) -> RunFolder | None:
    """The run that a model is named by; None where it is none."""
    from agentlightning.trainer.checkpoint import RunFolder

    for path in (runs / name, Path(name)):
        if (path / "checkpoints").is_dir():
            return RunFolder(path.parent, path.name)
    return None


def _is_version(name: str) -> bool:
    from agentlightning.store.models import is_reference

    return is_reference(name) and not Path(name).exists()


def _with_model(name: str, base: Config, runs: Path) -> ComparedModel:
    from agentlightning.analysis.version_comparison import ComparedModel
    from agentlightning.cli.options import trained_checkpoint
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


def _print_models(console: Console, compared: PairedComparison, transcripts: int) -> None:
    from agentlightning.cli.paired import print_comparison

    print_comparison(console, compared, transcripts)
    told = compared.sequential
    if told is not None:
        which = "neither is shown to be better" if told.better is None else f"{told.better} is better"
        wealth = ", ".join(f"{name} {value:.3g}" for name, value in told.wealth.items())
        console.print(
            f"sequential test at {told.alpha:g}: {which}; wealth {wealth} of {told.bound:.3g}; "
            f"{told.tasks_left} tasks were not needed",
            soft_wrap=True,
        )
    for name, run in compared.runs.items():
        console.print(f"rollouts of {name}: agl rollouts list {run}", soft_wrap=True)
