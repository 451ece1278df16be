"""The server process: ``python -m agentlightning.gateway [--store URL] (--fd N | --host H --port P)``.

Started by a supervisor, which hands down a listening socket (``--fd``) and secrets, or by a person, whose environment has
them. It is the sole owner of a memory or SQLite store; over a store at ``http://…``, which another server owns, it is one
gateway of several. AGL_SERVER_KEY guards ``/api`` and opens such a store; without one a key is made, and found by this
user's commands on this machine (store/server_keys.py). SIGTERM and SIGINT end it once the calls in flight are answered.
"""

from __future__ import annotations

if __name__ == "__main__":
    from agentlightning.runtime.process_secrets import hide_memory

    hide_memory()  # before anything else is imported

import argparse
import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from agentlightning.errors import AgentLightningError, ConfigError, GatewayError, printable
from agentlightning.gateway import log
from agentlightning.gateway.app import App
from agentlightning.gateway.connection_limit import raise_file_limit
from agentlightning.gateway.server_settings import ServerSettings, add_options, read_options
from agentlightning.gateway.uvicorn_server import UvicornServer
from agentlightning.runtime.children import end_with_parent, keep_files_private, keep_freed_memory, listen
from agentlightning.runtime.process_secrets import add_key_options, take_key
from agentlightning.runtime.watchdog import ChildHeartbeat, beat_to_parent
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.open import open_store
from agentlightning.store.server_keys import (
    KEY_VARIABLE,
    ServerLock,
    is_loopback,
    key_path,
    load_or_create_key,
    published,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code."""
    try:
        run(arguments)
    except AgentLightningError as error:
        sys.stderr.write(f"{printable(str(error))}\n")
        return error.exit_code
    return 0


def run(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError, GatewayError or StoreError where it cannot."""
    options = server_parser().parse_args(arguments)
    keep_files_private()
    keep_freed_memory()
    take_key(options.key_file, options.key_fd)
    if options.fd is not None:
        os.environ.update(end_with_parent())  # of this process, which starts no other
    store_url = options.store or os.environ.get("AGL_STORE")
    if not store_url:
        raise ConfigError("--store: is required, as an argument or as AGL_STORE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # prompts are encoded one at a time
    level = log.log_level()
    given = os.environ.get(KEY_VARIABLE) or None
    log.configure(level, [given] if given else [])
    raise_file_limit()
    settings = read_options(options)  # before anybody is kept waiting by a server that ends at once
    fd, host = options.fd, options.host
    listener = _listen(host, options.port, "--port") if fd is None else socket.socket(fileno=fd)
    serve(store_url, listener, given, settings, beat_to_parent())


def serve(
    store_url: str,
    listener: socket.socket,
    given_key: str | None,
    settings: ServerSettings | None = None,
    heartbeat: ChildHeartbeat | None = None,
) -> None:
    """Serve on a bound socket until a signal. `given_key` guards /api and opens a store of another server; without it a key
    is made, and the store's found if it is of this machine."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)  # uvicorn raises it again once it has stopped; the store must still be closed then

    async def serving() -> None:
        beating = None if heartbeat is None else asyncio.create_task(heartbeat.follow_loop())
        try:
            await _serve(store_url, listener, given_key, settings or ServerSettings())
        finally:
            if beating is not None:
                beating.cancel()

    if sys.platform == "win32":
        asyncio.run(serving())
    else:
        import uvloop

        uvloop.run(serving())


def _end(number: int, frame: object) -> None:
    raise SystemExit(0)


async def _serve(
    store_url: str,
    listener: socket.socket,
    given_key: str | None,
    settings: ServerSettings,
) -> None:
    with ServerLock(store_url) as lock, contextlib.ExitStack() as stack:
        async with open_store(store_url, given_key) as store:
            if isinstance(
                store, LightningStoreClient
            ):  # it must be there and accept the key before anybody relies on it
                await store.signing_secret()
            address, port = listener.getsockname()[:2]
            server_key = given_key or stack.enter_context(made_key(store_url, settings.tls is not None, address, port))
            sockets = [listener]
            if settings.metrics_port is not None:
                try:
                    host = metrics_host(store_url, str(address))
                except OSError as cause:
                    raise GatewayError(f"--metrics-port: the store's host cannot be reached: {cause}") from cause
                sockets.append(_listen(host, settings.metrics_port, "--metrics-port"))
            app = App(store, server_key, settings=settings, on_stop=lock.ending)
            # Calls leave hardly any cycles of garbage: looks for them, of 5 ms each, took a tenth of a call's time.
            gc.collect()
            gc.freeze()
            gc.set_threshold(5_000, 20, 100)
            logging.getLogger("agentlightning.gateway").info("serving on %s port %s", address, port)
            await UvicornServer(app, settings=settings).serve(sockets=sockets)


@contextlib.contextmanager
def made_key(store_url: str, tls: bool, address: str, port: int) -> Iterator[str]:
    """The key of a server that was given none, which this user's commands find as long as it serves."""
    path = key_path(store_url)
    key = load_or_create_key(path)
    log.configure(log.log_level(), [key])
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    host = f"[{here}]" if ":" in here else here
    url = f"{'https' if tls else 'http'}://{host}:{port}"
    with published(address, port, path):
        finding = f"your commands on this machine find it by themselves (--store {url}), others take it"
        sys.stderr.write(
            f"/api wants the key in {path}: {finding if is_loopback(here) else 'take it'} as {KEY_VARIABLE}\n"
        )
        yield key


def metrics_host(store_url: str, address: str) -> str:
    """The address of the port of /metrics, which wants no key: the server's own; of a server at all addresses, the one from
    which it reaches its store on another machine. Agents that have a network of their own do not reach it."""
    store = urlsplit(store_url).hostname or ""
    if address not in ("0.0.0.0", "::") or not store or is_loopback(store):
        return address
    family, kind, protocol, _, place = socket.getaddrinfo(store, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)  # sends nothing: the kernel chooses the route
        return str(probe.getsockname()[0])


def _listen(host: str, port: int, option: str) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as cause:
        why = "is in use" if cause.errno == errno.EADDRINUSE else f"cannot be had: {cause.strerror or cause}"
        raise GatewayError(f"port {port} of {host} {why}; choose another with {option}") from cause


def server_parser() -> argparse.ArgumentParser:
    """The parser of the server process's arguments."""
    parser = argparse.ArgumentParser(prog="python -m agentlightning.gateway", description="Serve agents and workers.")
    # A URL with a password comes by the environment: everybody on the machine sees arguments.
    parser.add_argument("--store", help="URL of the store; default: AGL_STORE")
    parser.add_argument("--fd", type=int, help="a listening socket handed down by the parent, instead of host and port")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8765)
    add_key_options(parser)
    add_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
