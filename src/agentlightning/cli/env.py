"""``agl env``: environments that exist, by name: what there is, whether its tasks hold, and how it plays."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from agentlightning.cli.options import Json, print_columns, print_json, say

app = typer.Typer(
    no_args_is_help=True, help="Environments that exist, for agl train --env NAME.", rich_markup_mode=None
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="KIND:REST?option=value, or file.py:Class.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the tasks.")]
SHOWN = 3


@app.command("list")
def list_kinds(json: Json = False) -> None:
    """List the kinds of environments, and where each is installed."""
    from agentlightning.environments.packages import kind_rows

    rows = kind_rows()
    if json:
        print_json([row._asdict() for row in rows])
        return
    print_columns([("kind", "example", "package", "installed"), *rows])


@app.command("install")
def install(kind: Annotated[str, typer.Argument(metavar="KIND", help="One of agl env list.")]) -> None:
    """Install the package of a kind into an environment of its own."""
    from agentlightning.environments.packages import install as install_package

    say(str(install_package(kind, say)))


@app.command("show")
def show(name: Name, seed: Seed = 0) -> None:
    """Show what the model is told on a few training tasks."""
    made = _made(name, ["--train", str(SHOWN), "--openings", "--seed", str(seed)])
    for row, messages in zip(made["rows"]["train"], made["openings"], strict=True):
        say(f"task {_short(row)}", style="bold")
        for message in messages:
            say(f"{message['role']:>9}  {message['content']}")


@app.command("check")
def check(
    name: Name,
    limit: Annotated[int, typer.Option("--limit", min=2, help="Tasks of each split to make.")] = 100,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Check that tasks are what they say.

    Held-out ones are no training tasks, they are the same each time, and a number ends them.
    """
    made = _made(name, ["--train", str(limit), "--val", str(limit), "--seed", str(seed), "--episode"])
    if json:
        counts = {split: len(rows) for split, rows in made["rows"].items()}
        print_json({"env": name, "tasks": counts, "warnings": made["warnings"]})
        return
    for split, rows in made["rows"].items():
        say(f"{split}: {len(rows)} tasks, the first {_short(rows[0])}")
    for warning in made["warnings"]:
        say(f"note: {warning}", style="yellow")
    say(f"{name}: can be trained on", style="green")


@app.command("play")
def play(
    name: Name,
    url: Annotated[
        str | None, typer.Option("--url", help="Base URL of a model that plays, ending in /v1. None: you do.")
    ] = None,
    model: Annotated[str, typer.Option("--model", help="Name of that model.")] = "default",
    task: Annotated[int, typer.Option("--task", min=0, help="Number of the training task.")] = 0,
    seed: Seed = 0,
) -> None:
    """Play a task yourself, or watch a model play it."""
    import subprocess

    from agentlightning.environments.base import EnvironmentName
    from agentlightning.environments.packages import interpreter

    parsed = EnvironmentName.parse(name)
    command = [interpreter(parsed.kind), "-m", "agentlightning.environments", str(parsed), "--play", str(task)]
    command += ["--seed", str(seed), *(["--url", url, "--model", model] if url else [])]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def _made(name: str, arguments: list[str]) -> Any:
    import asyncio

    from agentlightning.config.agent import EnvConfig
    from agentlightning.trainer.environments import make_tasks

    return asyncio.run(make_tasks(EnvConfig(name=name), arguments))


def _short(row: Any) -> str:
    import orjson

    text = orjson.dumps(row).decode()
    return text if len(text) <= 100 else f"{text[:97]}..."
