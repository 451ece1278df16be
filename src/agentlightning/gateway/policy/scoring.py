"""PromptScoring: log-probabilities of given tokens under a policy, without sampling and without a record.

Driven by the proxy for ``POST /v1/tokens/logprobs``, by policy/calls.py for a retry of a call that asks for those of its
prompt, which no record keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from uuid_utils import uuid7

from agentlightning.errors import EngineError
from agentlightning.gateway.call_job import AgentCall
from agentlightning.gateway.policy.engine_client import PromptLogprob, SampledTokens
from agentlightning.gateway.policy.engine_router import EngineRouter, Policy
from agentlightning.gateway.policy.response_decoder import token_logprob
from agentlightning.protocols import fields, tokens
from agentlightning.protocols.base import Completion, CompletionRequest, Delta, TokenLogprob
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


class PromptScoring:
    """Asks the engines of a policy."""

    def __init__(self, engine_router: EngineRouter) -> None:
        self._engine_router = engine_router

    async def answer(self, call: AgentCall, data: JSON) -> None:
        """Answer one request for log-probabilities. Raises ApiError and the errors of engines."""
        tokens.check_known(data, frozenset(("model", "token_ids")))
        asked = fields.read(tokens.ScoringRequest, data)
        model, ids = asked.model or "", asked.token_ids
        policy = await self._engine_router.policy(call.attempt.rollout, model)
        scored = await self.score(call, policy, ids, 0)
        await call.reply.whole(200, tokens.logprobs_body(model or policy.model, token_logprobs(scored, ids)))

    async def complete(
        self, call: AgentCall, policy: Policy, request: CompletionRequest, found: Completion
    ) -> Completion:
        """A completion that is recorded, or samples nothing, with what no record keeps: log-probabilities of its prompt, and
        the prompt before each choice, where the request asks for them."""
        if request.prompt_logprobs is not None and found.prompt_ids is not None:
            scored = await self.score(call, policy, list(found.prompt_ids), request.prompt_logprobs)
            found = replace(found, prompt_logprobs=prompt_table(scored, policy.renderer, len(found.prompt_ids)))
        return await self.echoed(call, policy, request, found)

    async def echo(self, call: AgentCall, policy: Policy, request: CompletionRequest, ids: list[int]) -> Delta:
        """The prompt as the beginning of a choice, with its tokens where log-probabilities are asked for."""
        text = request.prompt if isinstance(request.prompt, str) else policy.renderer.decode(ids, special=True)
        if not request.logprobs:
            return Delta(content=text)
        scored = await self.score(call, policy, ids, request.top_logprobs)
        return Delta(content=text, logprobs=prompt_tokens(scored, policy.renderer, ids, request.top_logprobs))

    async def echoed(
        self, call: AgentCall, policy: Policy, request: CompletionRequest, found: Completion
    ) -> Completion:
        """A completion with its prompt before each choice, where the request asks for that."""
        if not request.repeats_prompt:
            return found
        echo = await self.echo(call, policy, request, list(found.prompt_ids or ()))
        return replace(
            found,
            choices=tuple(
                replace(
                    choice,
                    content=echo.content + (choice.content or ""),
                    logprobs=None if choice.logprobs is None else (*(echo.logprobs or ()), *choice.logprobs),
                )
                for choice in found.choices
            ),
        )

    async def score(self, call: AgentCall, policy: Policy, ids: list[int], alternatives: int) -> SampledTokens:
        """Returns what the engine gives for these tokens; the one token that engines insist on sampling is dropped. It is a
        call by the limits. Raises ApiError where one is reached."""
        call.admission.begin()
        request = {
            "request_id": str(uuid7()),
            "model": policy.alias,
            "token_ids": ids,
            "stream": False,
            "sampling_params": {"temperature": 0.0, "max_tokens": 1, "logprobs": 0, "prompt_logprobs": alternatives},
        }
        scored = await self._engine_router.generate(policy, request, call.affinity)
        call.admission.count_prompt(len(ids))
        return scored
