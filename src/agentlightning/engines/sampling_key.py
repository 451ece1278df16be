"""The key that samplers ask gateways for, as a middleware of their HTTP apps. Knows nothing of where they listen."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from aiohttp import web

SAMPLING_KEY = "sampling_key"
"""Name of the secret that is handed down to samplers."""


def asks_for(key: str, but: Collection[str] = ("/health",)) -> list[Any]:
    """Middlewares that leave all paths to the holder of the key, `but` these to everybody; none where the key is empty."""

    @web.middleware
    async def checked(http: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        if http.path in but or holds(http, key):
            return await handler(http)
        message = "the key for sampling is missing or wrong; engine.key_env names it"
        return web.json_response(
            {"error": {"message": message, "type": "invalid_request_error", "code": 401}}, status=401
        )

    return [checked] if key else []


def holds(http: web.Request, key: str) -> bool:
    """Returns whether the request shows this key."""
    shown = http.headers.get("Authorization", "").encode(errors="surrogateescape")  # the bytes, of whatever they are
    return hmac.compare_digest(shown, f"Bearer {key}".encode())
