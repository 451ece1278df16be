"""``agl worker``: run agents for a server, on this machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli.options import Runs
from agentlightning.errors import ConfigError


def worker(
    context: typer.Context,
    agent: Annotated[str, typer.Argument(help="file.py:name, or a command such as 'node agent.js'.")],
    server: Annotated[str, typer.Option("--server", help="URL of the server (a token for workers in AGL_SERVER_KEY).")],
    run: Annotated[str, typer.Option("--run", help="Id of the run to work for.")],
    reward: Annotated[
        list[str] | None, typer.Option("--reward", help="Reward function file.py:name. May be repeated.")
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", "-n", min=1, help="Rollouts at a time here.")] = 32,
    drain_timeout: Annotated[
        float, typer.Option("--drain-timeout", min=0, help="Seconds for running agents once it is told to end.")
    ] = 30.0,
    agent_user: Annotated[
        int | None,
        typer.Option("--agent-user", metavar="UID", help="Run a command agent as this user; as root, or alike."),
    ] = None,
    runs: Runs = Path("runs"),
) -> None:
    """Run the agent on the rollouts of a run, until Ctrl-C or SIGTERM.

    An agent in a sandbox does not see --runs.

    It then claims nothing more, and ends with its last agent or after --drain-timeout: what still runs is queued again. A
    second Ctrl-C ends its agents at once.
    """
    import asyncio
    from urllib.parse import urlsplit

    from agentlightning.cli.train import agent_setting
    from agentlightning.runner.__main__ import main
    from agentlightning.store.server_keys import KEY_VARIABLE, find_key

    if urlsplit(server).scheme not in ("http", "https") or not urlsplit(server).hostname:
        raise ConfigError(f"--server: expected http://HOST:PORT or https://…, got {server!r}")
    if not os.environ.get(KEY_VARIABLE) and (key := find_key(server)) is not None:
        os.environ[KEY_VARIABLE] = asyncio.run(_own_token(server, key, run))
    arguments = ["--server", server, "--run", run, "--concurrency", str(concurrency)]
    arguments += ["--drain-timeout-s", str(drain_timeout), "--hidden", str(runs.resolve())]
    arguments += [] if context.obj is None else ["--hidden", str(context.obj)]
    arguments += [] if agent_user is None else ["--agent-user", str(agent_user)]
    arguments += ["--agent" if agent_setting(agent) == "agent.run" else "--command", agent]
    arguments += [word for spec in reward or [] for word in ("--reward", spec)]
    raise SystemExit(main([*arguments, "--worker-id", f"{socket.gethostname()}-{os.getpid()}"]))


async def _own_token(server: str, key: str, run: str) -> str:
    """The secret of a new token for this worker, made with the key of a server of this machine, which agents must not get.

    It ends with the run, or when it is revoked: those of workers that have ended are, here.
    """
    from agentlightning.store.client import LightningStoreClient

    prefix = f"agl worker on {socket.gethostname()[:64]}, process "
    async with LightningStoreClient(server, key) as store:
        for token in await store.tokens(run):
            pid = token.name.removeprefix(prefix)
            if token.revoked_ns is None and pid != token.name and pid.isdecimal() and _gone(int(pid)):
                await store.revoke_token(token.id)
        return (await store.create_token(f"{prefix}{os.getpid()}", "worker", run)).secret


def _gone(pid: int) -> bool:
    """True where no process has this id, or this one, which has made no token yet."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return pid == os.getpid()
