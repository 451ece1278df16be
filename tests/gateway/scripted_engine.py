"""An engine double that serves the real token path over HTTP and answers with what a test scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from constrained import constrained

Answers = Callable[[dict[str, Any]], list[int]]


@dataclass
class ScriptedEngine:
    """Answers requests with the ids that `answers` gives for them."""

    answers: Answers
    version: int = 1
    requests: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Given instead of answers, first come, first served."""
    drop: int = 0
    """How many connections to drop before answering."""
    gate: asyncio.Event | None = None
    """Where set: streams wait for it after their first token."""
    hold_whole: bool = False
    """Where set: answers that are not streamed wait for the gate too."""
    raw: str | None = None
    """Where set: sent instead of an answer."""
    die_after: int | None = None
    """Where set: streams break off after so many chunks."""
    chunk: int = 1
    context: int = 1 << 20
    """The model's, as it lists it."""
    logprob: float = -0.5
    """Of every token."""
    tokenizer: Path | None = None
    """Folder of a tokenizer: where set, completions follow the grammar of their request, whatever was scripted."""
    end: int = 2
    """The tokenizer's end token."""
    expand: Callable[[list[int]], list[int]] | None = None
    """Where set: what it makes of a prompt's placeholders of images, told to those who ask for the prompt's ids."""
    url: str = ""
    _runner: web.AppRunner | None = None

    async def start(self, host: str = "127.0.0.1") -> ScriptedEngine:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, 0)
        await site.start()
        self.url = f"http://{host}:{self._runner.addresses[0][1]}"
        return self

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, http: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "max_model_len": self.context}]})

    async def _generate(self, http: web.CompletionRequest) -> web.StreamResponse:
        request = await http.json()
        self.requests.append(request)
        if self.drop:
            self.drop -= 1
            assert http.transport is not None
            http.transport.close()
            return web.Response()
        if self.refusals:
            status, body = self.refusals.pop(0)
            return web.json_response(body, status=status)
        if self.raw is not None:
            return web.Response(text=f"data: {self.raw}\n\n" if request["stream"] else self.raw)
        ids = self.answers(request)
        if self.tokenizer is not None:
            ids = constrained(self.tokenizer, self.end, request, ids)
        limit = request["sampling_params"].get("max_tokens") or 1000
        finish = "stop" if len(ids) <= limit else "length"
        ids = ids[:limit]
        if not request["stream"]:
            if self.hold_whole and self.gate is not None:
                await self.gate.wait()
            return web.json_response(self._shape(request, ids, finish, len(ids)))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        for start in range(0, len(ids), self.chunk):
            end = min(start + self.chunk, len(ids))
            last = end == len(ids)
            await _send(response, self._shape(request, ids[start:end], finish if last else None, len(ids)))
            if self.die_after is not None and end >= self.die_after:
                assert http.transport is not None
                http.transport.close()
                return response
            if self.gate is not None:
                await self.gate.wait()
        if not ids:
            await _send(response, self._shape(request, [], finish, 0))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _shape(self, request: dict[str, Any], ids: list[int], finish: str | None, total: int) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": [{"token_id": index, "logprob": self.logprob} for index in ids]},
            "finish_reason": finish,
            "stop_reason": None,
        }
        if finish is not None:
            choice["weight_versions"] = [{"version": str(self.version), "start": 0, "end": total}]
        body: dict[str, Any] = {"request_id": request["request_id"], "choices": [choice]}
        wanted = request["sampling_params"].get("prompt_logprobs")
        if wanted is not None:
            body["prompt_logprobs"] = [None, *(_scores(index, wanted) for index in request["token_ids"][1:])]
        if self.expand is not None and request.get("return_token_ids"):
            body["prompt_token_ids"] = self.expand(request["token_ids"])
        return body


def _scores(index: int, wanted: int) -> dict[str, Any]:
    """The token itself, at rank 2, and the likeliest ones, ids that follow it."""
    likeliest = {str(index + rank): {"logprob": -0.25 * rank, "rank": rank} for rank in range(1, wanted + 1)}
    return {str(index): {"logprob": -0.5, "rank": 2}, **likeliest}


async def _send(response: web.StreamResponse, data: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(data).encode() + b"\n\n")
