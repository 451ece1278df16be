"""A model server that plays a script, for the demo's agents: real HTTP, real SDK, no model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from openai import DefaultAioHttpClient


@dataclass
class ScriptedModel:
    """What an agent gets as its `llm`; answers with the next text of the script."""

    model: str = "policy"
    base_url: str = ""
    api_key: str = "sk-test"
    http_client: Any = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    script: Iterator[str] = field(default_factory=lambda: iter(()))
    finish_reason: str = "stop"

    def play(self, *texts: str, finish_reason: str = "stop") -> None:
        self.script, self.finish_reason = iter(texts), finish_reason
        self.requests.clear()

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        message = {"role": "assistant", "content": next(self.script)}
        choice = {"index": 0, "message": message, "finish_reason": self.finish_reason}
        return web.json_response(
            {"id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": self.model, "choices": [choice]}
        )


@pytest.fixture
async def llm() -> AsyncIterator[ScriptedModel]:
    model = ScriptedModel()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", model.answer)
    async with TestServer(app) as server, DefaultAioHttpClient() as client:
        model.base_url, model.http_client = str(server.make_url("/v1")), client
        yield model
