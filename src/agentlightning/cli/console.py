"""``agl console``: the runs of a store in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from agentlightning.cli.options import Server, Store, one_store


def console(
    store: Store = None,
    server: Server = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0: a free one.")] = 7860,
) -> None:
    """Show runs, rollouts and tokens in a browser. Reads only; a run is as fast with it as without.

    At an address of this machine everybody on it may read. At any other, browsers are asked for the server's key
    (AGL_SERVER_KEY, else the file beside the store) or a reader's token (agl tokens create --role reader).
    """
    from agentlightning.console.server import run
    from agentlightning.errors import GatewayError
    from agentlightning.runtime.children import hide_memory, keep_files_private, listen
    from agentlightning.store.open import require_file, store_url

    url = store_url(one_store(store, server))
    require_file(url)
    hide_memory()
    keep_files_private()
    try:
        listener = listen(host, port)
    except OSError as cause:
        why = f"port {port} of {host} cannot be used: {cause.strerror}; choose another with --port"
        raise GatewayError(why) from cause
    address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    run(url, listener, lambda: typer.echo(f"console {address}"))
