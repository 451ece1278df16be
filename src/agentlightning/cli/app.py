"""The command line: ``agl`` and ``agentlightning`` are the same.

A file of this folder per noun. Each command imports what it needs once it runs, so that ``agl --help`` answers at once;
nothing here decides anything that a caller of the library could not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from agentlightning import __version__
from agentlightning.cli import (
    admin,
    console,
    demo,
    deploy,
    env,
    init,
    models,
    prompts,
    record,
    rewards,
    rollouts,
    runs,
    serve,
    train,
    worker,
)
from agentlightning.errors import AgentLightningError, ConfigError, printable
from agentlightning.runtime.children import leave_orphans_to_parent
from agentlightning.runtime.log_lines import escape_last_resort, replace_unprintable
from agentlightning.runtime.process_secrets import hide_memory, take_key

EXIT_INTERRUPTED = 130

GROUPS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "Start": {
            "demo": demo.demo,
            "init": init.init,
            "check": train.check,
            "train": train.train,
            "eval": train.evaluate,
        },
        "Look": {
            "console": console.console,
            "runs": runs.app,
            "rollouts": rollouts.app,
            "rewards": rewards.app,
        },
        "Use": {
            "models": models.app,
            "serve": serve.serve,
            "env": env.app,
            "optimize": prompts.optimize,
            "prompts": prompts.app,
            "record": record.record,
        },
        "Operate": {
            "worker": worker.worker,
            "deploy": deploy.deploy,
            "store": admin.store_app,
            "tokens": admin.tokens,
        },
    }
)
"""Sections of ``agl --help``, and their commands: a function, or a group of several."""


class GroupedCommands(TyperGroup):
    """Lists the commands of ``agl --help`` by section, and takes the options of all commands at any place."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Moves the options of the key before the command."""
        first, rest = [], [*args]
        end = rest.index("--") if "--" in rest else len(rest)
        for place in reversed(range(end)):
            name, equals, _ = rest[place].partition("=")
            if name in ("--key-file", "--key-fd"):
                first += [rest.pop(place) for _ in range(1 if equals else min(2, len(rest) - place))]
        return super().parse_args(ctx, [*first, *rest])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes a table per section, all columns equally wide."""
        width = max(map(len, self.commands))
        for title, names in GROUPS.items():
            with formatter.section(title):
                limit = formatter.width - width - 6
                rows = [(name.ljust(width), self.commands[name].get_short_help_str(limit)) for name in names]
                formatter.write_dl(rows)


app = typer.Typer(
    name="agl",
    cls=GroupedCommands,
    help="Train the model behind any AI agent without touching the agent.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _commands in GROUPS.values():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name)
        else:
            app.command(_name)(_command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"agentlightning {__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")
    ] = False,
    key_file: Annotated[
        Path | None, typer.Option("--key-file", help="File with a server's key or token, in place of AGL_SERVER_KEY.")
    ] = None,
    key_fd: Annotated[int | None, typer.Option("--key-fd", help="Inherited descriptor to read it from.")] = None,
) -> None:
    """Takes the options that every command has."""
    take_key(key_file, key_fd)
    context.obj = key_file


def main() -> None:
    """Entry point: errors raised on purpose become one sentence and their exit code."""
    hide_memory()
    leave_orphans_to_parent()
    escape_last_resort()
    replace_unprintable()
    try:
        _check_working_directory()
        app()
    except AgentLightningError as error:
        sys.stderr.write(f"error: {printable(str(error))}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    finally:
        _flush_output()


def _check_working_directory() -> None:
    """ConfigError where it has no name that stores, settings and JSON can hold."""
    try:
        os.getcwd().encode()
    except UnicodeEncodeError:
        name = os.fsencode(os.getcwd())
        raise ConfigError(f"working directory: expected a name in UTF-8, got {name!r}; rename it") from None
    except FileNotFoundError:
        raise ConfigError("working directory: it was deleted; change to another one") from None


def _flush_output() -> None:
    """A reader that has gone (``agl … | head``) is no error: what is left for it goes nowhere."""
    try:
        if sys.stdout is not None:  # it was closed before (``>&-``)
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
