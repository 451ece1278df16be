"""``agl rollouts replay``: a rollout call by call."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from agentlightning.cli.options import Json, Store, print_json, with_store


def replay(
    rollout: Annotated[str, typer.Argument(metavar="ROLLOUT", help="Id of the rollout.")],
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="This attempt; the latest by default.")
    ] = None,
    as_json: Json = False,
    store: Store = None,
) -> None:
    """Replay a rollout call by call, with tools and rewards: left and right in a terminal; all of it where it is piped."""
    from agentlightning.analysis.replay import play, print_replay, read_replay
    from agentlightning.trainer.display import screen

    found = with_store(store, lambda opened: read_replay(opened, rollout, attempt))
    if as_json:
        print_json(found)
        return
    console = screen()
    if console.is_terminal and sys.stdin.isatty():
        play(console, found, typer.getchar)
    else:
        print_replay(console, found)
