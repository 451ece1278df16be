"""PromptScoring: log-probabilities of given tokens under a policy, without sampling and without a record.

Driven by the proxy for ``POST /v1/tokens/logprobs``, by policy/calls.py for a retry of a call that asks for those of its
prompt, which no record keeps.
"""

from __future__ import annotations

from dataclasses import replace

from uuid_utils import uuid7

from agentlightning.gateway.asgi_response import AgentResponse
from agentlightning.gateway.attempts import TrackedAttempt
from agentlightning.gateway.limits import Admission
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

    async def answer(self, data: JSON, attempt: TrackedAttempt, admission: Admission, reply: AgentResponse) -> None:
        """Answer one request for log-probabilities. Raises ApiError and the errors of engines."""
        tokens.check_known(data, frozenset(("model", "token_ids")))
        asked = fields.read(tokens.ScoringRequest, data)
        model, ids = asked.model or "", asked.token_ids
        policy = await self._engine_router.policy(attempt.rollout, model)
        scored = await self.score(policy, ids, 0, attempt, admission)
        await reply.whole(200, tokens.logprobs_body(model or policy.model, token_logprobs(scored, ids)))

    async def complete(
        self,
        policy: Policy,
        request: CompletionRequest,
        found: Completion,
        attempt: TrackedAttempt,
        admission: Admission,
    ) -> Completion:
        """A recorded completion with the log-probabilities of its prompt, where the request asks for them."""
        if request.prompt_logprobs is None or found.prompt_ids is None:
            return found
        scored = await self.score(policy, list(found.prompt_ids), request.prompt_logprobs, attempt, admission)
        return replace(found, prompt_logprobs=prompt_table(scored, policy.renderer, len(found.prompt_ids)))

    async def echo(
        self,
        policy: Policy,
        request: CompletionRequest,
        ids: list[int],
        attempt: TrackedAttempt,
        admission: Admission,
    ) -> Delta:
        """The prompt as the beginning of a choice, with its tokens where log-probabilities are asked for."""
        text = request.prompt if isinstance(request.prompt, str) else policy.renderer.decode(ids, special=True)
        if not request.logprobs:
            return Delta(content=text)
        scored = await self.score(policy, ids, request.top_logprobs, attempt, admission)
        return Delta(content=text, logprobs=prompt_tokens(scored, policy.renderer, ids, request.top_logprobs))

    async def echoed(
        self,
        policy: Policy,
        request: CompletionRequest,
        found: Completion,
        attempt: TrackedAttempt,
        admission: Admission,
    ) -> Completion:
        """A completion with its prompt before each choice, where the request asks for that."""
        if not request.repeats_prompt:
            return found
        echo = await self.echo(policy, request, list(found.prompt_ids or ()), attempt, admission)
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

    async def score(
        self, policy: Policy, ids: list[int], alternatives: int, attempt: TrackedAttempt, admission: Admission
    ) -> SampledTokens:
        """Returns what the engine gives for these tokens; the one token that engines insist on sampling is dropped. It is a
        call by the limits. Raises ApiError where one is reached."""
        admission.begin()
        scored = await self.score_uncounted(policy, ids, alternatives, attempt)
        admission.count_prompt(len(ids))
        return scored

    async def score_uncounted(
        self, policy: Policy, ids: list[int], alternatives: int, attempt: TrackedAttempt
    ) -> SampledTokens:
        """The same for what the attempt did not ask for: no call by its limits."""
        engine_request = {
            "request_id": str(uuid7()),
            "model": policy.alias,
            "token_ids": ids,
            "stream": False,
            "sampling_params": {"temperature": 0.0, "max_tokens": 1, "logprobs": 0, "prompt_logprobs": alternatives},
        }
        return await self._engine_router.generate(policy, engine_request, f"{attempt.rollout.id}/{attempt.number}")
