"""Sampling parameters of a policy's call: those of its rollout, whatever the agent asks for.

Driven by policy/calls.py. Knows no engine.
"""

from __future__ import annotations

from dataclasses import replace

from agentlightning.gateway.attempts import TrackedAttempt
from agentlightning.gateway.policy.engine_router import Policy
from agentlightning.gateway.policy.unsupported import unsupported_error
from agentlightning.protocols.base import ApiError, CompletionRequest
from agentlightning.records import JSON, Sampling


def sampling_of(
    request: CompletionRequest, policy: Policy, attempt: TrackedAttempt
) -> tuple[CompletionRequest, Sampling, JSON, list[str]]:
    """The sampling parameters of a request, by the rollout and `agent.unsupported_params`, the parameters that were
    overridden, and the names of those among them that were dropped.

    What the agent asks for never reaches the engine where it would make recorded log-probabilities wrong.
    """
    given = attempt.rollout.sampling
    unsupported = dict(request.unsupported)
    if request.seed is not None and policy.seed is None:
        unsupported["seed"] = request.seed
    if request.one_tool_call and request.parse_tools and policy.renderer.parser.tool_end is None:
        unsupported["parallel_tool_calls"] = False
    drops = policy.unsupported_params == "drop"
    if request.refused or (unsupported and not drops):
        raise unsupported_error({} if drops else unsupported, request.refused)
    reason = policy.check_sampling(given.temperature, given.top_p) if attempt.rollout.mode == "train" else None
    if reason is not None:
        raise ApiError(
            f"the rollout's sampling: {reason}", status=409, type="server_error", code="sampling_not_trainable"
        )
    limits = [limit for limit in (given.max_tokens, request.max_tokens) if limit is not None]
    sampling = Sampling(temperature=given.temperature, top_p=given.top_p, max_tokens=min(limits, default=None))
    applied = {"temperature": given.temperature, "top_p": given.top_p}
    forced = {name: value for name, value in request.forced.items() if value != applied.get(name)}
    if "seed" in unsupported:
        request = replace(request, seed=None)
    return request, sampling, {**forced, **request.not_applied, **unsupported}, list(unsupported)


def trained_cut(attempt: TrackedAttempt, sampling: Sampling) -> float | None:
    """The top_p that the learner cuts by; None where nothing is learned, or where no engine cuts."""
    cuts = attempt.rollout.mode == "train" and sampling.top_p < 1 and sampling.temperature > 0
    return sampling.top_p if cuts else None
