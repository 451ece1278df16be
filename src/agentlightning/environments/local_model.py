"""A model on loopback that answers as a function says: what checks and people play environments with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from uuid import uuid4

import orjson
from aiohttp import web

from agentlightning.records import JSON
from agentlightning.runner.agent import LLM
from agentlightning.runner.connection_pool import ConnectionPool

Answer = Callable[[JSON], Awaitable[JSON]]
"""The body of a chat completion's request to the message that answers it."""
MAX_REQUEST_BYTES = 64 << 20


@asynccontextmanager
async def local_models() -> AsyncIterator[Callable[[Answer], LLM]]:
    """Makes models, each with an answer of its own, while the block lasts."""
    answers: list[Answer] = []
    connections = ConnectionPool()

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        message = await answers[int(request.match_info["model"])](body)
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": f"local-{uuid4().hex}", "object": "chat.completion", "created": 0, "model": "local"}
        if body.get("stream"):
            return await _stream(request, answer, choice, usage)
        return web.json_response(answer | {"choices": [choice], "usage": usage})

    app = web.Application(client_max_size=MAX_REQUEST_BYTES)
    app.router.add_post("/{model}/v1/chat/completions", complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]

        def model(answer: Answer) -> LLM:
            answers.append(answer)
            url = f"http://{host}:{port}/{len(answers) - 1}"
            return LLM(
                base_url=f"{url}/v1",
                anthropic_base_url=url,
                api_key="local",
                model="local",
                connections=connections,
            )

        yield model
    finally:
        await connections.async_client().aclose()
        await runner.cleanup()


async def _stream(request: web.Request, answer: JSON, choice: JSON, usage: JSON) -> web.StreamResponse:
    """The whole message as one chunk, then its end."""
    message = choice["message"]
    uses = [{"index": number, **use} for number, use in enumerate(message.get("tool_calls") or [])]
    delta = message | ({"tool_calls": uses} if uses else {})
    chunk = answer | {"object": "chat.completion.chunk"}
    ended = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for part in (
        chunk | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        chunk | {"choices": [ended]},
        chunk | {"choices": [], "usage": usage},
    ):
        await response.write(b"data: " + orjson.dumps(part) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response
