"""OpenAI Completions, the older protocol of raw prompts: JSON <-> CompletionRequest, Completion, Delta; and external
responses. Pure.

Driven by the gateway. A prompt is a text or token ids and reaches the model as it is, without a template; the completion is
text, in which neither reasoning nor tool calls are looked for. Without `max_tokens` a completion has 16 tokens, as OpenAI's.
Text offsets of logprobs count from the start of the choice's text.
"""

from __future__ import annotations

import codecs
import math
from typing import Any

import orjson

from agentlightning.protocols import chat, fields
from agentlightning.protocols.base import (
    ApiError,
    Completion,
    CompletionReader,
    CompletionRequest,
    Delta,
    EventStream,
    TokenLogprob,
)
from agentlightning.protocols.chat import shown
from agentlightning.protocols.fields import expected
from agentlightning.records import JSON

NAME = "completions"

UNSUPPORTED_PARAMS = {**fields.ENGINE_PARAMS, "suffix": ("",)}
"""Fields that ask for another prompt or another distribution than the trained policy's own."""

DEFAULT_MAX_TOKENS = 16
"""Tokens of a completion where the request says nothing, as with OpenAI's API and vLLM."""
MAX_TOKEN_ID = 2**31 - 1

NO_PROMPT = "Either prompt or prompt_embeds must be provided and non-empty."
"""Beginning of the refusal of an empty prompt, in vLLM's words."""


class CompletionsRequest(fields.IdsRequest, kw_only=True):
    max_tokens: fields.Whole = None
    logprobs: fields.Alternatives = None
    best_of: fields.Choices = None


def parse(data: JSON, trained: bool = True) -> CompletionRequest:
    if not trained:
        given = fields.read(fields.ExternalRequest, {**data, "tools": None})
        options = data.get("stream_options")
        return CompletionRequest(
            model=given.model or "",
            messages=[fields.user_message(data, "prompt")],
            stream=bool(given.stream),
            include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        )
    asked = fields.read(CompletionsRequest, data)
    if asked.max_tokens == 0 and not asked.echo:
        raise expected("a whole number of at least 1", 0, "max_tokens")
    usage = chat.usage_options(asked)
    return CompletionRequest(
        model=asked.model or "",
        messages=[],
        prompt=_prompt(data.get("prompt")),
        repeats_prompt=bool(asked.echo),
        max_tokens=DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens,
        stop=fields.stops(asked.stop),
        include_stop=bool(asked.include_stop_str_in_output),
        n=asked.n or 1,
        seed=asked.seed,
        logprobs=asked.logprobs is not None,
        top_logprobs=asked.logprobs or 0,
        **fields.token_options(asked),
        stream=bool(asked.stream),
        include_usage=bool(usage.include_usage),
        continuous_usage=bool(usage.include_usage and usage.continuous_usage_stats),
        forced=fields.forced(data),
        refused=fields.engine_refused(data),
        not_applied=fields.not_applied(data, fields.NOT_APPLIED),
        unsupported={**fields.unsupported(data, UNSUPPORTED_PARAMS), **_best_of(asked)},
        grammar=fields.combined({}, fields.content(asked.response_format), fields.structured_outputs(data)),
        logits=fields.logits(asked),
    )


def body(request: CompletionRequest, completion: Completion) -> bytes:
    ids = {"prompt_token_ids": completion.prompt_ids if request.return_token_ids else None}
    choices = [
        {
            "index": index,
            "text": choice.content or "",
            "logprobs": _logprobs(request, choice.logprobs, _TextOffsets()),
            "finish_reason": choice.finish_reason,
            **ids,
            "token_ids": choice.token_ids if request.return_token_ids else None,
            "prompt_logprobs": completion.prompt_logprobs,
        }
        for index, choice in enumerate(completion.choices)
    ]
    head = _frame(completion.call_id, completion.model, completion.created_s)
    return orjson.dumps({**head, "choices": choices, "usage": chat.usage(completion)})


def stream(request: CompletionRequest, call_id: str, model: str, created_s: int, prompt_tokens: int) -> EventStream:
    return _TextCompletionEvents(request, _frame(call_id, model, created_s), prompt_tokens)


error = chat.error


class TextCompletionReader(CompletionReader):
    """The first choice of an external model's response, whole or in chunks."""

    def __init__(self) -> None:
        super().__init__("")

    def whole(self, body: JSON) -> None:
        self.event(body)

    def event(self, data: JSON) -> None:
        self.read_usage(data)
        self.count_choices(data, "text")
        choice = chat.first_choice(data)
        self.add_text("content", choice.get("text"))
        if isinstance(reason := choice.get("finish_reason"), str):
            self.finish_reason = reason


reader = TextCompletionReader


# --- parsing ------------------------------------------------------------------------------------------------------------


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and any(type(one) is float for one in value):
        value = [fields.whole(one) for one in value]
    if isinstance(value, list) and value and all(type(one) is int for one in value):
        if not 0 <= min(value) <= max(value) <= MAX_TOKEN_ID:
            raise ApiError(f"prompt: expected token ids from 0 to {MAX_TOKEN_ID}", param="prompt")
        return value
    refusal = expected("one prompt: a text or a list of token ids, not empty", value, "prompt")
    raise refusal if value else ApiError(f"{NO_PROMPT} {refusal.message}", param="prompt")


def _best_of(asked: CompletionsRequest) -> JSON:
    """The number of samples from which the best `n` are to be chosen, where it is more."""
    count = asked.n or 1
    if asked.best_of is None or asked.best_of == count:
        return {}
    if asked.best_of < count:
        raise expected(f"at least n, which is {count}", asked.best_of, "best_of")
    return {"best_of": asked.best_of}


# --- building -----------------------------------------------------------------------------------------------------------


class _TextCompletionEvents(chat.ChunkStream):
    def __init__(self, request: CompletionRequest, frame: JSON, prompt_tokens: int) -> None:
        super().__init__(request, frame, prompt_tokens)
        self._unsaid = set(range(request.n))
        """Choices whose first chunk, with the prompt's ids, is still to come."""
        self._offsets = [_TextOffsets() for _ in range(request.n)]

    def first(self) -> bytes:
        """Returns nothing: the protocol has no opening event."""
        return b""

    def parts(self, index: int, delta: Delta) -> list[JSON]:
        """One part; the last has lists as well where ids are asked for, be they empty."""
        if not (delta.content or delta.logprobs or delta.token_ids or delta.last):
            return []
        listed = delta.logprobs or (
            () if delta.last and self._request.return_token_ids and self._request.logprobs else None
        )
        logprobs = _logprobs(self._request, listed, self._offsets[index])
        return [{"text": delta.content, **self._ids(index, delta.token_ids), "logprobs": logprobs}]

    def _ids(self, index: int, ids: tuple[int, ...]) -> JSON:
        if not self._request.return_token_ids:
            return {}
        first = index in self._unsaid
        self._unsaid.discard(index)
        return {"prompt_token_ids": self._request.planned_ids if first else None, "token_ids": ids}


def _frame(call_id: str, model: str, created_s: int) -> JSON:
    """The fields that a response and each of its chunks begin with."""
    return {"id": f"cmpl-{call_id}", "object": "text_completion", "created": created_s, "model": model}


class _TextOffsets:
    """The places of tokens in the text of a choice. Tokens that are parts of one character are at the place of that."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def next(self, token: TokenLogprob) -> int:
        """The place of the token that comes next."""
        at = self._at
        self._at += len(self._decoder.decode(token.utf8))
        return at


def _logprobs(request: CompletionRequest, given: tuple[TokenLogprob, ...] | None, offsets: _TextOffsets) -> JSON | None:
    if given is None:
        return None
    tokens = shown(request, given)
    return {
        "tokens": [one.text for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [_alternatives(one) for one in tokens],
        "text_offset": [offsets.next(one) for one in tokens],
    }


def _alternatives(token: TokenLogprob) -> dict[str, float] | None:
    """The likeliest tokens and the one that was sampled; of several with the same text the likeliest counts. None for the
    first token of a prompt, which follows nothing."""
    if math.isnan(token.logprob):
        return None
    result: dict[str, float] = {}
    for one in (*token.top, token):
        result[one.text] = max(one.logprob, result.get(one.text, one.logprob))
    return result
