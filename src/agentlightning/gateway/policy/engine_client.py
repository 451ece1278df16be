"""Engine API: the HTTP form in which an engine takes token ids and gives token ids back, vLLM's (--enable-scale-out).

Driven by policy/engine_router.py. Pure: knows nothing of connections and policies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentlightning.errors import EngineError
from agentlightning.records import VersionSpan

GENERATE = "/inference/v1/generate"

MIN_SAMPLED_LOGPROB = -104.0
"""Of a token that was sampled: the smallest number above 0 that float32 holds is exp(-103.97). Engines write -9999 and the
like for minus infinity; one such token would outweigh all others of an update."""


class PromptLogprob(msgspec.Struct, gc=False):
    """One token at a place of the prompt. Rank 1 is the likeliest."""

    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class SampledTokens:
    """The tokens that an engine has sampled so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    versions: list[VersionSpan] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """Alternatives for each token, (id, logprob), where the engine gave some: in any order, the token itself among them."""
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    """For each token of the prompt its log-probability and those of its alternatives, where they were asked for."""

    prompt_ids: list[int] | None = None
    """The prompt as the engine read it, where it was asked."""

    def add(self, answer: EngineResponse, version: int) -> list[int]:
        """Take in one response or chunk; returns its ids. `version` is stamped where the engine stamps none.

        Raises EngineError where something is missing.
        """
        if not answer.choices:
            raise EngineError("the engine answered without a choice")
        choice = answer.choices[0]
        self.prompt_logprobs = answer.prompt_logprobs or self.prompt_logprobs
        self.prompt_ids = answer.prompt_token_ids or self.prompt_ids
        ids = choice.token_ids or []
        if ids:
            self.ids += ids
            self._read_logprobs(choice.logprobs or _Logprobs())
        if choice.weight_versions:
            self.versions = [
                VersionSpan(version=_version(span.version, version), start=span.start, end=span.end)
                for span in choice.weight_versions
            ]
        if choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason
            self.stop_reason = choice.stop_reason
        if len(self.ids) != len(self.logprobs):
            raise EngineError(f"the engine gave {len(self.logprobs)} logprobs for {len(self.ids)} sampled ids")
        if ids and not all(map(MIN_SAMPLED_LOGPROB.__le__, self.logprobs[-len(ids) :])):
            lowest = min(self.logprobs[-len(ids) :])
            raise EngineError(
                f"the engine gave a sampled token the log-probability {lowest:g}, expected at least {MIN_SAMPLED_LOGPROB:g}"
            )
        if self.finish_reason is not None and self.ids and not self.versions:
            self.versions = [VersionSpan(version=version, start=0, end=len(self.ids))]
        return ids

    def _read_logprobs(self, logprobs: _Logprobs) -> None:
        content = logprobs.content or []
        self.logprobs += [token.logprob for token in content]
        if content and content[0].top_logprobs:
            self.top += [
                [
                    (_id(other.token) if other.token_id is None else other.token_id, other.logprob)
                    for other in token.top_logprobs or ()
                ]
                for token in content
            ]


class _Alternative(msgspec.Struct, gc=False):
    logprob: float
    token: str = ""
    token_id: int | None = None


class _Token(msgspec.Struct, gc=False):
    logprob: float
    top_logprobs: list[_Alternative] | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Versions(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Versions] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class EngineResponse(msgspec.Struct):
    """A response or chunk. What is not here, text and bytes of every token first of all, is skipped."""

    choices: list[_Choice] = []
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    error: Any = None


_ANSWER = msgspec.json.Decoder(EngineResponse)


def read_answer(data: bytes) -> EngineResponse:
    """Decodes a response. Raises EngineError where it has no known form."""
    try:
        return _ANSWER.decode(data)
    except msgspec.ValidationError as cause:
        raise EngineError(f"the engine answered in an unknown form: {cause}") from cause
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise EngineError(f"the engine answered with something that is not JSON: {cause}") from cause


class _Model(msgspec.Struct):
    id: str = ""
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


def listed_context(data: bytes, model: str) -> int | None:
    """The context of `model` by an engine's list of models, where it has that name, else that of the first that tells one:
    an adapter has its base model's.

    >>> listed_context(b'{"data": [{"id": "base", "max_model_len": 4096}, {"id": "adapter"}]}', "adapter")
    4096
    """
    try:
        listed = msgspec.json.decode(data, type=_Models).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # it lists none
        return None
    named = sorted((one for one in listed if (one.max_model_len or 0) > 0), key=lambda one: one.id != model)
    return named[0].max_model_len if named else None


def _version(label: str, version: int) -> int:
    """The version behind an engine's label; where nobody has told it one, `version`.

    >>> _version("7", 3), _version("default", 3)
    (7, 3)
    """
    return int(label) if label.isdigit() else version


def _id(name: str) -> int:
    """The id of a token that vLLM names ``token_id:17``."""
    try:
        return int(name.removeprefix("token_id:"))
    except ValueError:
        raise EngineError(f"the engine named a token {name!r}, expected token_id:NUMBER") from None
