"""``agl rollouts fork``: rollouts that continue a recorded one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentlightning.cli.options import (
    Json,
    RunId,
    Runs,
    Settings,
    Store,
    own_config,
    print_json,
    trained_checkpoint,
    with_store,
)
from agentlightning.errors import ConflictError, InputError

if TYPE_CHECKING:
    from agentlightning.records import Rollout, Run
    from agentlightning.store.base import LightningStore


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

    The run's workers execute them, after its end those of `agl rollouts execute`: its agent is started anew, and its first
    calls are answered from the record. `agl rollouts show ID` shows what became of one.
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
        typer.echo(
            f"run {run.id} is finished: they wait until they are executed, by: agl rollouts execute {run.id}", err=True
        )
    elif run.state != "running":
        typer.echo(
            f"run {run.id} is {run.state}: they wait until it goes on, by: agl train --resume {run.id}", err=True
        )


def execute_rollouts(run: RunId, settings: Settings = None, store: Store = None, runs: Runs = Path("runs")) -> None:
    """Execute the rollouts that wait in a finished run, such as forks made since, and print how they ended.

    Its last checkpoint, or the model of a run that trained nothing, is served, and its workers are started, until none
    waits.
    """
    from agentlightning.store.base import RolloutQuery
    from agentlightning.store.scan import find_run
    from agentlightning.trainer.checkpoint import RunFolder, policies_in
    from agentlightning.trainer.display import Display
    from agentlightning.trainer.interrupts import run_interruptible
    from agentlightning.trainer.policies import with_models
    from agentlightning.trainer.serving import execute_waiting, is_training

    folder = RunFolder(runs, run)
    config = own_config(folder, settings or [], store)

    async def waiting(opened: LightningStore) -> tuple[Run, list[Rollout]]:
        query = RolloutQuery(run_id=run, states=["queued", "running"], limit=1)
        return await find_run(opened, run), await opened.rollouts(query)

    found, some = with_store(config.store.url, waiting)
    if found.state != "finished":
        raise ConflictError(
            f"{run}: expected a finished run, this is {found.state}: its own workers execute its rollouts"
        )
    if not some:
        raise ConflictError(f"{run}: no rollout waits; fork one by: agl rollouts fork ROLLOUT --calls N")
    step = 0
    if is_training(found):
        checkpoint = trained_checkpoint(config.store.url, folder)
        config, step = with_models(config, policies_in(Path(checkpoint.path))), checkpoint.step
    with Display(f"execute {run}") as display:
        done = run_interruptible(lambda: execute_waiting(config, folder, display, step))
    for one in done:
        typer.echo(f"{one.id}  {one.state}" + ("" if one.reward is None else f"  reward {one.reward:g}"))


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
