"""A server that answers chat completions and notes what came with each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class CallsNoted:
    """The headers of every call, in the order they came; `script` holds tool calls that answers make first."""

    url: str = ""
    client: Any = None
    synchronous: Any = None
    """HTTP clients that are closed when the test ends, for SDKs that would leave theirs to the garbage collector."""
    headers: list[Mapping[str, str]] = field(default_factory=list)
    script: list[dict[str, str]] = field(default_factory=list)

    @property
    def agents(self) -> list[str | None]:
        return [headers.get("x-agl-agent") for headers in self.headers]

    def answer(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "two"}
        if self.script:
            call = {"id": "call_1", "type": "function", "function": self.script.pop(0)}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }


@asynccontextmanager
async def serve() -> AsyncIterator[CallsNoted]:
    noted = CallsNoted()

    async def chat(request: web.Request) -> web.Response:
        await request.read()
        noted.headers.append(request.headers.copy())
        return web.json_response(noted.answer())

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    noted.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield noted
    await runner.cleanup()
