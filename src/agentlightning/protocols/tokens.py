"""Tokens: ids in, ids and log-probabilities out, for agents that own their tokens. JSON <-> CompletionRequest, Completion,
Delta. Pure.

Driven by the gateway at ``POST /v1/tokens/generate``. No template, no parsing, no text: what is sampled comes back as it is.
The route is ours, so a field that it does not know is refused rather than passed over.
"""

from __future__ import annotations

import orjson

from agentlightning.protocols import completions, decoding, fields, openai_shapes, sse
from agentlightning.protocols.base import ApiError, Choice, Completion, CompletionRequest, Delta, EventStream
from agentlightning.protocols.fields import ENGINE_PARAMS, expected
from agentlightning.records import JSON

NAME = "tokens"

FIELDS = frozenset(
    {
        "model", "prompt_ids", "n", "max_tokens", "stop", "stop_token_ids", "seed", "stream", "prompt_logprobs",
        "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "logit_bias", "structured_outputs", *ENGINE_PARAMS,
    }
)  # fmt: skip


def parse(data: JSON, trained: bool = True) -> CompletionRequest:
    """The request in a body. Raises ApiError; external models have no such route."""
    model = fields.text(data, "model")
    if not trained:
        raise fields.refused("model", "external models take no token ids; name the policy that is trained")
    for name in data.keys() - FIELDS:
        raise ApiError(f"{name}: not known; known are {', '.join(sorted(FIELDS))}", param=name)
    stream = fields.boolean(data, "stream")
    return CompletionRequest(
        model=model,
        messages=[],
        prompt=token_ids(data, "prompt_ids"),
        max_tokens=fields.whole(data, "max_tokens", 1),
        stop=fields.stops(data),
        stop_ids=fields.stop_token_ids(data),
        n=fields.whole(data, "n", 1, fields.MAX_CHOICES) or 1,
        seed=fields.whole(data, "seed", -fields.MAX_INTEGER - 1),
        logprobs=True,
        stream=stream,
        forced=fields.forced(data),
        unsupported=fields.unsupported(data, ENGINE_PARAMS),
        grammar=decoding.combined({}, decoding.structured_outputs(data)),
        logits=decoding.logits(data),
        **{**fields.token_options(data, stream), "return_token_ids": True},
    )


def token_ids(data: JSON, name: str) -> list[int]:
    """A list of token ids that is not empty."""
    ids = fields.items(data, name)
    if not ids or not all(fields.is_kind(one, int) and 0 <= one <= completions.MAX_TOKEN_ID for one in ids):
        raise expected(f"a list of token ids from 0 to {completions.MAX_TOKEN_ID}, not empty", data.get(name), name)
    return ids


def body(request: CompletionRequest, completion: Completion) -> bytes:
    told: JSON = {
        **_frame("tokens", completion.call_id, completion.model, completion.created_s),
        "choices": [_choice(index, choice) for index, choice in enumerate(completion.choices)],
        "usage": openai_shapes.usage(completion),
    }
    if request.prompt_logprobs is not None:
        told["prompt_logprobs"] = completion.prompt_logprobs
    return orjson.dumps(told)


def logprobs_body(model: str, logprobs: list[float | None]) -> bytes:
    """The response of ``POST /v1/tokens/logprobs``."""
    return orjson.dumps({"object": "tokens.logprobs", "model": model, "logprobs": logprobs})


def stream(request: CompletionRequest, call_id: str, model: str, created_s: int, prompt_tokens: int) -> EventStream:
    return _TokenEvents(_frame("tokens.chunk", call_id, model, created_s))


error = openai_shapes.error
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
        used = sse.event({**self._frame, "choices": [], "usage": openai_shapes.usage(completion)})
        return b"".join([*ends, used, sse.DONE])

    def failed(self, refusal: ApiError) -> bytes:
        return b"data: " + error(refusal) + b"\n\n"

    def _event(self, choice: JSON) -> bytes:
        return sse.event({**self._frame, "choices": [choice]})


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
