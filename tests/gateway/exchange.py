"""One ASGI exchange whose client can be made to hang up, as uvicorn would report it; and a store that holds commits back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from agentlightning.records import Call
from agentlightning.store.base import LightningStore


class Exchange:
    """A request under way, with an attempt's key, and what was answered so far."""

    def __init__(
        self, app: Any, key: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        headers = {"authorization": f"Bearer {key}", **(headers or {})}
        self._body = json.dumps(body).encode()
        self._asked = False
        self._gone = asyncio.Event()
        self.status: int | None = None
        self.sent = b""
        self.started = asyncio.Event()
        self.watched = asyncio.Event()
        """Somebody waits for the client to disconnect."""
        scope = {
            "type": "http",
            "method": "POST",
            "path": path.partition("?")[0],
            "query_string": path.partition("?")[2].encode(),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    def hang_up(self) -> None:
        """The client disconnects."""
        self._gone.set()

    async def done(self) -> bytes:
        """All that was sent."""
        await self.task
        return self.sent

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        self.watched.set()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif not self._gone.is_set():
            self.sent += message.get("body", b"")
            self.started.set()


class PassingStore:
    """Passes every verb on to another store."""

    def __init__(self, store: LightningStore) -> None:
        self.store = store

    def __getattr__(self, verb: str) -> Any:
        return getattr(self.store, verb)


class HeldStore(PassingStore):
    """Commits of calls wait until a test lets them."""

    def __init__(self, store: LightningStore) -> None:
        super().__init__(store)
        self.asked = asyncio.Event()
        self.allowed = asyncio.Event()

    async def append_calls(self, calls: Sequence[Call]) -> None:
        self.asked.set()
        await self.allowed.wait()
        await self.store.append_calls(calls)
