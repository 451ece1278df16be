"""``agl train``: train from a TOML file, or go on with a run that was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentlightning.cli.options import Runs, Server, Settings, Store, store_setting

if TYPE_CHECKING:
    from rich.console import Console

    from agentlightning.cli.display import Display
    from agentlightning.config import Config
    from agentlightning.trainer.checkpoint import RunFolder
    from agentlightning.trainer.trainer import Result


def train(
    config: Annotated[Path | None, typer.Argument(help="TOML file with the configuration.")] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", help="Go on with this run from its last checkpoint.")
    ] = None,
    agent: Annotated[
        str | None, typer.Option("--agent", help="file.py:name, or a command such as 'node agent.js'.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", help="Training tasks: file, hub:NAME or file.py:name.")
    ] = None,
    val: Annotated[str | None, typer.Option("--val", help="Held-out tasks.")] = None,
    reward: Annotated[str | None, typer.Option("--reward", help="Reward function file.py:name.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Hub name or folder of the model.")] = None,
    settings: Settings = None,
    store: Store = None,
    runs: Runs = Path("runs"),
    server: Server = None,
) -> None:
    """Train the model behind an agent. Ctrl-C ends after the step that is under way and prints the line that resumes."""
    from agentlightning.config import load_config
    from agentlightning.errors import ConfigError
    from agentlightning.trainer.checkpoint import RunFolder
    from agentlightning.trainer.trainer import new_run_id

    options = {"data.train": tasks, "data.val": val, "agent.reward": reward, "model.path": model}
    if agent is not None:
        options["agent.run" if is_function(agent) else "agent.command"] = agent
    given = store_setting(store) | {name: value for name, value in options.items() if value is not None}
    if resume is not None:
        if config is not None or settings or given != store_setting(store):
            raise ConfigError("--resume goes on with the run's own configuration; give no other settings with it")
        folder = RunFolder(runs, resume)
        run_and_report(folder.config(), folder, resume=True, server=server)
        return
    folder = RunFolder(runs, new_run_id())
    run_and_report(load_config(config, settings or [], given), folder, server=server)


def is_function(agent: str) -> bool:
    """``file.py:name`` or ``package.module:name``, as opposed to a command line."""
    head, separator, name = agent.rpartition(":")
    return bool(separator) and name.isidentifier() and " " not in head


def run_and_report(config: Config, folder: RunFolder, *, resume: bool = False, server: str | None = None) -> None:
    """Train under a live display, then say where things are."""
    from agentlightning.cli.display import Display

    with Display(folder.run_id) as display:
        result = supervised(config, folder, display, resume=resume, server=server)
    report(display.console, result)


def supervised(
    config: Config,
    folder: RunFolder,
    display: Display,
    *,
    resume: bool = False,
    server: str | None = None,
    name: str = "",
) -> Result:
    """Train with Ctrl-C handled: the first ends after the step that is under way, the second at once."""
    import asyncio
    import signal

    from agentlightning.trainer.trainer import Trainer

    trainer = Trainer(config.model.path, server=server, progress=display)

    async def work() -> Result:
        task = asyncio.current_task()
        asked = False

        def interrupt() -> None:
            nonlocal asked
            if asked and task is not None:
                task.cancel()
            asked = True
            trainer.stop()
            display.note("ending after this step, with a checkpoint; Ctrl-C again ends at once")

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        return await trainer.run(config, folder, resume=resume, name=name)

    try:
        return asyncio.run(work())
    except asyncio.CancelledError:
        display.note(f"stopped; go on with: {resume_line(folder.path)}")
        raise KeyboardInterrupt from None


def report(console: Console, result: Result) -> None:
    """Where the run, its policy and its curve are; how to go on if it was stopped."""
    for label, value in (
        ("run folder", result.folder),
        ("policy", result.policy),
        ("curve", result.folder / "curve.png"),
    ):
        console.print(f"{label:<11} {value}", highlight=False, soft_wrap=True)
    if not result.finished:
        line = resume_line(result.folder)
        console.print(f"stopped after step {result.step}; go on with: {line}", highlight=False, soft_wrap=True)


def resume_line(folder: Path) -> str:
    """The command that goes on with the run of this folder."""
    runs = "" if folder.parent == Path("runs") else f" --runs {folder.parent}"
    return f"agl train --resume {folder.name}{runs}"
