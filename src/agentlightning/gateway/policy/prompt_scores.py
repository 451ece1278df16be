"""Prompt scores: log-probabilities of a prompt's tokens as an engine gives them, in the form that vLLM's clients read. Pure.

Driven by policy/calls.py and policy/sdk_retries.py. They are of the model's own distribution, at temperature 1 whatever the
rollout's is, as vLLM's are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentlightning.errors import EngineError
from agentlightning.gateway.policy.engine_client import PromptLogprob, SampledTokens
from agentlightning.gateway.policy.response_decoder import token_logprob
from agentlightning.protocols.base import TokenLogprob
from agentlightning.records import JSON
from agentlightning.rendering.renderer import Renderer

MIN_LOGPROB = -9999.0
"""vLLM's stand-in for minus infinity, which JSON lacks."""


def prompt_table(sampled: SampledTokens, renderer: Renderer, count: int) -> list[JSON | None]:
    """For each of the prompt's `count` tokens the table of {logprob, rank, decoded_token} by id; None for the first."""
    return [None if one is None else _table(one, renderer) for one in scores(sampled, count)]


def token_logprobs(sampled: SampledTokens, ids: Sequence[int]) -> list[float | None]:
    """The log-probability of each token of the prompt; None for the first."""
    found = scores(sampled, len(ids))
    return [
        None if one is None else max(one[index].logprob, MIN_LOGPROB) for index, one in zip(ids, found, strict=True)
    ]


def prompt_tokens(
    sampled: SampledTokens, renderer: Renderer, ids: Sequence[int], alternatives: int
) -> tuple[TokenLogprob, ...]:
    """The tokens of a prompt with so many alternatives; the first, which follows nothing, has NaN."""
    found = []
    for index, table in zip(ids, scores(sampled, len(ids)), strict=True):
        likeliest = sorted((table or {}).items(), key=lambda pair: -pair[1].logprob)[:alternatives]
        logprob = math.nan if table is None else max(table[index].logprob, MIN_LOGPROB)
        top = [(other, max(one.logprob, MIN_LOGPROB)) for other, one in likeliest]
        found.append(token_logprob(renderer, index, logprob, top))
    return tuple(found)


def scores(sampled: SampledTokens, count: int) -> list[dict[int, PromptLogprob] | None]:
    """Returns what the engine gave. Raises EngineError where that is not one entry per token."""
    found = sampled.prompt_logprobs
    if found is None or len(found) != count:
        got = "none" if found is None else str(len(found))
        raise EngineError(f"the engine was asked for prompt_logprobs of {count} tokens and gave {got}")
    return found


def _table(one: dict[int, PromptLogprob], renderer: Renderer) -> JSON:
    return {
        str(index): {
            "logprob": max(score.logprob, MIN_LOGPROB),
            "rank": score.rank,
            "decoded_token": _text(renderer, index),
        }
        for index, score in one.items()
    }


def _text(renderer: Renderer, index: int) -> str:
    """The token as text; a part of a character has none, as vLLM has it."""
    text = renderer.token_text(index)
    return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else text
