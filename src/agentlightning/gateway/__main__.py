"""The server process: ``python -m agentlightning.gateway --store URL (--fd N | --host H --port P)``.

Started by a supervisor, which hands down a listening socket (``--fd``), or by a person. It is the sole owner of a memory or
SQLite store. The environment's AGL_SERVER_KEY guards ``/api``; without one it listens on loopback only.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

import uvicorn

from agentlightning.children import end_with_parent, listen
from agentlightning.errors import AgentLightningError, ConfigError, GatewayError
from agentlightning.gateway.app import App, create_app
from agentlightning.store.open import open_store

LOOPBACK = ("127.", "::1", "localhost")

GRACE_S = 20
"""Seconds that answers in flight have to finish at shutdown."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    try:
        if options.fd is not None:
            end_with_parent()
        serve(options.store, _listener(options), os.environ.get("AGL_SERVER_KEY") or None)
    except AgentLightningError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def serve(store_url: str, listener: socket.socket, server_key: str | None) -> None:
    """Serve on a bound socket until a signal. Raises ConfigError beyond loopback without a key."""
    host = str(listener.getsockname()[0])
    if server_key is None and not host.startswith(LOOPBACK):
        raise ConfigError(
            f"AGL_SERVER_KEY: expected a key in the environment, because {host} is reachable from elsewhere"
        )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)  # uvicorn raises it again once it has stopped; the store must still be closed then
    uvicorn_run = _serve(store_url, listener, server_key)
    if sys.platform == "win32":
        asyncio.run(uvicorn_run)
    else:
        import uvloop

        uvloop.run(uvicorn_run)


def _end(number: int, frame: object) -> None:
    raise SystemExit(0)


class _Server(uvicorn.Server):
    """Tells the application before it waits for the requests in flight."""

    def __init__(self, config: uvicorn.Config, app: App) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.stop()
        await super().shutdown(sockets)


async def _serve(store_url: str, listener: socket.socket, server_key: str | None) -> None:
    async with open_store(store_url) as store:
        app = create_app(store, server_key)
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            access_log=False,
            log_level="warning",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=GRACE_S,
            backlog=4096,
        )
        await _Server(config, app).serve(sockets=[listener])


def _listener(options: argparse.Namespace) -> socket.socket:
    if options.fd is not None:
        return socket.socket(fileno=options.fd)
    if not options.host.startswith(LOOPBACK) and not os.environ.get("AGL_SERVER_KEY"):
        raise ConfigError(
            f"AGL_SERVER_KEY: expected a key in the environment, because {options.host} is reachable from elsewhere"
        )
    try:
        return listen(options.host, options.port)
    except OSError as cause:
        why = "is in use" if cause.errno == errno.EADDRINUSE else f"cannot be had: {cause.strerror or cause}"
        raise GatewayError(f"port {options.port} of {options.host} {why}; choose another with --port") from cause


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m agentlightning.gateway", description="Serve agents and workers.")
    parser.add_argument("--store", required=True, help="memory://, sqlite:///path")
    parser.add_argument("--fd", type=int, help="a listening socket handed down by the parent, instead of host and port")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8765)
    return parser


if __name__ == "__main__":
    sys.exit(main())
