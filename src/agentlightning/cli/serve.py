"""``agl serve``: the gateway and the store as a server of their own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from agentlightning.cli.options import Runs, Store, TrustedProxies, bytes_of
from agentlightning.errors import ConfigError
from agentlightning.store.open import store_url

if TYPE_CHECKING:
    from agentlightning.serving.run import ServedModel
    from agentlightning.trainer.supervisor import Supervisor

CLIENTS = "agentlightning.serving.sessions:UserSessions"
"""Answers holders of serving keys in every gateway that is started here: each may be one of a run that serves a model."""

Host = Annotated[str, typer.Option("--host", help="Address to listen on.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on.")]
GatewayCount = Annotated[
    int, typer.Option("--gateways", min=1, help="Gateway processes; several need postgresql:// or redis://.")
]
ExternalKeysFile = Annotated[
    Path | None,
    typer.Option(
        "--external-keys",
        help='TOML file of variables that may be sent, and where: OPENAI_API_KEY = ["api.openai.com"].',
    ),
]
MaxParallelRequests = Annotated[
    int | None, typer.Option("--max-parallel-requests", help="Requests of one attempt at a time (256).")
]
MaxRequestBytes = Annotated[
    str | None, typer.Option("--max-request-bytes", help="Bytes of these requests together: 64MB.")
]
TlsCert = Annotated[str | None, typer.Option("--tls-cert", help="Certificate (PEM): serve https.")]
TlsKey = Annotated[str | None, typer.Option("--tls-key", help="Key of the certificate (PEM).")]
MetricsPort = Annotated[int | None, typer.Option("--metrics-port", help="Port of /metrics, which then wants no key.")]
CorsOrigins = Annotated[
    list[str] | None, typer.Option("--cors-origin", help="https://HOST whose web pages may use the server.")
]
PolicyReference = Annotated[
    str | None, typer.Option("--policy", help="Serve users this registered model: support@production.")
]
ServeFilePath = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file with [serve], [limits], [model], [engine]; with --policy."),
]
ServingRunId = Annotated[str | None, typer.Option("--run", help="Id of the run that serves; with --policy.")]


def serve(
    store: Store = None,
    host: Host = "127.0.0.1",
    port: Port = 8088,
    gateways: GatewayCount = 1,
    external_keys: ExternalKeysFile = None,
    max_parallel_requests: MaxParallelRequests = None,
    max_request_bytes: MaxRequestBytes = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    trusted_proxy: TrustedProxies = None,
    metrics_port: MetricsPort = None,
    cors_origin: CorsOrigins = None,
    policy: PolicyReference = None,
    config: ServeFilePath = None,
    run_id: ServingRunId = None,
    runs: Runs = Path("runs"),
) -> None:
    """Run a server for agents, workers and trainers.

    With --store http://… it is one gateway more of the server there. The key that guards /api (and opens a store of another
    server) is read from AGL_SERVER_KEY. Without it one is made, kept in a file and found by your commands on this machine.
    With --policy users ask a registered model, without a trainer.
    """
    from agentlightning.gateway.__main__ import run
    from agentlightning.gateway.external_keys import read_file
    from agentlightning.trainer.checkpoint import make_default_folder

    url = store_url(store)
    make_default_folder(url)
    serving = _served_model(policy, config, runs, run_id, tls_cert)
    arguments = _words(
        {
            "--max-parallel-requests": max_parallel_requests,
            "--max-request-bytes": bytes_of(max_request_bytes, "--max-request-bytes"),
            "--tls-cert": tls_cert,
            "--tls-key": tls_key,
            "--clients": CLIENTS,
            "--trusted-proxy": trusted_proxy,
            "--cors-origin": cors_origin,
            "--external-key": None if external_keys is None else read_file(external_keys),
        }
    )
    # Each of several has its own port for metrics.
    ports = [None if metrics_port is None else metrics_port + number for number in range(gateways)]
    own = [_words({"--metrics-port": one}) for one in ports]
    if gateways == 1 and serving is None:
        run(["--store", url, "--host", host, "--port", str(port), *arguments, *own[0]])
    else:
        Gateways(url, host, port, arguments, own, serving).serve()


def _served_model(
    policy: str | None, config: Path | None, runs: Path, run_id: str | None, tls_cert: str | None
) -> ServedModel | None:
    """The model of --policy; None without. Raises ConfigError where other options have no effect, or do not go with it."""
    if policy is None:
        if config is not None or run_id is not None:
            raise ConfigError("--config and --run: have no effect without --policy")
        return None
    from agentlightning.serving.run import ServedModel
    from agentlightning.serving.settings import read_serve_file

    file = read_serve_file(config)
    if tls_cert is not None:
        raise ConfigError("--tls-cert: does not go with --policy, whose own requests it would not accept; use a proxy")
    return ServedModel.of(policy, file, runs.resolve(), run_id)


def _words(options: Mapping[str, float | str | Sequence[str] | None]) -> list[str]:
    """The options that are given as words; a list repeats its option."""
    found: list[str] = []
    for name, value in options.items():
        values = [value] if isinstance(value, str | int | float) else value or []
        found += [word for each in values for word in (name, str(each))]
    return found


@dataclass(frozen=True, slots=True)
class Gateways:
    """Several gateway processes on one port, or one with a served model."""

    url: str
    """Of the store."""
    host: str
    port: int
    arguments: Sequence[str]
    """Of every process."""
    own: Sequence[Sequence[str]]
    """Of each."""
    serving: ServedModel | None

    def serve(self) -> None:
        """Keeps the processes running until a signal. ConfigError for wrong options."""
        from agentlightning.gateway.__main__ import server_parser
        from agentlightning.gateway.connection_limit import raise_file_limit
        from agentlightning.gateway.server_settings import read_options
        from agentlightning.runtime.children import keep_files_private

        if len(self.own) > 1 and not self.url.startswith(("postgresql:", "redis")):
            kind = f"{self.url.partition(':')[0]}://"
            raise ConfigError(
                f"--gateways: several need a store that processes share, postgresql:// or redis://; got {kind}"
            )
        keep_files_private()
        raise_file_limit()
        for each in self.own:  # once here, before every process says it
            read_options(server_parser().parse_args(["--port", str(self.port), *self.arguments, *each]))
        asyncio.run(self._until_signal())

    async def _until_signal(self) -> None:
        from agentlightning.gateway import log
        from agentlightning.store.server_keys import KEY_VARIABLE, key_path, load_or_create_key
        from agentlightning.trainer.supervisor import Supervisor

        key = os.environ.get(KEY_VARIABLE) or load_or_create_key(key_path(self.url))
        log.configure(log.log_level(), [key])
        pairs = [value for name, value in itertools.pairwise(self.arguments) if name == "--external-key"]
        variables = {pair.partition("=")[0] for pair in pairs} & os.environ.keys()
        supervisor = Supervisor(None, self.url, key, keys={"server": {name: os.environ[name] for name in variables}})
        with contextlib.ExitStack() as stack:
            work = asyncio.ensure_future(self._work(supervisor, stack))
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, work.cancel)
            try:
                with contextlib.suppress(asyncio.CancelledError):  # told to end
                    await work
            finally:
                await supervisor.stop()

    async def _work(self, supervisor: Supervisor, stack: contextlib.ExitStack) -> None:
        from agentlightning.engines.base import together
        from agentlightning.gateway.__main__ import made_key
        from agentlightning.store.server_keys import KEY_VARIABLE

        address = await supervisor.start_server(self.host, self.port, self.arguments, self.own)
        place = urlsplit(address)
        if not os.environ.get(KEY_VARIABLE):
            host, port = place.hostname or self.host, place.port or self.port
            stack.enter_context(made_key(self.url, place.scheme == "https", host, port))
        model = [] if self.serving is None else [self.serving.run(address, supervisor.server_key, typer.echo)]
        await together([supervisor.watch(), *model])
