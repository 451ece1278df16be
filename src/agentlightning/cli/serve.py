"""``agl serve``: the gateway and the store as a server of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli.options import Store
from agentlightning.cli.quantities import bytes_of
from agentlightning.store.open import store_url


def serve(
    store: Store = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on.")] = 8088,
    keep_days: Annotated[
        float | None, typer.Option("--keep-days", help="Delete runs that did not change for so many days.")
    ] = None,
    keep_size: Annotated[
        str | None, typer.Option("--keep-size", help="Delete runs until the others hold so much: 10GB.")
    ] = None,
    keep_records_days: Annotated[
        float | None,
        typer.Option("--keep-records-days", help="Delete calls of rollouts learned from so many days ago."),
    ] = None,
    external_keys: Annotated[
        Path | None,
        typer.Option(
            "--external-keys",
            help='TOML file of variables that may be sent, and where: OPENAI_API_KEY = ["api.openai.com"].',
        ),
    ] = None,
    max_parallel_requests: Annotated[
        int | None, typer.Option("--max-parallel-requests", help="Requests of one attempt at a time (256).")
    ] = None,
    max_request_bytes: Annotated[
        str | None, typer.Option("--max-request-bytes", help="Bytes of these requests together: 64MB.")
    ] = None,
    max_connections: Annotated[
        int | None, typer.Option("--max-connections", help="Connections at a time; default: what files allow.")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option("--tls-cert", help="Certificate (PEM): serve https.")] = None,
    tls_key: Annotated[str | None, typer.Option("--tls-key", help="Key of the certificate (PEM).")] = None,
    tls_client_ca: Annotated[
        str | None, typer.Option("--tls-client-ca", help="Roots of client certificates (PEM): /api asks for one.")
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None, typer.Option("--trusted-proxy", help="Address or network whose X-Forwarded-… are believed.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option("--metrics-port", help="Port of /metrics, which then wants no key.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option("--cors-origin", help="https://HOST whose web pages may use the server.")
    ] = None,
) -> None:
    """Serve agents, workers and trainers; with --store http://…, be one gateway more of the server there.

    The key that guards /api (and opens a store of another server) is read from AGL_SERVER_KEY. Without it one is made, kept
    in a file and found by your commands on this machine. What is more than the limits given is
    deleted once an hour, as `agl runs prune` does it.
    """
    from agentlightning.gateway.__main__ import run
    from agentlightning.gateway.external_keys import read_file
    from agentlightning.trainer.checkpoint import make_default_folder

    url = store_url(store)
    make_default_folder(url)
    arguments = ["--store", url, "--host", host, "--port", str(port)]
    given = {
        "--keep-days": keep_days,
        "--keep-bytes": bytes_of(keep_size, "--keep-size"),
        "--keep-record-days": keep_records_days,
        "--max-parallel-requests": max_parallel_requests,
        "--max-request-bytes": bytes_of(max_request_bytes, "--max-request-bytes"),
        "--max-connections": max_connections,
        "--tls-cert": tls_cert,
        "--tls-key": tls_key,
        "--tls-client-ca": tls_client_ca,
        "--metrics-port": metrics_port,
    }
    for name, value in given.items():
        arguments += [] if value is None else [name, str(value)]
    for name, values in {"--trusted-proxy": trusted_proxy, "--cors-origin": cors_origin}.items():
        arguments += [part for value in values or () for part in (name, value)]
    for pair in [] if external_keys is None else read_file(external_keys):
        arguments += ["--external-key", pair]
    run(arguments)
