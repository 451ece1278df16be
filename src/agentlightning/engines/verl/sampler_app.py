"""SamplerApp: the token path over verl's rollout servers, as one endpoint.

    POST /inference/v1/generate   token ids in; ids, log-probabilities and weight versions out
    GET  /v1/models, /health

driver.py serves it. verl's servers give whole completions, so that a streamed answer is one event. A call that an update of
the weights stopped goes on over the new ones from where it was.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any, Protocol

import orjson
from aiohttp import web

from agentlightning.engines.sampler_address import asks_for, refusal
from agentlightning.errors import EngineError, InputError

MAX_BODY = 64 << 20
PASSED_ON = frozenset({"temperature", "top_p", "stop", "stop_token_ids", "ignore_eos"})
READ = frozenset({*PASSED_ON, "max_tokens", "logprobs", "n", "prompt_logprobs"})
ABORTED = ("aborted", "abort")


class Client(Protocol):
    """verl's LLMServerClient, as far as it is used."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        """Samples one completion; the session's requests meet the same server."""


Score = Callable[[list[int]], Awaitable[list[list[float]]]]
"""Log-probabilities of a prompt's tokens but the first, by each server."""


def create_app(
    client: Client,
    *,
    context: int,
    end_ids: Collection[int],
    on_error: Callable[[Exception], None],
    sampling_key: str = "",
    score: Score | None = None,
) -> web.Application:
    """The HTTP routes, with a sampling key all but /health its holder's. on_error gets what a server raised."""
    routes = _Routes(client, context, frozenset(end_ids), on_error, score)
    app = web.Application(client_max_size=MAX_BODY, middlewares=asks_for(sampling_key))
    app.router.add_post("/inference/v1/generate", routes.generate)
    app.router.add_get("/v1/models", routes.models)
    app.router.add_get("/health", routes.health)
    return app


class _Routes:
    def __init__(
        self,
        client: Client,
        context: int,
        end_ids: frozenset[int],
        on_error: Callable[[Exception], None],
        score: Score | None,
    ) -> None:
        self._client = client
        self._context = context
        self._end_ids = end_ids
        self._on_error = on_error
        self._score = score

    async def generate(self, http: web.Request) -> web.Response:
        try:
            request = orjson.loads(await http.read())
            prompt, params, limit = self._read(request)
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            return refusal(400, InputError("expected token_ids and sampling_params"))
        except InputError as error:
            return refusal(400, error)
        try:
            answer = await self._sample(str(request.get("request_id") or ""), prompt, params, limit)
            scores: dict[str, Any] = {}
            if self._score is not None and request["sampling_params"].get("prompt_logprobs") is not None:
                tables = [_prompt_table(prompt, found) for found in await self._score(prompt)]
                scores = {"prompt_logprobs": tables[0], "prompt_logprobs_by_server": tables}
        except Exception as error:
            self._on_error(error)
            return refusal(503, EngineError(f"the rollout server failed: {type(error).__name__}"))
        body = orjson.dumps({"request_id": request.get("request_id"), "choices": [answer], **scores})
        if request.get("stream"):
            return web.Response(body=b"data: " + body + b"\n\ndata: [DONE]\n\n", content_type="text/event-stream")
        return web.Response(body=body, content_type="application/json")

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"object": "model", "max_model_len": self._context}]})

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    def _read(self, request: dict[str, Any]) -> tuple[list[int], dict[str, Any], int]:
        """The prompt, verl's sampling parameters, and the most tokens."""
        prompt, given = list(request["token_ids"]), dict(request["sampling_params"])
        for name, value in given.items():
            if name not in READ and value not in (None, [], {}):
                raise InputError(f"sampling_params.{name} is not known to the verl engine")
        if given.get("n", 1) not in (1, None) or (given.get("logprobs") or 0) > 1:
            raise InputError("sampling_params.logprobs and n are served up to 1 by the verl engine")
        if given.get("prompt_logprobs"):
            raise InputError("sampling_params.prompt_logprobs is served as 0 by the verl engine: without alternatives")
        room = self._context - len(prompt)
        if room < 1:
            raise InputError(
                f"token_ids has {len(prompt)} ids; the model's context has {self._context}, one for an answer"
            )
        params = {name: given[name] for name in PASSED_ON if given.get(name) not in (None, [])}
        limit = given.get("max_tokens")
        if limit is not None and not (type(limit) is int and limit >= 1):
            raise InputError(f"sampling_params.max_tokens is {limit!r}; expected a whole number of at least 1")
        return prompt, {"temperature": 1.0, **params, "logprobs": True}, min(room, limit or room)

    async def _sample(self, session: str, prompt: list[int], params: dict[str, Any], limit: int) -> dict[str, Any]:
        """A choice in vLLM's form, of as many pieces as updates of the weights cut it into."""
        ids: list[int] = []
        logprobs: list[float] = []
        spans: list[dict[str, Any]] = []
        while True:
            piece = {**params, "max_tokens": limit - len(ids)}
            output = await self._client.generate(session, prompt_ids=prompt + ids, sampling_params=piece)
            found = list(output.token_ids)
            if found:
                version = str(output.extra_fields.get("global_steps"))
                if spans and spans[-1]["version"] == version:
                    spans[-1]["end"] += len(found)
                else:
                    spans.append({"version": version, "start": len(ids), "end": len(ids) + len(found)})
            ids += found
            logprobs += output.log_probs or []
            if output.stop_reason not in ABORTED or len(ids) >= limit:
                break
        ended = bool(ids) and ids[-1] in {*self._end_ids, *params.get("stop_token_ids", ())}
        return {
            "index": 0,
            "token_ids": ids,
            "logprobs": {
                "content": [{"token_id": one, "logprob": value} for one, value in zip(ids, logprobs, strict=True)]
            },
            "finish_reason": "length" if len(ids) >= limit and not ended else "stop",
            "stop_reason": None,
            "weight_versions": spans,
        }


def _prompt_table(prompt: list[int], scores: list[float]) -> list[dict[str, Any] | None]:
    """In vLLM's form: nothing for the first token."""
    return [None, *({str(token): {"logprob": one}} for token, one in zip(prompt[1:], scores, strict=True))]
