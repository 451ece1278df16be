"""The command line: ``agl`` and ``agentlightning`` are the same.

Each command is a file of this folder. Modules are imported after parsing, by the command that needs them, so that ``agl
--help`` answers at once; nothing here decides anything that a caller of the library could not.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from agentlightning import __version__
from agentlightning.cli import (
    algorithms,
    check,
    console,
    demo,
    deploy,
    evaluate,
    export,
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
    suggest,
    tiny,
    tokens,
    train,
    worker,
)
from agentlightning.errors import AgentLightningError, printable
from agentlightning.runtime.children import hide_memory
from agentlightning.runtime.log_lines import escape_last_resort

EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="agl",
    help="Train the model behind any AI agent without touching the agent.",
    no_args_is_help=True,
    add_completion=False,
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
    """Takes what goes before a command."""


app.command("demo")(demo.demo)
app.command("tiny")(tiny.tiny)
app.command("train")(train.train)
app.command("algorithms")(algorithms.algorithms)
app.command("optimize")(optimize.optimize)
app.command("check")(check.check)
app.command("record")(record.record)
app.command("eval")(evaluate.evaluate)
app.command("suggest")(suggest.suggest)
app.command("mcp")(mcp.mcp)
app.command("export")(export.export)
app.command("serve")(serve.serve)
app.command("worker")(worker.worker)
app.command("console")(console.console)
app.command("deploy")(deploy.deploy)
app.add_typer(runs.app, name="runs")
app.add_typer(rollouts.app, name="rollouts")
app.add_typer(rewards.app, name="rewards")
app.add_typer(prompts.app, name="prompts")
app.add_typer(models.app, name="models")
app.add_typer(store.app, name="store")
app.add_typer(tokens.app, name="tokens")
app.command("audit")(tokens.show_audit)


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
