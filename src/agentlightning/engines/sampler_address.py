"""The address at which gateways reach the samplers that an engine starts, and the key that samplers ask them for: anybody
who reaches a sampler without one samples past every limit and record."""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

from agentlightning.config.engine import EngineConfig
from agentlightning.errors import AgentLightningError, ConfigError, InputError
from agentlightning.runtime.children import listen
from agentlightning.store.server_keys import is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerAddress:
    host: str = "127.0.0.1"
    port: int = 0
    """Of the first sampler, those of others follow; 0: free ones."""
    advertise: Sequence[str] = ()
    """Base URLs for gateways, of all samplers; none: those at which they listen."""
    key_env: str | None = None
    """Variable of the environment with the key."""
    key: str = field(default="", repr=False)
    """Empty: samplers ask for none."""

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        """The address of these settings. ConfigError if others would reach it without a key, or the key is not set."""
        host, _, port = (config.listen or "127.0.0.1:0").rpartition(":")
        host = host.strip("[]")
        if host in ("0.0.0.0", "::") and not config.advertise:
            raise ConfigError(
                f"engine.listen: expected the address by which gateways reach this machine, got {host}; or give that as "
                "engine.advertise"
            )
        if config.key_env is None and (config.advertise or not is_loopback(host)):
            raise ConfigError(
                f"engine.key_env is needed with listen = {config.listen!r}, since others reach it: name the variable of the "
                "environment, here and at the server, that holds a key"
            )
        samplers = config.sampler.count
        if config.advertise and len(config.advertise) != samplers:
            raise ConfigError(
                f"engine.advertise: expected a URL for each of {samplers} samplers, got {len(config.advertise)}"
            )
        key = os.environ.get(config.key_env or "", "").strip()
        if config.key_env is not None and not key:
            raise ConfigError(
                f"engine.key_env: the environment variable {config.key_env} is not set; it holds the key that samplers ask "
                "gateways for"
            )
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(
                f"engine.key_env: the key in {config.key_env} has characters that no HTTP header carries; expected ASCII"
            )
        return cls(host=host, port=int(port), advertise=config.advertise, key_env=config.key_env, key=key)

    def listen(self, number: int = 0) -> socket.socket:
        """The socket of a sampler, on which it can be started again. ConfigError if this machine does not have it."""
        port = self.port + number if self.port else 0
        try:
            return listen(self.host, port)
        except (OSError, OverflowError) as cause:
            raise ConfigError(
                f"engine.listen: sampler {number} cannot listen at {self.host}:{port}: {cause}; expected an address of this "
                "machine and a port that is free"
            ) from cause

    def url(self, listener: socket.socket) -> str:
        """Base URL of the sampler on this socket, for this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{listener.getsockname()[1]}"

    @property
    def headers(self) -> dict[str, str]:
        """Of requests to samplers."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


SAMPLING_KEY = "sampling_key"
"""Name of the secret that is handed down to samplers."""


def asks_for(key: str, but: Collection[str] = ("/health",)) -> list[Any]:
    """Middlewares that leave all paths to the holder of the key, `but` these to everybody; none where the key is empty."""

    @web.middleware
    async def checked(http: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        if http.path in but or holds(http, key):
            return await handler(http)
        return refusal(401, InputError("the key for sampling is missing or wrong; engine.key_env names it"))

    return [checked] if key else []


def holds(http: web.Request, key: str) -> bool:
    """Returns whether the request shows this key."""
    shown = http.headers.get("Authorization", "").encode(errors="surrogateescape")  # the bytes, of whatever they are
    return hmac.compare_digest(shown, f"Bearer {key}".encode())


def refusal(status: int, error: AgentLightningError) -> web.Response:
    return web.json_response(refusal_body(status, error), status=status)


def refusal_body(status: int, error: AgentLightningError) -> dict[str, Any]:
    """The body of an error, in the form of vLLM's."""
    kind = "invalid_request_error" if status < 500 else "internal_error"
    return {"error": {"message": str(error), "type": kind, "code": status}}
