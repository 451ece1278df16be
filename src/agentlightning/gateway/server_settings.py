"""ServerSettings: the operator's decisions about a server, from the options of ``agl serve``.

What cannot be used is refused here, before anything listens. Knows no route.
"""

from __future__ import annotations

import argparse
import ipaddress
import math
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agentlightning.errors import ConfigError
from agentlightning.gateway.external_keys import ExternalKeys, external_keys
from agentlightning.gateway.limits import ServerLimits
from agentlightning.runtime.code_loader import load_code
from agentlightning.store.base import LEASE_S

if TYPE_CHECKING:
    from agentlightning.gateway.proxy import MakeClients


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Files in PEM."""

    cert: Path
    """The server's certificate, then those between it and the root."""
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The operator's decisions."""

    limits: ServerLimits = field(default_factory=ServerLimits)
    external_keys: ExternalKeys = field(default_factory=ExternalKeys)
    max_connections: int | None = None
    """None: as many as the process has files for."""
    tls: Tls | None = None
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks whose X-Forwarded-For and X-Forwarded-Proto are believed."""
    metrics_port: int | None = None
    """None: ``/metrics`` is beside the rest, for holders of a key where the server has one."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may use the server, with a key."""
    clients: MakeClients | None = None
    """Makes the part that answers holders of clients' tokens; None: they are refused."""
    lease_s: float = LEASE_S
    """Seconds of the leases that workers ask for: for so long none is given up after nobody could renew."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of the server process, by the names that `agl serve` has for them."""
    limits = ServerLimits()
    add = parser.add_argument
    add(
        "--max-parallel-requests",
        type=int,
        default=limits.max_parallel_requests,
        help="requests of one attempt at a time",
    )
    add("--max-request-bytes", type=int, default=limits.max_request_bytes, help="bytes of these requests together")
    repeated: Any = {"action": "append", "default": []}
    add("--external-key", metavar="VARIABLE=HOST", help="may be sent there; repeatable", **repeated)
    add("--tls-cert", type=Path, help="certificate (PEM)")
    add("--tls-key", type=Path, help="its key (PEM)")
    add("--trusted-proxy", help="address or network of a proxy; repeatable", **repeated)
    add("--metrics-port", type=int, help="port of /metrics, which then wants no key")
    add("--cors-origin", help="https://HOST of web pages; repeatable", **repeated)
    add("--lease-s", type=float, default=LEASE_S, help="seconds of the leases that workers ask for")
    add("--clients", help="module:name of the part that answers holders of clients' tokens")


def read_options(options: argparse.Namespace) -> ServerSettings:
    """The settings in parsed options. Raises ConfigError."""
    for name in ("max_parallel_requests", "max_request_bytes"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: expected a number from 1, got {getattr(options, name)}")
    if not 0 < options.lease_s < math.inf:
        raise ConfigError(f"--lease-s: expected seconds above 0, got {options.lease_s:g}")
    port = options.metrics_port
    if port is not None and (not 1 <= port <= 65535 or (options.fd is None and port == options.port)):
        raise ConfigError(f"--metrics-port: expected a port of its own, 1 to 65535, got {port}")
    return ServerSettings(
        limits=ServerLimits(
            max_parallel_requests=options.max_parallel_requests, max_request_bytes=options.max_request_bytes
        ),
        external_keys=external_keys(options.external_key),
        tls=_tls(options.tls_cert, options.tls_key),
        trusted_proxies=tuple(trusted_network(one) for one in options.trusted_proxy),
        metrics_port=port,
        cors_origins=tuple(_origin(one) for one in options.cors_origin),
        clients=None if options.clients is None else load_code(options.clients, "--clients"),
        lease_s=options.lease_s,
    )


def _tls(cert: Path | None, key: Path | None) -> Tls | None:
    options = {"--tls-cert": cert, "--tls-key": key}
    given = {name: file for name, file in options.items() if file is not None}
    if cert is None or key is None:
        if given:
            raise ConfigError(f"{next(iter(given))}: has no effect without both --tls-cert and --tls-key")
        return None
    for name, file in given.items():
        if not file.is_file():
            raise ConfigError(f"{name}: there is no file {str(file)!r}")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # else a key with a password would ask the terminal
    except OSError as cause:
        raise ConfigError(
            f"--tls-cert, --tls-key: expected a certificate and its key without a password, in PEM: {cause}"
        ) from cause
    return Tls(cert=cert, key=key)


def trusted_network(given: str) -> str:
    """An address or a network, as --trusted-proxy takes it. ConfigError for something else."""
    try:
        return str(ipaddress.ip_network(given)) if "/" in given else str(ipaddress.ip_address(given))
    except ValueError as cause:
        raise ConfigError(f"--trusted-proxy: expected an address or a network such as 10.0.0.0/8: {cause}") from None


def _origin(given: str) -> str:
    parts = urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.hostname or given != f"{parts.scheme}://{parts.netloc}":
        raise ConfigError(f"--cors-origin: expected http(s)://HOST[:PORT] as browsers send it, got {given!r}")
    return given
