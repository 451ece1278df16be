"""An OpenAI-compatible server that answers from a list, for the examples' agents: real HTTP, real SDK, no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from openai import DefaultAsyncHttpxClient, DefaultHttpxClient


class Server:
    """Runs in the test's own loop, and keeps the requests."""

    def __init__(self, answers: Sequence[dict[str, Any]]) -> None:
        self.requests: list[dict[str, Any]] = []
        self._answers = answers

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.decode().lower().split("\r\n") if "content-length" in line)
        self.requests.append(json.loads(await reader.readexactly(length)))
        message = self._answers[len(self.requests) - 1]
        for call in message.get("tool_calls", []):
            call["id"] = f"c{len(self.requests)}"  # the OpenAI Agents SDK refuses an id that occurred before
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": {"role": "assistant", "content": None} | message, "finish_reason": reason}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "policy", "usage": usage}
        body = json.dumps(answer | {"choices": [choice]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n")
        writer.write(f"content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()
        await writer.wait_closed()


async def run_agent(
    solve: Callable[..., Any], answers: Sequence[dict[str, Any]], task: dict[str, Any]
) -> tuple[Any, list[dict[str, Any]]]:
    """Returns what the agent returns of one rollout against scripted answers, and the requests that it sent."""
    server = Server(answers)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener, DefaultAsyncHttpxClient(trust_env=False) as http_client:
        with DefaultHttpxClient(trust_env=False) as sync_http_client:
            llm = SimpleNamespace(
                base_url=f"http://127.0.0.1:{port}/v1",
                api_key="key",
                model="policy",
                http_client=http_client,
                sync_http_client=sync_http_client,
            )
            return await solve(task, llm), server.requests
