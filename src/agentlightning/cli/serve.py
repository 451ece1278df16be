"""``agl serve``: the gateway and the store as a server of their own."""

from __future__ import annotations

from typing import Annotated

import typer

from agentlightning.cli.options import Store, store_url


def serve(
    store: Store = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on.")] = 8088,
) -> None:
    """Serve agents, workers and trainers; with --store http://…, be one gateway more of the server there.

    The key that guards /api (and opens a store of another server) is read from AGL_SERVER_KEY. Without it, --host of an
    address that is reachable from elsewhere makes a key, keeps it and says where.
    """
    from agentlightning.gateway.__main__ import run
    from agentlightning.trainer.checkpoint import make_default_folder

    url = store_url(store)
    make_default_folder(url)
    run(["--store", url, "--host", host, "--port", str(port)])
