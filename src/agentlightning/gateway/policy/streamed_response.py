"""StreamedResponse: a completion of the policy as it goes out to its agent, sampled now or recorded before.

Driven by policy/calls.py. Knows no wire format beyond its events, and no engine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from agentlightning.gateway.call_job import AgentCall, CallJob
from agentlightning.gateway.metrics import GatewayMetrics
from agentlightning.gateway.policy.decoding import engine_params
from agentlightning.gateway.policy.engine_router import Policy
from agentlightning.gateway.policy.images import CallImages, engine_prompt
from agentlightning.gateway.policy.response_decoder import ResponseDecoder
from agentlightning.protocols.base import Completion, CompletionRequest, Delta
from agentlightning.protocols.response_events import replayed
from agentlightning.records import JSON, Call


@dataclass(slots=True, kw_only=True)
class PolicyJob(CallJob):
    """One call under way: n samples of one prompt."""

    policy: Policy
    seeds: list[int]
    decoders: list[ResponseDecoder]
    images: CallImages
    applied_edits: tuple[JSON, ...] = ()
    replayed: list[Call] = field(default_factory=list)
    """The recorded choices that it repeats; empty where it is sampled."""

    @property
    def alias(self) -> str:
        return self.policy.alias

    def engine_request(self, index: int) -> JSON:
        """The request for choice `index` in the form of vLLM's /inference/v1/generate."""
        tokens: JSON = {"token_ids": self.plan.prompt_ids}
        parameters: JSON = {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            # vLLM counts the token itself among its alternatives, and has 20 at most.
            "logprobs": min(self.request.top_logprobs + 1, 20) if self.request.top_logprobs else 0,
            "stop": list(self.decoders[index].stops),
            "stop_token_ids": self.decoders[index].stop_ids,
            **engine_params(self.decoding),
        }
        if self.request.prompt_logprobs is not None and index == 0:
            parameters["prompt_logprobs"] = self.request.prompt_logprobs
        if self.policy.seed is not None:
            parameters["seed"] = self.seeds[index]
        if self.sampling.max_tokens is not None:
            parameters["max_tokens"] = self.sampling.max_tokens
        return {
            "request_id": self.call_id(index),
            "model": self.policy.alias,
            **(engine_prompt(self.plan, self.images, self.policy.renderer) if self.images.files else tokens),
            "stream": self.request.stream,
            "sampling_params": parameters,
        }


class StreamedResponse:
    """The completion goes out as it is sampled; its end waits for the record."""

    def __init__(self, job: PolicyJob, metrics: GatewayMetrics) -> None:
        model = job.request.model or job.policy.model
        created_s = job.started_ns // 10**9
        prompt_tokens = len(job.plan.prompt_ids)
        request = replace(job.request, cached_tokens=prompt_tokens - len(job.plan.suffix_ids))
        self._events = job.call.wire.stream(request, job.id, model, created_s, prompt_tokens)
        self._started_ns = job.started_ns
        reply = self._reply = job.call.reply
        self._metrics = metrics
        reply.failed = self._events.failed

    async def more(self, index: int, delta: Delta) -> None:
        """Send what a choice adds. The opening is rendered first: events are numbered as they are made."""
        if not _says(delta):
            return
        if not self._reply.started:
            await self._start()
        await self._reply.more(self._events.delta(index, delta))

    async def last(self, rest: list[Delta], answer: Completion) -> None:
        """Send what was held back, and the end."""
        if not self._reply.started:
            await self._start()
        deltas = [self._events.delta(index, delta) for index, delta in enumerate(rest) if _says(delta)]
        await self._reply.end(b"".join(deltas) + self._events.last(answer))

    async def _start(self) -> None:
        self._metrics.first_token.observe((time.time_ns() - self._started_ns) / 1e9)
        await self._reply.start_events(self._events.first())


async def send_recorded(call: AgentCall, request: CompletionRequest, answer: Completion) -> None:
    """Send a completion that is recorded already."""
    wire, reply = call.wire, call.reply
    reply.request_id = answer.call_id
    if answer.prompt_ids is not None:
        request = replace(request, planned_ids=list(answer.prompt_ids))
    if not request.stream:
        await reply.whole(200, wire.body(request, answer))
        return
    request = replace(request, cached_tokens=answer.cached_tokens)
    events = wire.stream(request, answer.call_id, answer.model, answer.created_s, answer.prompt_tokens)
    *parts, end = replayed(events, answer, bool(request.return_token_ids))
    await reply.start_events(b"".join(parts))
    await reply.end(end)


def _says(delta: Delta) -> bool:
    return bool(delta.content or delta.reasoning or delta.tools or delta.logprobs or delta.token_ids)
