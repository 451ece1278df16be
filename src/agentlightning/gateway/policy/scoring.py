"""PromptScoring: log-probabilities of given tokens under a policy, without sampling and without a record.

Driven by the proxy for ``POST /v1/tokens/logprobs``, by policy/calls.py for a retry of a call that asks for those of its
prompt, which no record keeps.
"""

from __future__ import annotations

from dataclasses import replace

from uuid_utils import uuid7

from agentlightning.gateway.call_job import AgentCall
from agentlightning.gateway.policy.engine_client import SampledTokens
from agentlightning.gateway.policy.engine_router import EngineRouter, Policy
from agentlightning.gateway.policy.prompt_scores import prompt_table, prompt_tokens, token_logprobs
from agentlightning.protocols import fields, tokens
from agentlightning.protocols.base import Completion, CompletionRequest, Delta
from agentlightning.records import JSON


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
