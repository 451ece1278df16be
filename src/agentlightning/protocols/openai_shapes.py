"""Shapes that OpenAI's protocols have in common: errors, token counts, log-probabilities, ids, chunks of streams. Pure.

Driven by the modules of these protocols (chat, completions, tokens, responses, embeddings). Knows none of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from agentlightning.protocols import fields
from agentlightning.protocols.base import (
    SSE_DONE,
    ApiError,
    Choice,
    Completion,
    CompletionRequest,
    Delta,
    TokenLogprob,
    sse_event,
)
from agentlightning.records import JSON


def error(refusal: ApiError) -> bytes:
    told = {"message": refusal.message, "type": refusal.type, "param": refusal.param, "code": refusal.code}
    return orjson.dumps({"error": told})


def usage_options(asked: fields.IdsRequest) -> fields.StreamOptions:
    """The chunks with token counts that are requested; stream options without a stream are refused, as OpenAI does."""
    if asked.stream_options is None:
        return fields.StreamOptions()
    if not asked.stream:
        raise ApiError('stream_options: only allowed where "stream" is true', param="stream_options")
    return fields.read(fields.StreamOptions, asked.stream_options, "stream_options")


def usage(completion: Completion) -> JSON:
    """The token counts of a completion."""
    prompt_tokens, sampled_tokens = completion.prompt_tokens, completion.sampled_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled_tokens,
        "total_tokens": prompt_tokens + sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": completion.reasoning_tokens},
    }


def choice_ids(request: CompletionRequest, choice: Choice) -> JSON:
    """The ids of a choice, null where the request says that it wants none, nothing where it does not say."""
    if request.return_token_ids is None:
        return {}
    return {"token_ids": choice.token_ids if request.return_token_ids else None}


def shown(request: CompletionRequest, tokens: tuple[TokenLogprob, ...]) -> Sequence[TokenLogprob]:
    """Tokens with their texts, or with the names of their ids where the request asks for those."""
    return [one.named() for one in tokens] if request.tokens_as_ids else tokens


class ChunkStream(ABC):
    """The chunks of a streamed response, as far as both protocols have the same.

    The last text of a choice waits for the finish reason and goes out in one chunk with it, as vLLM has it.
    """

    def __init__(self, request: CompletionRequest, frame: JSON, prompt_tokens: int) -> None:
        self._request = request
        self._count = request.n
        self._usage = request.include_usage
        self._frame = {**frame, "usage": None} if self._usage else frame
        self._ends: dict[int, Delta] = {}
        """The last of each choice."""
        self._prompt_tokens = prompt_tokens
        self._sampled: dict[int, int] | None = {} if request.continuous_usage else None
        """Sampled tokens so far, by choice, where every chunk has the counts."""

    def finish_reason(self, choice: Choice) -> str:
        """The reason as the protocol has it."""
        return choice.finish_reason

    @abstractmethod
    def parts(self, index: int, delta: Delta) -> list[JSON]:
        """The parts of choice `index` that a delta says, one for each chunk; at least one where it is the last."""

    def delta(self, index: int, delta: Delta) -> bytes:
        """More of choice `index`."""
        if delta.last:
            self._ends[index] = delta
            return b""
        return b"".join(self._chunks(index, delta))

    def last(self, completion: Completion) -> bytes:
        """The last texts with their finish reasons, the usage where asked for, and the end mark."""
        parts: list[bytes] = []
        for index, choice in enumerate(completion.choices):
            end = self._ends.get(index, Delta(last=True))
            ended = replace(end, sampled_tokens=choice.sampled_tokens)
            parts += self._chunks(index, ended, self.finish_reason(choice))
        if self._usage:
            parts.append(sse_event({**self._frame, "choices": [], "usage": usage(completion)}))
        parts.append(SSE_DONE)
        return b"".join(parts)

    def failed(self, refusal: ApiError) -> bytes:
        return b"data: " + error(refusal) + b"\n\n"

    def chunk(self, index: int, part: JSON, finish_reason: str | None = None, **more: Any) -> bytes:
        """A chunk with this part of a choice, and with what else it has."""
        choice = {"index": index, **part, "logprobs": part.get("logprobs"), "finish_reason": finish_reason}
        counts = {} if self._sampled is None else self._counts(self._sampled)
        return sse_event({**self._frame, "choices": [choice], **counts, **more})

    def _chunks(self, index: int, delta: Delta, finish_reason: str | None = None) -> list[bytes]:
        if self._sampled is not None:
            self._sampled[index] = delta.sampled_tokens
        parts = self.parts(index, delta)
        chunks = []
        for at, part in enumerate(parts, 1):
            chunks.append(self.chunk(index, part, finish_reason if at == len(parts) else None))
        return chunks

    def _counts(self, sampled: dict[int, int]) -> JSON:
        tokens = sum(sampled.values())
        counts = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self._prompt_tokens + tokens,
        }
        return {"usage": counts}


def logprob_list(tokens: Sequence[TokenLogprob]) -> list[JSON]:
    """Tokens with their alternatives, as Chat Completions and Responses list them."""

    def entry(token: TokenLogprob) -> JSON:
        return {"token": token.text, "logprob": token.logprob, "bytes": list(token.utf8)}

    return [{**entry(one), "top_logprobs": [entry(other) for other in one.top]} for one in tokens]


def first_choice(data: Any) -> JSON:
    """Choice 0 of what an external model sent; empty where there is none."""
    choices = data.get("choices") if isinstance(data, dict) else None
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and choice.get("index", 0) == 0:
            return choice
    return {}
