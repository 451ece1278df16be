"""``agl serve``: the gateway and the store as a server of their own."""

from __future__ import annotations

from typing import Annotated

import typer

from agentlightning.cli.options import Store, store_url


def serve(
    store: Store = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on.")] = 8088,
) -> None:
    """Serve agents, workers and trainers. The key that guards /api is read from AGL_SERVER_KEY."""
    from agentlightning.gateway.__main__ import main

    raise SystemExit(main(["--store", store_url(store), "--host", host, "--port", str(port)]))
