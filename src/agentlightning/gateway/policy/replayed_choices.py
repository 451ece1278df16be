"""The completions of a forked rollout's call that are not sampled: recorded ones, or the fork's answer in its own tokens.

Driven by policy/calls.py before it makes the call. Which recorded call a request is, gateway/replay.py says.
"""

from __future__ import annotations

from dataclasses import replace

from agentlightning.gateway.policy.engine_client import SampledTokens
from agentlightning.gateway.policy.engine_router import Policy
from agentlightning.gateway.policy.response_decoder import ResponseDecoder
from agentlightning.gateway.replay import AttemptReplay, recorded_tokens
from agentlightning.protocols.base import ApiError, CompletionRequest, assistant_message
from agentlightning.records import JSON, Call
from agentlightning.rendering.conversation import PromptPlan
from agentlightning.rendering.graph import RequestView, digest, normal
from agentlightning.rendering.renderer import Renderer
from agentlightning.store.forks import Choices


def replayed_choices(
    replay: AttemptReplay | None,
    policy: Policy,
    plan: PromptPlan,
    view: RequestView,
    request_digest: str,
    request: CompletionRequest,
    max_tokens: int | None,
) -> Choices:
    """The choices that a request with this bound of sampled tokens gets; empty where they are to be sampled. Raises ApiError
    where the fork's answer is none that the policy could have sampled here."""
    if replay is None:
        return []
    if request.top_logprobs:  # alternatives are in no record, and an agent that reads them may do otherwise without
        replay.end("a request asks for alternatives of tokens (top_logprobs), which are not kept")
        return []

    renderer = policy.renderer

    def fits(call: Call) -> bool:
        if call.policy != policy.alias or not _within(call, max_tokens):
            return False
        return _same(_read(recorded_tokens(call), renderer, plan, request), call.completion)

    choices = replay.take(plan.request_hash.hex(), request_digest, len(plan.prompt_ids), request.n, fits)
    answer = replay.answer_to(choices) if choices else None
    if answer is None:
        return choices
    try:
        ids = _answer_ids(answer, renderer, plan, view, request)
    except BaseException:
        replay.give_back(choices[0])
        raise
    # It was drawn from nothing: its log-probabilities say that nothing else could come.
    return [
        replace(
            call,
            completion=answer,
            sampled_ids=ids,
            logprobs=[0.0] * len(ids),
            versions=[],
            finish_reason="stop",
        )
        for call in choices
    ]


def _answer_ids(
    answer: JSON, renderer: Renderer, plan: PromptPlan, view: RequestView, request: CompletionRequest
) -> list[int]:
    """The ids of the answer, which the agent will read as it was given."""
    ids: list[int] | None
    if request.prompt is None:
        ids = renderer.completion_ids(plan.prompt_ids, view.normal, view.tools, normal(answer), view.template_kwargs)
    else:
        text = renderer.encode(answer.get("content") or "", after=plan.prompt_ids[-1] if plan.prompt_ids else None)
        ids = [*text, *list(renderer.end_ids)[:1]]
    if ids is None:
        raise _refusal("the model's chat template writes it otherwise than it opens a completion")
    sampled = SampledTokens(ids=ids, logprobs=[0.0] * len(ids), finish_reason="stop")
    read = _read(sampled, renderer, plan, request)
    if not _same(read, answer):
        raise _refusal(f"from the model the agent would read {str(read)[:200]}")
    return ids


def _within(call: Call, max_tokens: int | None) -> bool:
    """True where the bound would have left the completion as it is."""
    if max_tokens is not None and len(call.sampled_ids) > max_tokens:
        return False
    return call.finish_reason != "length" or call.sampling.max_tokens == max_tokens


def _read(sampled: SampledTokens, renderer: Renderer, plan: PromptPlan, request: CompletionRequest) -> JSON:
    """The message that the agent reads: what it asks of stops and tool calls decides, too."""
    decoder = ResponseDecoder(renderer, request, plan.prompt_text, "")
    decoder.sampled = sampled
    decoder.finish()
    return assistant_message(decoder.choice())


def _same(one: JSON, other: JSON) -> bool:
    return digest(normal(one)) == digest(normal(other))


def _refusal(why: str) -> ApiError:
    return ApiError(f"the answer of the forked rollout cannot be given: {why}", param="fork.answer", final=True)
