"""SamplerApp: the HTTP routes of the sampler process, vLLM's: generate, the reload of weights, models and health.

Driven by sampler.py, which starts it on its socket. A request becomes a SamplingRequest there, and what was sampled of it is
written here. Refuses to know how tokens are drawn.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from agentlightning.engines.local.prompt_scores import Score
from agentlightning.engines.local.sampling_params import CONSTRAINTS
from agentlightning.engines.local.scheduler import SamplingRequest
from agentlightning.engines.sampling_key import asks_for, holds
from agentlightning.errors import AgentLightningError, EngineError, InputError, MissingExtraError, ModelError
from agentlightning.runtime.watchdog import ChildHeartbeat

if TYPE_CHECKING:
    from agentlightning.engines.local.sampler import Sampler

log = logging.getLogger("agentlightning.sampler")

MAX_BODY = 64 << 20
"""Bytes of a request; images come within it."""


def create_app(
    sampler: Sampler,
    heartbeat: ChildHeartbeat | None = None,
    *,
    weights_key: str = "",
    weights_folder: Path | None = None,
    sampling_key: str = "",
) -> web.Application:
    """The HTTP routes. With a sampling key they are its holder's, but for /health; without one everybody's. Weights are
    taken from whoever has the key for them, and from folders in the weights' folder; from nobody where either is missing."""
    routes = _Routes(sampler, heartbeat, weights_key, weights_folder)
    app = web.Application(
        client_max_size=MAX_BODY, middlewares=asks_for(sampling_key, but=("/health", "/collective_rpc"))
    )
    app.router.add_post("/inference/v1/generate", routes.generate)
    app.router.add_post("/collective_rpc", routes.collective_rpc)
    app.router.add_get("/v1/models", routes.models)
    app.router.add_get("/health", routes.health)
    app.cleanup_ctx.append(routes.run)
    return app


class _Routes:
    def __init__(
        self, sampler: Sampler, heartbeat: ChildHeartbeat | None, weights_key: str, weights_folder: Path | None
    ) -> None:
        self._sampler = sampler
        self._heartbeat = heartbeat
        self._weights_key = weights_key
        self._weights_folder = weights_folder

    async def generate(self, http: web.Request) -> web.StreamResponse:
        try:
            body = await http.read()
            if b"content_parts" in body:
                request_id, request = await asyncio.to_thread(self._sampler.parse, body)
            else:
                request_id, request = self._sampler.parse(body)
            if any(name.encode() in body for name in CONSTRAINTS):
                request.constraint = await asyncio.to_thread(self._sampler.constraint, body, request)
        except (InputError, MissingExtraError) as error:
            return _error(400, error)
        event = self._sampler.submit(request)
        try:
            if request.streamed:
                return await _stream(http, request_id, request, event)
            await event.wait()
        finally:
            self._sampler.drop(request)
        if request.finish == "error":
            return _error(_status(request), _not_finite(request))
        return web.Response(body=_answer(request_id, request, 0, request.finish)[0], content_type="application/json")

    async def collective_rpc(self, http: web.Request) -> web.Response:
        if not self._weights_key or not holds(http, self._weights_key):
            return _error(401, InputError("the key for weights is missing or wrong; only the engine has it"))
        try:
            given = orjson.loads(await http.read())
            method, kwargs = given["method"], given.get("kwargs", {})
            folder, version = Path(kwargs["weights_path"]), str(kwargs["weight_version"])
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            return _error(400, InputError("expected method, kwargs.weights_path and kwargs.weight_version"))
        if method != "reload_weights":
            return _error(400, InputError(f"method {method!r} is not known; reload_weights is"))
        if not _lies_in(folder, self._weights_folder):
            return _error(
                400, InputError(f"kwargs.weights_path: expected a folder in {self._weights_folder}, got {folder}")
            )
        try:
            await self._sampler.load(folder, version)
        except ModelError as error:
            return _error(400, error)
        return web.json_response({"results": [None]})

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"object": "model", "max_model_len": self._sampler.context}]}
        )

    async def health(self, _: web.Request) -> web.Response:
        active, waiting = self._sampler.scheduler.counts
        return web.json_response({"version": self._sampler.scheduler.version, "active": active, "waiting": waiting})

    async def run(self, _: web.Application) -> AsyncIterator[None]:
        """The work loop, as long as the app runs."""
        if self._heartbeat is None:
            tasks = [asyncio.create_task(self._sampler.run())]
        else:
            tasks = [
                asyncio.create_task(self._sampler.run(self._heartbeat.progress)),
                asyncio.create_task(self._heartbeat.follow_loop(lambda: self._sampler.idle)),
            ]
        for task in tasks:
            task.add_done_callback(_end_on_failure)
        yield
        for task in tasks:
            task.cancel()


async def _stream(
    http: web.Request, request_id: str, request: SamplingRequest, event: asyncio.Event
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(http)
    sent = 0
    while True:
        await event.wait()
        event.clear()
        finish = request.finish
        if finish == "error":
            body = orjson.dumps(_error_body(_status(request), _not_finite(request)))
        else:
            body, sent = _answer(request_id, request, sent, finish)
        await response.write(b"data: " + body + (b"\n\ndata: [DONE]\n\n" if finish else b"\n\n"))
        if finish:
            await response.write_eof()
            return response


def _answer(request_id: str, request: SamplingRequest, start: int, finish: str | None) -> tuple[bytes, int]:
    """The completion from token `start` on, and where it ends; versions come with the end of the completion.

    A turn may be under way in another thread: it appends a token before its logprob and sets `finish` after both, which is
    why the caller read `finish` first.
    """
    end = len(request.logprobs)
    tokens, logprobs = request.sampled[start:end], request.logprobs[start:end]
    choice: dict[str, Any] = {
        "index": 0,
        "token_ids": tokens,
        "logprobs": {"content": _content(request, start, tokens, logprobs)},
        "finish_reason": finish,
        "stop_reason": request.stop_reason if finish else None,
    }
    if finish:
        ends = [begin for _, begin in request.versions[1:]] + [end]
        choice["weight_versions"] = [
            {"version": version, "start": begin, "end": end}
            for (version, begin), end in zip(request.versions, ends, strict=True)
            if begin < end
        ]
    body: dict[str, Any] = {"request_id": request_id, "choices": [choice]}
    if start == 0 and request.prompt_scores is not None:
        body["prompt_logprobs"] = [None, *map(_score_table, request.prompt_scores)]
    if start == 0 and request.shown_prompt is not None:
        body["prompt_token_ids"] = request.shown_prompt
    return orjson.dumps(body), end


def _score_table(scores: list[Score]) -> dict[str, Any]:
    return {str(token): {"logprob": logprob, "rank": rank} for token, logprob, rank in scores}


def _content(request: SamplingRequest, start: int, tokens: list[int], logprobs: list[float]) -> list[dict[str, Any]]:
    if not request.alternatives:
        return [{"token_id": t, "logprob": p} for t, p in zip(tokens, logprobs, strict=True)]
    return [
        {
            "token_id": token,
            "logprob": logprob,
            "top_logprobs": [{"token_id": other, "logprob": value} for other, value in request.top[at]],
        }
        for at, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), start)
    ]


def _status(request: SamplingRequest) -> int:
    """A grammar that cannot be followed is its sender's, what the model computes is not."""
    return 500 if request.error is None else 400


def _not_finite(request: SamplingRequest) -> EngineError:
    if request.error is not None:
        return EngineError(request.error)
    return EngineError(f"the model's logits are not finite (weights version {request.versions[-1][0]})")


def _lies_in(folder: Path, above: Path | None) -> bool:
    return above is not None and folder.resolve().parent == above.resolve()


def _error(status: int, error: AgentLightningError) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(_error_body(status, error)), content_type="application/json")


def _error_body(status: int, error: AgentLightningError) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "internal_error"
    return {"error": {"message": str(error), "type": kind, "code": status}}


def _end_on_failure(work: asyncio.Task[None]) -> None:
    """A fault in the work loop ends the process: the engine starts it again, and nothing waits for an answer for ever."""
    if not work.cancelled() and work.exception() is not None:
        log.critical("sampling failed", exc_info=work.exception())
        os._exit(1)
