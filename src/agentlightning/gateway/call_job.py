"""AgentCall: one request of an agent within its attempt. CallJob: the model call that answers it, and its record.

Driven by policy/calls.py and external/calls.py, each of which adds what its calls need. Knows no engine, no external model
and no store.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from hashlib import blake2b

from agentlightning.gateway.asgi_response import AgentRequest, AgentResponse, parent_span
from agentlightning.gateway.attempts import TrackedAttempt
from agentlightning.gateway.limits import Admission
from agentlightning.gateway.policy.engine_client import SampledTokens
from agentlightning.protocols.base import CompletionRequest, WireFormat
from agentlightning.protocols.response_items import FOLDS
from agentlightning.records import ABANDONED, JSON, SYSTEM_PROMPT, TEMPLATE_KWARGS, Call, Resource, Sampling
from agentlightning.rendering.conversation import Conversation, PromptPlan


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One request of an agent: who asks, in which protocol, within which limits, and where the response goes."""

    wire: WireFormat
    attempt: TrackedAttempt
    admission: Admission
    request: AgentRequest
    reply: AgentResponse
    resources: list[Resource]
    """The run's."""

    @property
    def affinity(self) -> str:
        """Name of the attempt, by which an engine with its prefix is found again."""
        return f"{self.attempt.rollout.id}/{self.attempt.number}"


@dataclass(slots=True, kw_only=True)
class CallJob:
    """One call under way."""

    id: str
    call: AgentCall
    request: CompletionRequest
    sampling: Sampling
    conversation: Conversation
    plan: PromptPlan
    started_ns: int
    overridden_params: JSON = field(default_factory=dict)
    decoding: JSON = field(default_factory=dict)
    finished_ns: int = 0
    """Time at which the last token was sampled; 0 where the record's own time is meant."""
    gone: bool = False
    """The agent has disconnected."""

    @property
    def alias(self) -> str:
        """Alias of the policy that samples; '' where an external model answers."""
        return ""

    def call_id(self, index: int) -> str:
        """The id under which choice `index` is recorded."""
        return f"{self.id}.{index}" if index else self.id

    def record(
        self,
        completion: JSON,
        finish_reason: str,
        *,
        index: int = 0,
        sampled: SampledTokens | None = None,
        usage: JSON | None = None,
    ) -> Call:
        """The record of choice `index`; without `sampled` it has no tokens."""
        plan, attempt, incoming = self.plan, self.call.attempt, self.call.request
        rollout = attempt.rollout
        sampled = sampled or SampledTokens()
        return Call(
            id=self.call_id(index),
            run_id=rollout.run_id,
            rollout_id=rollout.id,
            attempt=attempt.number,
            parent_id=plan.parent.call_id if plan.parent is not None else None,
            suffix_ids=plan.suffix_ids,
            sampled_ids=sampled.ids,
            logprobs=sampled.logprobs,
            versions=sampled.versions,
            prompt_tokens=len(plan.prompt_ids),
            policy=self.alias,
            model=self.request.model,
            protocol=self.call.wire.NAME,
            sampling=self.sampling,
            history_hash=self.conversation.history_hash(plan, completion).hex(),
            request_hash=plan.request_hash.hex(),
            messages=plan.messages,
            completion=completion,
            tools=self.request.tools if plan.parent is None else None,
            fork_cause=plan.fork_cause,
            untrained_tokens=plan.untrained_tokens,
            overridden_params=self.overridden_params,
            decoding=self.decoding,
            usage=usage or {},
            agent=incoming.agent,
            finish_reason=finish_reason,
            started_ns=self.started_ns,
            finished_ns=self.finished_ns or time.time_ns(),
            span_id=parent_span(incoming.traceparent, rollout.id, attempt.number) if incoming.traceparent else None,
            delivered=not self.gone and finish_reason != ABANDONED,
            request_fields=self._request_fields(),
            images=list(plan.images),
        )

    def _request_fields(self) -> JSON:
        echo = self.request.echo.items()
        kept = {name: value for name, value in echo if (value if name == FOLDS else not name.startswith("_"))}
        if self.plan.parent is None and self.request.template_kwargs:
            kept[TEMPLATE_KWARGS] = self.request.template_kwargs
        if prompt := self.call.request.prompt:
            replaced, seen = prompt["replaced"], self.call.attempt.replaced_prompts
            own = blake2b(replaced.encode(errors="replace"), digest_size=16).digest()
            known = self.plan.parent is not None and own in seen
            seen.add(own)
            kept[SYSTEM_PROMPT] = {name: value for name, value in prompt.items() if name != "replaced" or not known}
        return kept
