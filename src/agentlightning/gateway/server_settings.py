"""ServerSettings: what the operator of a server decides about it, from the options of ``agl serve``.

Made by the server process, which reads the options, and by AgentLightningServer, which has the defaults. Knows no route.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

from agentlightning.errors import ConfigError
from agentlightning.gateway.limits import ServerLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The operator's decisions."""

    limits: ServerLimits = field(default_factory=ServerLimits)
    max_connections: int | None = None
    """None: as many as the process has files for."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of the server process, by the names that `agl serve` has for them."""
    limits = ServerLimits()
    parser.add_argument(
        "--max-parallel-requests",
        type=int,
        default=limits.max_parallel_requests,
        help="requests of one attempt at a time",
    )
    parser.add_argument(
        "--max-request-bytes", type=int, default=limits.max_request_bytes, help="bytes of these requests together"
    )
    parser.add_argument("--max-connections", type=int, help="connections; default: as many as there are files for")


def read_options(options: argparse.Namespace) -> ServerSettings:
    """The settings in parsed options. Raises ConfigError."""
    for name in ("max_parallel_requests", "max_request_bytes"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: expected a number from 1, got {getattr(options, name)}")
    return ServerSettings(
        limits=ServerLimits(
            max_parallel_requests=options.max_parallel_requests, max_request_bytes=options.max_request_bytes
        ),
        max_connections=options.max_connections,
    )
