"""The console's server: the pages over one store, behind `Access`. It opens the store for itself, and writes nothing but
aliases of models, where somebody moves one."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from agentlightning.errors import ConfigError, MissingExtraError
from agentlightning.store.open import existing_store
from agentlightning.store.server_keys import KEY_VARIABLE, client_key, key_path, load_or_create_key

END_TIMEOUT_S = 3
"""Seconds that open responses get once the console is told to end: browsers hold event streams for as long as they look."""
OFFLINE = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Variables that keep libraries of this process from asking anybody for anything."""
TOKEN_VARIABLE = "AGL_CONSOLE_TOKEN"
"""Variable in which a parent hands down the token of the URL that it prints."""


def token_url(listener: socket.socket, token: str, host: str = "127.0.0.1") -> str:
    """The URL at which the console on this socket opens; with its token, where it has one."""
    address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    return f"{address}/?token={token}" if token else address


def run(
    url: str,
    listener: socket.socket,
    token: str,
    started: Callable[[], None] = lambda: None,
    trusted_proxies: Sequence[str] = (),
) -> None:
    """Serve the store at `url` on a bound socket until SIGTERM or SIGINT; `started` is called when browsers are answered.

    token: opens it, from this machine; '' asks for the key of the server or a reader's token in its place.

    MissingExtraError without the packages of a server, ConfigError where other hosts could connect and there is no key to
    ask them for, else whatever keeps the store from being read.
    """
    os.environ.update(OFFLINE)
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(url, listener, token, started, trusted_proxies))


def asked_key(url: str) -> str:
    """The key that browsers of other hosts are asked for: AGL_SERVER_KEY, else that of the server or store at `url`, made
    where it has none. ConfigError where it cannot be had."""
    remote = url.startswith(("http://", "https://"))
    key = client_key(url) if remote else os.environ.get(KEY_VARIABLE) or load_or_create_key(key_path(url))
    if not key:
        raise ConfigError(
            f"--host: expected an address of this machine, or {KEY_VARIABLE} with a key to ask others for"
        )
    return key


async def _serve(
    url: str, listener: socket.socket, token: str, started: Callable[[], None], trusted_proxies: Sequence[str]
) -> None:
    try:
        import uvicorn

        from agentlightning.console.access import Access, new_sessions
        from agentlightning.console.app import create_app
        from agentlightning.console.playground import Playground, is_installed
        from agentlightning.console.render import Templates
    except ModuleNotFoundError as cause:
        raise MissingExtraError(str(cause.name), "server") from cause
    from agentlightning.console.reader import Reader
    from agentlightning.gateway.access import Authentication

    port = listener.getsockname()[1]
    async with existing_store(url) as store:
        await store.runs(limit=1)  # a wrong key or address is told here, not in a browser
        authentication = None if token else Authentication(store, asked_key(url))
        reader, templates = Reader(store), Templates(is_installed())
        playground = Playground(reader) if is_installed() else None
        try:
            config = uvicorn.Config(
                Access(
                    create_app(reader, templates, playground),
                    templates,
                    authentication,
                    new_sessions(),
                    f"agl_console_{port}",
                    token,
                ),
                access_log=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                proxy_headers=bool(trusted_proxies),  # of https, sessions have Secure cookies
                forwarded_allow_ips=list(trusted_proxies),
                ws="none",
                timeout_graceful_shutdown=END_TIMEOUT_S,
            )
            started()
            await uvicorn.Server(config).serve(sockets=[listener])
        finally:
            if playground is not None:
                await playground.close()
            reader.close()
