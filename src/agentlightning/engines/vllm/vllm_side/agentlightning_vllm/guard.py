"""WeightsGuard: an ASGI middleware that leaves sampling to everybody, or to the holders of its key, and all else, weights
first, to the engine.

vLLM's own --api-key covers /v1 and /inference and leaves its development routes open, by which anybody could reload weights.
Calls wait until the server's first weights are published: none is sampled from those that it merely started with.
"""

from __future__ import annotations

import asyncio
import hmac
from typing import Any, ClassVar

GENERATE = "/inference/v1/generate"
OPEN = {("POST", GENERATE), ("GET", "/health"), ("GET", "/v1/models"), ("GET", "/metrics")}
REFUSED = b'{"error": {"message": "the key is missing or wrong: engine.key_env names the one for sampling"}}'


class WeightsGuard:
    key: ClassVar[str] = ""
    """Set once by the process's main function, since vLLM makes the middleware; without one nobody gets in."""
    sampling_key: ClassVar[str] = ""
    """Asked for by all else but /health; empty: by nobody."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._published = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif (scope.get("method"), scope["path"]) in OPEN and self._may_sample(scope):
            if scope["path"] == GENERATE:
                await self._published.wait()
            await self._app(scope, receive, send)
        elif self._has_key(scope):
            await self._app(scope, receive, send)
            if scope["path"] == "/resume":  # the last request of a publication
                self._published.set()
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSED})

    def _may_sample(self, scope: Any) -> bool:
        return not self.sampling_key or scope["path"] == "/health" or _holds(scope, self.sampling_key)

    def _has_key(self, scope: Any) -> bool:
        return bool(self.key) and _holds(scope, self.key)


def _holds(scope: Any, key: str) -> bool:
    given = dict(scope["headers"]).get(b"authorization", b"")
    return hmac.compare_digest(given, b"Bearer " + key.encode())
