"""Tokens: ids in, ids and log-probabilities out, for agents that own their tokens. JSON <-> CompletionRequest, Completion,
Delta. Pure.

Driven by the gateway at ``POST /v1/tokens/generate``. No template, no parsing, no text: what is sampled comes back as it is.
The route is ours, so a field that it does not know is refused rather than passed over.
"""

from __future__ import annotations

from typing import Annotated

import orjson
from msgspec import Meta, Struct

from agentlightning.protocols import chat, completions, fields
from agentlightning.protocols.base import (
    SSE_DONE,
    ApiError,
    Choice,
    Completion,
    CompletionRequest,
    Delta,
    EventStream,
    sse_event,
)
from agentlightning.records import JSON

NAME = "tokens"

Ids = Annotated[
    list[fields.TokenId], Meta(min_length=1, description=f"a list of token ids from 0 to {2**31 - 1}, not empty")
]


class TokensRequest(fields.IdsRequest, kw_only=True):
    prompt_ids: Ids
    max_tokens: fields.Positive = None


class ScoringRequest(Struct):
    """The body of ``POST /v1/tokens/logprobs``."""

    token_ids: Ids
    model: fields.Text = None


FIELDS = frozenset(
    {
        "model", "prompt_ids", "n", "max_tokens", "stop", "stop_token_ids", "seed", "stream", "prompt_logprobs",
        "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "logit_bias", "structured_outputs", *fields.ENGINE_PARAMS,
    }
)  # fmt: skip


def parse(data: JSON, trained: bool = True) -> CompletionRequest:
    """The request in a body. Raises ApiError; external models have no such route."""
    if not trained:
        raise fields.refused("model", "external models take no token ids; name the policy that is trained")
    check_known(data, FIELDS)
    asked = fields.read(TokensRequest, data)
    return CompletionRequest(
        model=asked.model or "",
        messages=[],
        prompt=asked.prompt_ids,
        max_tokens=asked.max_tokens,
        stop=fields.stops(asked.stop),
        n=asked.n or 1,
        seed=asked.seed,
        logprobs=True,
        stream=bool(asked.stream),
        forced=fields.forced(data),
        unsupported=fields.unsupported(data, fields.ENGINE_PARAMS),
        grammar=fields.combined({}, fields.structured_outputs(data)),
        logits=fields.logits(asked),
        **{**fields.token_options(asked), "return_token_ids": True},
    )


def check_known(data: JSON, names: frozenset[str]) -> None:
    """Refuses fields that the route does not know."""
    for name in data.keys() - names:
        raise ApiError(f"{name}: not known; known are {', '.join(sorted(names))}", param=name)


def body(request: CompletionRequest, completion: Completion) -> bytes:
    told: JSON = {
        **_frame("tokens", completion.call_id, completion.model, completion.created_s),
        "choices": [_choice(index, choice) for index, choice in enumerate(completion.choices)],
        "usage": chat.usage(completion),
    }
    if request.prompt_logprobs is not None:
        told["prompt_logprobs"] = completion.prompt_logprobs
    return orjson.dumps(told)


def logprobs_body(model: str, logprobs: list[float | None]) -> bytes:
    """The response of ``POST /v1/tokens/logprobs``."""
    return orjson.dumps({"object": "tokens.logprobs", "model": model, "logprobs": logprobs})


def stream(request: CompletionRequest, call_id: str, model: str, created_s: int, prompt_tokens: int) -> EventStream:
    return _TokenEvents(_frame("tokens.chunk", call_id, model, created_s))


error = chat.error
reader = completions.reader


class _TokenEvents:
    def __init__(self, frame: JSON) -> None:
        self._frame = frame

    def first(self) -> bytes:
        """Returns nothing: the protocol has no opening event."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        if not delta.token_ids:
            return b""
        logprobs = [one.logprob for one in delta.logprobs or ()]
        return self._event({"index": index, "token_ids": delta.token_ids, "logprobs": logprobs, "finish_reason": None})

    def last(self, completion: Completion) -> bytes:
        ends = [
            self._event(
                {"index": index, "token_ids": [], "logprobs": [], "finish_reason": one.finish_reason, "stop": one.stop}
            )
            for index, one in enumerate(completion.choices)
        ]
        used = sse_event({**self._frame, "choices": [], "usage": chat.usage(completion)})
        return b"".join([*ends, used, SSE_DONE])

    def failed(self, refusal: ApiError) -> bytes:
        return b"data: " + error(refusal) + b"\n\n"

    def _event(self, choice: JSON) -> bytes:
        return sse_event({**self._frame, "choices": [choice]})


def _frame(kind: str, call_id: str, model: str, created_s: int) -> JSON:
    return {"id": f"tok-{call_id}", "object": kind, "created": created_s, "model": model}


def _choice(index: int, choice: Choice) -> JSON:
    return {
        "index": index,
        "token_ids": choice.token_ids,
        "logprobs": [one.logprob for one in choice.logprobs or ()],
        "finish_reason": choice.finish_reason,
        "stop": choice.stop,
    }
