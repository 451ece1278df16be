"""OpenAI Completions, the older protocol of raw prompts: JSON <-> Request, Answer, Delta; and outside answers. Pure.

Driven by the gateway. A prompt is a text or token ids and reaches the model as it is, without a template; the answer is
text, in which neither reasoning nor tool calls are looked for. One prompt a request. Without `max_tokens` the rollout's
limit holds (OpenAI's would be 16). Text offsets of logprobs count from the start of the answer.
"""

from __future__ import annotations

from typing import Any

import orjson

from agentlightning.protocols import chat, fields, sse
from agentlightning.protocols.fields import ENGINE_KNOBS, Knob, expected
from agentlightning.protocols.neutral import Answer, Delta, EventStream, Refusal, Request, TokenLogprob
from agentlightning.types import JSON

NAME = "completions"

KNOBS: dict[str, Knob] = {
    **ENGINE_KNOBS,
    "suffix": Knob(str, ("",)),
    "response_format": Knob(dict, ({"type": "text"},)),
}
"""Fields that ask for another prompt or another distribution than the trained policy's own."""

MOST_ALTERNATIVES = 5
LARGEST_TOKEN = 2**31 - 1


def parse(data: JSON, trained: bool = True) -> Request:
    """The request in a body. Raises Refusal, naming the field and what was expected."""
    if not trained:
        return Request(
            model=fields.text(data, "model"),
            messages=[fields.user_message(data, "prompt")],
            stream=fields.boolean(data, "stream"),
            include_usage=_asks_usage(data.get("stream_options")),
        )
    fields.check_kind(data, "user", str)
    if fields.boolean(data, "echo"):
        raise Refusal("echo: true is not supported; the answer never repeats the prompt", param="echo")
    count = fields.whole(data, "n", 1, fields.MOST_CHOICES) or 1
    alternatives = fields.whole(data, "logprobs", 0, MOST_ALTERNATIVES)
    stream = fields.boolean(data, "stream")
    return Request(
        model=fields.text(data, "model"),
        messages=[],
        prompt=_prompt(data.get("prompt")),
        max_tokens=fields.whole(data, "max_tokens", 1),
        stop=fields.stops(data),
        n=count,
        seed=fields.whole(data, "seed", -fields.LARGEST - 1),
        logprobs=alternatives is not None,
        top_logprobs=alternatives or 0,
        stream=stream,
        include_usage=chat.include_usage(data, stream),
        forced=fields.forced(data),
        unsupported={**fields.unsupported(data, KNOBS), **_best_of(data, count)},
    )


def body(request: Request, answer: Answer) -> bytes:
    """The whole response of a call that is not streamed."""
    choices = [
        {
            "index": index,
            "text": choice.content or "",
            "logprobs": _logprobs(choice.logprobs, 0),
            "finish_reason": choice.finish_reason,
        }
        for index, choice in enumerate(answer.choices)
    ]
    head = _frame(answer.call_id, answer.model, answer.created_s)
    return orjson.dumps({**head, "choices": choices, "usage": chat.usage(answer)})


def stream(request: Request, call_id: str, model: str, created_s: int, prompt_tokens: int) -> EventStream:
    """The events of a streamed response."""
    return _Events(request, _frame(call_id, model, created_s))


def error(refusal: Refusal) -> bytes:
    """An error in the protocol's own shape."""
    return chat.error(refusal)


def reader() -> Reader:
    """For one answer of an outside model that speaks this protocol."""
    return Reader()


class Reader:
    """What an outside model answered (its first choice), whole or in chunks."""

    def __init__(self) -> None:
        self.message: JSON = {"role": "assistant", "content": ""}
        self.finish_reason = "stop"
        self.prompt_tokens = 0
        self.sampled_tokens = 0

    def whole(self, body: JSON) -> None:
        """Take in a complete response."""
        self.event(body)

    def event(self, data: JSON) -> None:
        """Take in the data of one event of a stream."""
        self.prompt_tokens, self.sampled_tokens = chat.read_usage(data, self.prompt_tokens, self.sampled_tokens)
        choice = chat.first_choice(data)
        if isinstance(text := choice.get("text"), str):
            self.message["content"] += text
        if isinstance(reason := choice.get("finish_reason"), str):
            self.finish_reason = reason


# --- parsing ------------------------------------------------------------------------------------------------------------


def _asks_usage(options: Any) -> bool:
    return isinstance(options, dict) and options.get("include_usage") is True


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise Refusal(
                f"prompt: expected one prompt a request, got {len(value)}; send a request for each",
                param="prompt",
                code="unsupported_value",
            )
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(fields.is_kind(one, int) for one in value):
        if not 0 <= min(value) <= max(value) <= LARGEST_TOKEN:
            raise Refusal(f"prompt: expected token ids from 0 to {LARGEST_TOKEN}", param="prompt")
        return value
    raise expected("a string or a list of token ids, not empty", value, "prompt")


def _best_of(data: JSON, count: int) -> JSON:
    """How many are to be sampled for the best `count`, where that is more."""
    among = fields.whole(data, "best_of", 1, fields.MOST_CHOICES)
    if among is None or among == count:
        return {}
    if among < count:
        raise expected(f"at least n, which is {count}", among, "best_of")
    return {"best_of": among}


# --- building -----------------------------------------------------------------------------------------------------------


class _Events:
    """The chunks of a streamed response; the protocol has no opening one."""

    def __init__(self, request: Request, frame: JSON) -> None:
        self._usage = request.include_usage
        self._frame = {**frame, "usage": None} if self._usage else frame
        self._offsets = [0] * request.n
        """Characters of each choice whose logprobs have been sent."""

    def first(self) -> bytes:
        """Nothing."""
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        """More of choice `index`."""
        if not delta.content and not delta.logprobs:
            return b""
        logprobs = _logprobs(delta.logprobs or None, self._offsets[index])
        self._offsets[index] += sum(len(one.text) for one in delta.logprobs or ())
        return self._chunk(index, delta.content, None, logprobs)

    def last(self, answer: Answer) -> bytes:
        """The finish reasons, the usage where asked for, and the end mark."""
        parts = [self._chunk(index, "", choice.finish_reason) for index, choice in enumerate(answer.choices)]
        if self._usage:
            parts.append(sse.event({**self._frame, "choices": [], "usage": chat.usage(answer)}))
        parts.append(sse.DONE)
        return b"".join(parts)

    def failed(self, refusal: Refusal) -> bytes:
        """Ends a stream that cannot go on; SDKs raise the error that it carries."""
        return chat.failure(refusal)

    def _chunk(self, index: int, text: str, finish_reason: str | None, logprobs: JSON | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return sse.event({**self._frame, "choices": [choice]})


def _frame(call_id: str, model: str, created_s: int) -> JSON:
    return {"id": f"cmpl-{call_id}", "object": "text_completion", "created": created_s, "model": model}


def _logprobs(tokens: tuple[TokenLogprob, ...] | None, offset: int) -> JSON | None:
    if tokens is None:
        return None
    offsets: list[int] = []
    for one in tokens:
        offsets.append(offset)
        offset += len(one.text)
    return {
        "tokens": [one.text for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [_alternatives(one) for one in tokens],
        "text_offset": offsets,
    }


def _alternatives(token: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens and the one that was sampled; of several with the same text the likeliest counts."""
    result: dict[str, float] = {}
    for text, logprob in (*token.top, (token.text, token.logprob)):
        result[text] = max(logprob, result.get(text, logprob))
    return result
