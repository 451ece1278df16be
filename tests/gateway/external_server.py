"""A double of a hosted model: speaks the OpenAI and Anthropic protocols over HTTP and answers with what a test scripted."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

JSON = dict[str, Any]


@dataclass
class Seen:
    """A request as it arrived."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> JSON:
        return dict(json.loads(self.body))


@dataclass
class ExternalServer:
    """Answers every request with `text`, or with a call of the tool `tool` where that is set."""

    text: str = "It is sunny."
    tool: tuple[str, str] | None = None
    """Name and arguments of the tool that is called."""
    requests: list[Seen] = field(default_factory=list)
    refusals: list[web.Response] = field(default_factory=list)
    """Given instead of answers, first come, first served."""
    drop: int = 0
    """How many connections to drop before answering."""
    die_after: int | None = None
    """Where set: streams break off after so many events."""
    gate: asyncio.Event | None = None
    """Where set: answers wait for it, streams after their first two events, which come at once."""
    events: list[bytes] | None = None
    """Where set: sent in place of a stream's events."""
    url: str = ""
    _runner: web.AppRunner | None = None

    async def start(self) -> ExternalServer:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, http: web.CompletionRequest) -> web.StreamResponse:
        seen = Seen(http.path, {name.lower(): value for name, value in http.headers.items()}, await http.read())
        self.requests.append(seen)
        if self.drop:
            self.drop -= 1
            return _break_off(http)
        if self.refusals:
            return self.refusals.pop(0)
        route, request = http.path.removeprefix("/v1/"), seen.json
        if not request.get("stream"):
            if self.gate is not None:
                await self.gate.wait()
            return web.json_response(getattr(self, f"_{route.replace('/', '_')}")(request))
        events = self.events or self._stream(route, request)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        if self.gate is not None:
            await response.write(b"".join(events[:2]))
            await self.gate.wait()
            events = events[2:]
        for number, event in enumerate(events):
            if number == self.die_after:
                return _break_off(http)
            await response.write(event)
        return response

    # --- whole answers ----------------------------------------------------------------------------------------------

    def _chat_completions(self, request: JSON) -> JSON:
        message: JSON = {"role": "assistant", "content": self.text}
        if self.tool is not None:
            function = {"name": self.tool[0], "arguments": self.tool[1]}
            message = {"role": "assistant", "content": None}
            message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
        finish = "stop" if self.tool is None else "tool_calls"
        return {
            "id": "chatcmpl-theirs",
            "object": "chat.completion",
            "created": 1,
            "model": f"{request['model']}-2026",
            "choices": [{"index": 0, "message": message, "finish_reason": finish}],
            "usage": {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18},
        }

    def _completions(self, request: JSON) -> JSON:
        return {
            "id": "cmpl-theirs",
            "object": "text_completion",
            "created": 1,
            "model": request["model"],
            "choices": [{"index": 0, "text": self.text, "logprobs": None, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18},
        }

    def _embeddings(self, request: JSON) -> JSON:
        return {
            "object": "list",
            "model": request["model"],
            "data": [{"object": "embedding", "index": 0, "embedding": [0.25, -0.5]}],
            "usage": {"prompt_tokens": 5, "total_tokens": 5},
        }

    def _responses(self, request: JSON) -> JSON:
        content = [{"type": "output_text", "text": self.text, "annotations": []}]
        item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}
        return {
            "id": "resp_theirs",
            "object": "response",
            "created_at": 1,
            "model": request["model"],
            "status": "completed",
            "error": None,
            "output": [item],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": {
                "input_tokens": 11,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": 7,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": 18,
            },
        }

    def _messages(self, request: JSON) -> JSON:
        block: JSON = {"type": "text", "text": self.text}
        if self.tool is not None:
            block = {"type": "tool_use", "id": "toolu_1", "name": self.tool[0], "input": json.loads(self.tool[1])}
        return {
            "id": "msg_theirs",
            "type": "message",
            "role": "assistant",
            "model": request["model"],
            "content": [block],
            "stop_reason": "end_turn" if self.tool is None else "tool_use",
            "stop_sequence": None,
            "usage": {"input_tokens": 11, "output_tokens": 7},
        }

    # --- streams ----------------------------------------------------------------------------------------------------

    def _stream(self, route: str, request: JSON) -> list[bytes]:
        if route == "chat/completions":
            return self._chat_events(request)
        return self._message_events(request) if route == "messages" else self._response_events(request)

    def _chat_events(self, request: JSON) -> list[bytes]:
        frame = {"id": "chatcmpl-theirs", "object": "chat.completion.chunk", "created": 1, "model": request["model"]}

        def chunk(delta: JSON, finish: str | None = None) -> bytes:
            return sse({**frame, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

        deltas: list[JSON] = [{"content": word} for word in self.text.split(" ")]
        if self.tool is not None:
            name, arguments = self.tool
            half = len(arguments) // 2
            start = {"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": ""}}
            deltas = [{"tool_calls": [start]}]
            deltas += [
                {"tool_calls": [{"index": 0, "function": {"arguments": part}}]}
                for part in (arguments[:half], arguments[half:])
            ]
        events = [chunk({"role": "assistant", "content": None}), *map(chunk, deltas)]
        events.append(chunk({}, "stop" if self.tool is None else "tool_calls"))
        if (request.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
            events.append(sse({**frame, "choices": [], "usage": usage}))
        return [*events, b"data: [DONE]\n\n"]

    def _message_events(self, request: JSON) -> list[bytes]:
        whole = self._messages(request)
        block = whole["content"][0]
        empty = {"type": "text", "text": ""} if self.tool is None else {**block, "input": {}}
        delta: JSON = {"type": "text_delta", "text": self.text}
        if self.tool is not None:
            delta = {"type": "input_json_delta", "partial_json": self.tool[1]}
        start = {**whole, "content": [], "stop_reason": None, "usage": {"input_tokens": 11, "output_tokens": 1}}
        end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        events: list[JSON] = [
            {"type": "message_start", "message": start},
            {"type": "content_block_start", "index": 0, "content_block": empty},
            {"type": "content_block_delta", "index": 0, "delta": delta},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": end, "usage": {"output_tokens": 7}},
            {"type": "message_stop"},
        ]
        return [sse(event, event["type"]) for event in events]

    def _response_events(self, request: JSON) -> list[bytes]:
        whole = self._responses(request)
        item = whole["output"][0]
        at = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        empty = {**whole, "status": "in_progress", "output": [], "usage": None}
        events: list[JSON] = [
            {"type": "response.created", "response": empty},
            {"type": "response.output_item.added", "output_index": 0, "item": {**item, "content": []}},
            {"type": "response.content_part.added", **at, "part": {**item["content"][0], "text": ""}},
            {"type": "response.output_text.delta", **at, "delta": self.text, "logprobs": []},
            {"type": "response.output_text.done", **at, "text": self.text, "logprobs": []},
            {"type": "response.content_part.done", **at, "part": item["content"][0]},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {"type": "response.completed", "response": whole},
        ]
        return [sse({**event, "sequence_number": number}, event["type"]) for number, event in enumerate(events)]


def sse(data: JSON, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json.dumps(data).encode() + b"\n\n"


def _break_off(http: web.CompletionRequest) -> web.Response:
    assert http.transport is not None
    http.transport.abort()
    return web.Response()
