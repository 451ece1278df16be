"""``agl train``: train from a TOML file or offline from recorded runs, or resume a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentlightning.cli.algorithms import list_algorithms
from agentlightning.cli.options import (
    ADDRESSES,
    Runs,
    Server,
    Settings,
    Store,
    WithConsole,
    one_store,
    own_config,
    store_setting,
    with_store,
)
from agentlightning.errors import ConfigError, ConflictError

if TYPE_CHECKING:
    from rich.console import Console

    from agentlightning.config.run import Config
    from agentlightning.trainer.checkpoint import RunFolder
    from agentlightning.trainer.display import Display
    from agentlightning.trainer.training import TrainResult


EXIT_UNFINISHED = 75
"""With --run: the run was told to end before its last step, so whatever restarts what fails (a Job) goes on with it."""


def train(
    config: Annotated[Path | None, typer.Argument(help="TOML file with the configuration.")] = None,
    resume: Annotated[str | None, typer.Option("--resume", help="Continue this run from its last checkpoint.")] = None,
    rerun: Annotated[
        str | None,
        typer.Option(
            "--rerun", help="Start this run again as a new run: same settings; code and tasks must be the same."
        ),
    ] = None,
    changed_ok: Annotated[
        bool, typer.Option("--changed-ok", help="With --rerun: start it even though its code or tasks have changed.")
    ] = False,
    agent: Annotated[
        str | None, typer.Option("--agent", help="file.py:name, or a command such as 'node agent.js'.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", help="Training tasks: file, hub:NAME or file.py:name.")
    ] = None,
    val: Annotated[str | None, typer.Option("--val", help="Held-out tasks.")] = None,
    reward: Annotated[str | None, typer.Option("--reward", help="Reward function file.py:name.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Hub name or folder of the model.")] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            "--algorithm",
            help="lightning_rl, or offline: sft, rft, distill, dpo, kto. One that is not the file's has none of its "
            "settings.",
        ),
    ] = None,
    from_run: Annotated[
        list[str] | None,
        typer.Option("--from-run", help="Learn from this run's rollouts, in place of tasks. May be repeated."),
    ] = None,
    list_parts: Annotated[
        bool,
        typer.Option("--list-algorithms", help="List algorithms, credit rules, advantages and losses; train nothing."),
    ] = False,
    settings: Settings = None,
    store: Store = None,
    runs: Runs = Path("runs"),
    server: Server = None,
    console: WithConsole = False,
    run: Annotated[
        str | None,
        typer.Option(
            "--run", help="Id of the run, which is started, or goes on where it was: for what restarts by itself."
        ),
    ] = None,
) -> None:
    """Train the model behind an agent. Ctrl-C ends after the step that is under way and prints the line that resumes.

    With --from-run and no file, the model, its engine and the agent that is evaluated are those of that run.
    """
    if list_parts:
        list_algorithms(config)
        return
    if rerun is not None:
        if any((config, resume, run, agent, tasks, val, reward, model, algorithm, from_run, settings)):
            raise ConfigError("--rerun: takes all settings from that run; give no others")
        _rerun(rerun, changed_ok, one_store(store, server), runs)
        return
    if changed_ok:
        raise ConfigError("--changed-ok: expected --rerun RUN with it")
    from agentlightning.store.rules import check_run_id
    from agentlightning.trainer.checkpoint import RunFolder
    from agentlightning.trainer.model_weights import with_versions
    from agentlightning.trainer.training import new_run_id

    url = one_store(store, server)
    options = {"data.train": tasks, "data.val": val, "agent.reward": reward, "model.path": model}
    given = _given(agent, options | {"algorithm.type": algorithm, "data.from_run": from_run or None})
    if run is not None:
        if resume is not None:
            raise ConfigError("--run: starts a run or goes on with it; give --run or --resume, not both")
        check_run_id(run)
        folder = RunFolder(runs, run)
        known = _known(folder, settings or [], url)
        settled = known or with_versions(_fresh(config, given, settings or [], url), runs)
        if not run_and_report(settled, folder, resume=known is not None, console=console).finished:
            raise typer.Exit(EXIT_UNFINISHED)
    elif resume is None:
        fresh = with_versions(_fresh(config, given, settings or [], url), runs)
        run_and_report(fresh, RunFolder(runs, new_run_id()), console=console)
    else:
        folder = RunFolder(runs, resume)
        if config is not None or given:
            raise ConfigError("--resume goes on with the run's own configuration; give no other settings with it")
        run_and_report(own_config(folder, settings or [], url), folder, resume=True, console=console)


def _rerun(run: str, changed_ok: bool, store: str | None, runs: Path) -> None:
    """Starts a training run again from its record. ConflictError where code or tasks differ from those recorded."""
    from agentlightning.store.open import store_url
    from agentlightning.store.scan import find_run
    from agentlightning.trainer.checkpoint import Fingerprint, RunFolder, recorded_config, take_fingerprint
    from agentlightning.trainer.data.tasks import load_tasks
    from agentlightning.trainer.serving import is_training
    from agentlightning.trainer.training import new_run_id

    found = with_store(store, lambda opened: find_run(opened, run))
    if not is_training(found):
        raise ConflictError(f"--rerun: {run} is not a training run")
    config = recorded_config(found, store_url(store))
    data = config.data
    tasks = [] if data.train is None else load_tasks(data.train, config.trainer.seed)
    then, now = Fingerprint.of_summary(found.summary), take_fingerprint(config, tasks)
    changed = [kind for kind in ("code", "data") if getattr(then, kind) != getattr(now, kind)]
    if changed and not changed_ok:
        raise ConflictError(
            f"{run}: {' and '.join(changed)} changed since the run was last started; to start it anyway, add --changed-ok"
        )
    run_and_report(config, RunFolder(runs, new_run_id()), name=found.name)


def _known(folder: RunFolder, settings: list[str], url: str | None) -> Config | None:
    """The configuration of a run that was started before, at the addresses of this host; None where nobody started it.

    A command that is repeated as it is (by a container, by a Job) names settings of the first start: the run has those.
    """
    from agentlightning.errors import NotFoundError

    addresses = [one for one in settings if one.partition("=")[0].strip() in ADDRESSES]
    try:
        return own_config(folder, addresses, url)
    except NotFoundError:
        return None


def _given(agent: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """The settings that options of the command line set, by their dotted names."""
    given = {name: value for name, value in options.items() if value is not None}
    if "data.from_run" in given:  # in place of the tasks in the file
        given.setdefault("data.train", None)
    if agent is not None:  # instead of the one in the file, whichever kind that is
        given |= {"agent.run": None, "agent.command": None, agent_setting(agent): agent}
    return given


def _fresh(file: Path | None, given: dict[str, Any], settings: list[str], url: str | None) -> Config:
    """The configuration of a new run, of the file, else of the run of --from-run, and the options given."""
    from agentlightning.config.file import load_config

    from_run, algorithm = given.get("data.from_run"), given.get("algorithm.type")
    if algorithm not in (None, "lightning_rl") and file is None and not from_run:
        raise ConfigError(f"--algorithm {algorithm}: give --from-run RUN to train on, or a file with data.from_run")
    if from_run and file is None:
        given = _settings_of(from_run[0], url) | given
        if not any(name.startswith("model") for name in [*given, *settings]):
            raise ConfigError(
                f"model: is required; run {from_run[0]} has none to take over, or several (it was made of traces, or trains "
                "several policies): give --model"
            )
    return load_config(file, settings, store_setting(url) | given)


def _settings_of(run: str, url: str | None) -> dict[str, Any]:
    """Settings that offline training takes over from the run it learns from."""
    from agentlightning.store.scan import find_run
    from agentlightning.trainer.schedules import inherited

    return inherited(with_store(url, lambda opened: find_run(opened, run)).config)


def agent_setting(agent: str) -> str:
    """The setting of an agent: agent.run for a function (file.py:name, package.module:name), else agent.command."""
    head, separator, name = agent.rpartition(":")
    named = bool(separator) and all(part.isidentifier() for part in name.split("."))
    named = named and (" " not in head or Path(head).is_file())
    # file.py alone is the one function in it that is marked with @rollout; a .pkl is how a function of a notebook travels.
    whole = agent.endswith((".py", ".pkl")) and " " not in agent
    return "agent.run" if named or whole else "agent.command"


def run_and_report(
    config: Config, folder: RunFolder, *, resume: bool = False, name: str = "", console: bool = False
) -> TrainResult:
    """Train under a live display, then say where things are."""
    from agentlightning.trainer.display import Display

    with Display(folder.run_id) as display:
        result = supervised(config, folder, display, resume=resume, name=name, console=console)
    report(display.console, result)
    return result


def supervised(
    config: Config,
    folder: RunFolder,
    display: Display,
    *,
    resume: bool = False,
    name: str = "",
    console: bool = False,
) -> TrainResult:
    """Train with Ctrl-C handled: the first ends after the step that is under way, the second at once."""
    from functools import partial

    from agentlightning.trainer.interrupts import run_interruptible
    from agentlightning.trainer.training import Training

    training = Training(config, folder, display, console=console)
    return run_interruptible(partial(training.run, resume=resume, name=name), training.stop)


def report(console: Console, result: TrainResult) -> None:
    """Prints where the run, its policy and its curve are, if that was drawn."""
    curve = result.folder / "curve.png"
    places = {"run folder": result.folder, "policy": result.policy} | ({"curve": curve} if curve.exists() else {})
    for label, place in places.items():
        console.print(f"{label:<11} {place}", soft_wrap=True)
