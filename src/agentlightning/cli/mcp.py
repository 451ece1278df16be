"""``agl mcp``: a store for assistants, to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentlightning.cli.options import Server, Store, one_store, with_store

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore


def mcp(store: Store = None, server: Server = None) -> None:
    """Serve the store to an assistant over MCP on standard input and output; it can read, and change nothing."""
    from agentlightning.analysis.mcp_server import mcp_server

    async def work(opened: LightningStore) -> None:
        await mcp_server(opened).run_stdio_async()

    with_store(one_store(store, server), work)
