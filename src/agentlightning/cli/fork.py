"""``agl rollouts fork``: rollouts that continue a recorded one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentlightning.cli.options import Json, Store, print_json, with_store
from agentlightning.errors import InputError

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore
    from agentlightning.types import Rollout, Run


def fork_rollout(
    rollout: Annotated[str, typer.Argument(help="Id of the finished rollout that they continue.")],
    calls: Annotated[
        int, typer.Option("--calls", min=0, help="Answer so many of its policy's calls from the record; then sample.")
    ],
    count: Annotated[int, typer.Option("--count", min=1, max=1000, help="Make so many.")] = 1,
    answer: Annotated[
        str | None,
        typer.Option(
            "--answer",
            help="Give the next call this in place of a sampled completion: a text, a file with one, or a .json file with "
            "an assistant message.",
        ),
    ] = None,
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Enqueue rollouts that put an agent back into a state in which it was, and print their ids.

    The run's workers execute them, as long as the run goes on: its agent is started anew, and its first calls are answered
    from the record. `agl rollouts show ID` shows what became of one.
    """
    from agentlightning.store.forks import new_forks
    from agentlightning.store.scan import find_run

    given = None if answer is None else read_answer(answer)

    async def work(opened: LightningStore) -> tuple[list[Rollout], Run]:
        made = await opened.enqueue(await new_forks(opened, rollout, calls, count, answer=given))
        return made, await find_run(opened, made[0].run_id)

    made, run = with_store(store, work)
    if as_json:
        print_json({"rollouts": [one.id for one in made], "group_id": made[0].group_id, "run_id": run.id})
        return
    for one in made:
        typer.echo(one.id)
    if run.state == "finished":
        typer.echo(f"run {run.id} is finished: it has no workers any more, and nothing executes them", err=True)
    elif run.state != "running":
        typer.echo(
            f"run {run.id} is {run.state}: they wait until it goes on, by: agl train --resume {run.id}", err=True
        )


def read_answer(given: str) -> str | dict[str, Any]:
    """The answer that --answer names: a text, one in a file, or the message in a file whose name ends with .json.

    >>> read_answer("Oslo.")
    'Oslo.'
    """
    path = Path(given)
    if not os.path.isfile(path):  # Path.is_file() raises where a text is too long for a name
        return given
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as cause:
        raise InputError(f"--answer: {given:.80} cannot be read: {cause}") from cause
    if path.suffix != ".json":
        return text
    from agentlightning.store.forks import read_message

    try:
        return read_message(text)
    except InputError as cause:
        raise InputError(f"--answer: {given}: {cause}") from cause
