"""``agl console``: the runs of a store in a browser, or for an assistant to read."""

from __future__ import annotations

from typing import Annotated

import typer

from agentlightning.cli.options import Server, Store, TrustedProxies, TrustRun, one_store, with_store
from agentlightning.errors import ConfigError, GatewayError


def console(
    store: Store = None,
    server: Server = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0: a free one.")] = 7860,
    trusted_proxy: TrustedProxies = None,
    mcp: Annotated[
        bool, typer.Option("--mcp", help="Serve an assistant over MCP on standard input and output instead.")
    ] = False,
    trust_run: TrustRun = False,
) -> None:
    """Show runs, rollouts and tokens in a browser. Reads only; a run is as fast with it as without.

    At an address of this machine the URL that it prints opens it, by a token. At any other, or behind a proxy, browsers
    are asked for the server's key (AGL_SERVER_KEY, else the file beside the store) or a reader's token.
    """
    if mcp:
        _serve_assistant(one_store(store, server), trust_run)
        return
    if trust_run:
        raise ConfigError("--trust-run: expected --mcp with it; the pages import no code of a run")
    import secrets

    from agentlightning.console.server import run, token_url
    from agentlightning.gateway.server_settings import trusted_network
    from agentlightning.runtime.children import keep_files_private, listen
    from agentlightning.store.open import require_file, store_url
    from agentlightning.store.server_keys import is_loopback

    url = store_url(one_store(store, server))
    require_file(url)
    proxies = [trusted_network(one) for one in trusted_proxy or ()]
    keep_files_private()
    try:
        listener = listen(host, port)
    except OSError as cause:
        why = f"port {port} of {host} cannot be used: {cause.strerror}; choose another with --port"
        raise GatewayError(why) from cause
    token = secrets.token_urlsafe(24) if is_loopback(listener.getsockname()[0]) and not proxies else ""
    run(url, listener, token, lambda: typer.echo(f"console {token_url(listener, token, host)}"), proxies)


def _serve_assistant(store: str | None, trust_run: bool) -> None:
    from agentlightning.analysis.mcp_server import mcp_server

    with_store(store, lambda opened: mcp_server(opened, trust_run).run_stdio_async())
