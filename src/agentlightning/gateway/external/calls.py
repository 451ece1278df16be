"""ExternalCalls: calls for models that are not trained: a judge, a user simulator, an embedding, a hosted policy.

Driven by the proxy, which asks first whether a model name belongs to an external model of the run. The request goes out in
its own protocol as it came, with the server's key in place of the attempt's; the answer comes back as it is, byte for byte,
and its last bytes wait until the call is recorded. What is recorded has no tokens and is never trained on. A call that
fails leaves a span. It knows no engine and no template, and of HTTP only the agent's side (external/client.py has the
other).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from uuid_utils import uuid7

from agentlightning.gateway.asgi_response import AgentRequest, AgentResponse, Deadline
from agentlightning.gateway.attempts import AttemptCache, TrackedAttempt
from agentlightning.gateway.call_job import CallJob
from agentlightning.gateway.external.client import Exchange, ExternalClient, ExternalResponse, request_headers
from agentlightning.gateway.external.directory import ExternalDirectory, ExternalModel
from agentlightning.gateway.limits import Admission
from agentlightning.gateway.metrics import GatewayMetrics
from agentlightning.protocols.base import ApiError, CompletionRequest, WireFormat
from agentlightning.rendering.conversation import Conversation, PromptPlan, RequestView
from agentlightning.store.base import LightningStore
from agentlightning.types import ABANDONED, JSON, Sampling, Span

BYTES_PER_TOKEN = 4

FAILED = "gateway.external_failed"
"""Name of the span that a failed call leaves."""


@dataclass(slots=True, kw_only=True)
class _ExternalJob(CallJob):
    """One call under way."""

    external: ExternalModel
    reply: AgentResponse
    recorded: bool = False


class ExternalCalls:
    """The text path. `grace_s` is how long a call goes on after its agent has gone."""

    def __init__(
        self,
        store: LightningStore,
        attempts: AttemptCache,
        directory: ExternalDirectory,
        metrics: GatewayMetrics,
        *,
        grace_s: float = 10.0,
    ) -> None:
        self._store = store
        self._attempts = attempts
        self._metrics = metrics
        self._grace_s = grace_s
        self._endpoints = ExternalClient()
        self.directory = directory

    async def close(self) -> None:
        """Close the connections; a second call does nothing."""
        await self._endpoints.close()

    async def answer(
        self,
        external: ExternalModel,
        wire: WireFormat,
        route: str,
        data: JSON,
        body: bytes,
        attempt: TrackedAttempt,
        admission: Admission,
        incoming: AgentRequest,
        reply: AgentResponse,
    ) -> None:
        """Answer one request; `data` is what `body` says. Raises ApiError and the errors of the store."""
        started_ns = time.time_ns()
        request = wire.parse(data, trained=False)
        admission.begin()
        conversation, plan = await self._planned(request, attempt)
        job = _ExternalJob(
            id=str(uuid7()),
            external=external,
            wire=wire,
            attempt=attempt,
            admission=admission,
            reply=reply,
            request=request,
            sampling=_sampling(data),
            conversation=conversation,
            plan=plan,
            started_ns=started_ns,
            agent=incoming.agent,
            span_id=incoming.span_id(attempt.rollout.id, attempt.number),
        )
        reply.request_id = job.id
        reply.failed = lambda refusal: _failed(job, refusal)
        self._metrics.in_flight.inc()
        try:
            exchange = self._exchange(job, route, incoming, data, body)
            await self._run(job, exchange, incoming)
        except ApiError as refusal:
            await self._leave_span(job, None, refusal.message)
            raise
        finally:
            self._metrics.in_flight.dec()
            if not job.recorded:
                conversation.withdraw(plan)

    # --- one call, step by step -------------------------------------------------------------------------------------

    async def _planned(self, request: CompletionRequest, attempt: TrackedAttempt) -> tuple[Conversation, PromptPlan]:
        """The call's place among the attempt's."""
        conversation = await self._attempts.conversation(attempt, None)
        view = RequestView.of_external(request.messages, request.tools)
        plan = conversation.plan_external(view)
        if attempt.complete or plan.parent is not None or "a" not in view.roles:
            return conversation, plan
        conversation.withdraw(plan)  # what it continues may have gone through another gateway
        await self._attempts.refresh(attempt)
        return conversation, conversation.plan_external(view)

    def _exchange(self, job: _ExternalJob, route: str, incoming: AgentRequest, data: JSON, body: bytes) -> Exchange:
        settings, choices = job.external.settings, data.get("n")
        return Exchange(
            external=job.external,
            route=route,
            headers=request_headers(job.external, route, incoming.headers),
            body=body if settings.rename is None else orjson.dumps({**data, "model": settings.rename}),
            choices=max(1, choices) if isinstance(choices, int) else 1,
            deadline_s=asyncio.get_running_loop().time() + settings.timeout_s,
            new_reader=job.wire.reader,
            send=lambda events, kind: self._send(job, events, kind),
            reader=job.wire.reader(),
        )

    async def _run(self, job: _ExternalJob, exchange: Exchange, incoming: AgentRequest) -> None:
        response = await self._send_with_deadline(job, exchange, incoming)
        if response is None:
            await self._record(job, exchange, ABANDONED)
        elif response.failure is None:
            await self._record(job, exchange, exchange.reader.finish_reason)
            await _deliver(job.reply, response)
        else:
            self._metrics.call(job.wire.NAME, _result(response.status))
            await self._leave_span(job, response.status, response.failure)
            if any(name.endswith(b"request-id") for name, _ in response.headers):
                job.reply.request_id = ""  # theirs counts
            await _deliver(job.reply, response)

    async def _send_with_deadline(
        self, job: _ExternalJob, exchange: Exchange, incoming: AgentRequest
    ) -> ExternalResponse | None:
        """The external model's response; None if the agent disconnected and the grace period ended first. Raises
        ApiError."""
        try:
            with Deadline(job.external.settings.timeout_s) as deadline:
                watch = incoming.on_disconnect(lambda: self._abandon(job, deadline))
                try:
                    return await self._endpoints.send(exchange)
                finally:
                    watch.stop()
        except TimeoutError:
            if job.gone:
                return None
            sentence = (
                f"external model {job.external.name!r} did not answer within {job.external.settings.timeout_s:g} s"
            )
            raise ApiError(sentence, status=504, type="server_error", code="deadline_exceeded") from None

    def _abandon(self, job: _ExternalJob, deadline: Deadline) -> None:
        """The agent has disconnected: the call goes on for the grace period."""
        job.gone = True
        deadline.shorten(self._grace_s)

    async def _send(self, job: _ExternalJob, events: bytes, content_type: bytes) -> bool:
        if job.gone:
            return False
        if job.reply.started:
            await job.reply.more(events)
        else:
            self._metrics.first_token.observe((time.time_ns() - job.started_ns) / 1e9)
            await job.reply.start_events(events, content_type)
        return True

    # --- what is kept -----------------------------------------------------------------------------------------------

    async def _record(self, job: _ExternalJob, exchange: Exchange, finish_reason: str) -> None:
        """Make the call durable, then let later requests continue it."""
        reader = exchange.reader
        used: JSON = {"prompt_tokens": reader.prompt_tokens, "sampled_tokens": reader.sampled_tokens}
        if not any(used.values()):
            used = _estimated_usage(exchange) if job.admission.counts_tokens else {}
        call = job.record(reader.message, finish_reason, usage=used)
        await self._store.append_calls([call])
        job.admission.record([call], job.external.settings)
        self._metrics.record(call)
        if finish_reason == ABANDONED:
            self._metrics.external(job.external.name, "abandoned")
            return
        self._metrics.external(job.external.name, "recorded")
        job.conversation.record(job.plan, call.id, [], call.completion)
        job.recorded = True

    async def _leave_span(self, job: _ExternalJob, status: int | None, error: str) -> None:
        """The trace of a call that was not answered; `status` where the external model gave one."""
        self._metrics.external(job.external.name, _result(status))
        rollout = job.attempt.rollout
        span = Span(
            id=job.id,
            run_id=rollout.run_id,
            rollout_id=rollout.id,
            attempt=job.attempt.number,
            name=FAILED,
            attributes={
                "model": job.request.model,
                "external": job.external.name,
                "status": status,
                "error": error[:500],
            },
            started_ns=job.started_ns,
            finished_ns=time.time_ns(),
        )
        await self._store.append_spans([span])


async def _deliver(reply: AgentResponse, response: ExternalResponse) -> None:
    if not response.streamed:
        await reply.whole(response.status, response.body, response.content_type, response.headers)
        return
    if not reply.started:
        await reply.start_events(b"", response.content_type)
    await reply.end(response.body)


def _result(status: int | None) -> Literal["refused", "failed"]:
    return "refused" if status is not None and 400 <= status < 500 else "failed"


def _failed(job: _ExternalJob, refusal: ApiError) -> bytes:
    """The event that ends a started stream with an error."""
    events = job.wire.stream(job.request, job.id, job.request.model, job.started_ns // 10**9, 0)
    return events.failed(refusal)


def _estimated_usage(exchange: Exchange) -> JSON:
    """Tokens of a call without a report of them (streams have one only where it is asked for), which limits need: four
    bytes each, as in English text."""
    sampled = len(orjson.dumps(exchange.reader.message))
    return {
        "prompt_tokens": -(-len(exchange.body) // BYTES_PER_TOKEN),
        "sampled_tokens": -(-sampled // BYTES_PER_TOKEN),
        "estimated": True,
    }


def _sampling(data: JSON) -> Sampling:
    """The sampling parameters of a request, as far as the record has a place for them."""

    def number(*names: str) -> Any:
        return next((data[name] for name in names if type(data.get(name)) in (int, float)), None)

    temperature, top_p = number("temperature"), number("top_p")
    return Sampling(
        temperature=1.0 if temperature is None else float(temperature),
        top_p=1.0 if top_p is None else float(top_p),
        max_tokens=number("max_completion_tokens", "max_output_tokens", "max_tokens"),
    )
