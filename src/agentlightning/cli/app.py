"""The command line: ``agl`` and ``agentlightning`` are the same.

A file of this folder per noun or command. Each command imports what it needs once it runs, so that ``agl --help`` answers at
once; nothing here decides anything that a caller of the library could not.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from agentlightning import __version__
from agentlightning.cli import (
    check,
    console,
    demo,
    deploy,
    evaluate,
    mcp,
    models,
    optimize,
    prompts,
    record,
    rewards,
    rollouts,
    runs,
    serve,
    store,
    tokens,
    train,
    worker,
)
from agentlightning.errors import AgentLightningError, printable
from agentlightning.runtime.children import hide_memory
from agentlightning.runtime.log_lines import escape_last_resort

EXIT_INTERRUPTED = 130

GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "First hour": ("demo", "check", "train", "eval", "console"),
        "Data": ("record", "runs", "rollouts", "rewards"),
        "Prompts": ("optimize", "prompts"),
        "Models": ("models", "serve"),
        "Machines": ("worker", "deploy"),
        "Administration": ("store", "tokens", "mcp"),
    }
)
"""Sections of ``agl --help``, and their commands."""


class GroupedCommands(TyperGroup):
    """Lists the commands of ``agl --help`` by section."""

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


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"agentlightning {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")
    ] = False,
) -> None:
    """Takes the options before a command."""


app.command("demo")(demo.demo)
app.command("check")(check.check)
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
app.command("console")(console.console)
app.command("record")(record.record)
app.add_typer(runs.app, name="runs")
app.add_typer(rollouts.app, name="rollouts")
app.add_typer(rewards.app, name="rewards")
app.command("optimize")(optimize.optimize)
app.add_typer(prompts.app, name="prompts")
app.add_typer(models.app, name="models")
app.command("serve")(serve.serve)
app.command("worker")(worker.worker)
app.add_typer(store.app, name="store")
app.add_typer(tokens.app, name="tokens")
app.command("deploy")(deploy.deploy)
app.command("mcp")(mcp.mcp)


def main() -> None:
    """Entry point: errors raised on purpose become one sentence and their exit code."""
    hide_memory()
    escape_last_resort()
    try:
        app()
    except AgentLightningError as error:
        sys.stderr.write(f"error: {printable(str(error))}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
