"""OutsideModels: calls for models that are not trained: a judge, a user simulator, an embedding, a hosted policy.

Driven by the proxy, which asks first whether a model name belongs to an upstream of the run. The request goes out in its own
protocol as it came, with the server's key in place of the attempt's; the answer comes back as it is, byte for byte, and its
last bytes wait until the call is recorded. What is recorded has no tokens and is never trained on. A call that fails leaves
a span. It knows no engine and no template, and of HTTP only the agent's side (endpoint.py has the other).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from uuid_utils import uuid7

from agentlightning.gateway.auth import Attempt, Attempts
from agentlightning.gateway.directory import Directory, OutsideModel
from agentlightning.gateway.endpoint import Answered, Endpoints, Question, request_headers
from agentlightning.gateway.metrics import GatewayMetrics
from agentlightning.gateway.news import News
from agentlightning.gateway.reply import Incoming, Reply
from agentlightning.protocols.neutral import Refusal, Request, WireFormat
from agentlightning.rendering.conversation import Conversation, Plan
from agentlightning.store.base import LightningStore
from agentlightning.types import ABANDONED, JSON, Call, Sampling, Span

FAILED = "gateway.outside_failed"
"""Name of the span that a call leaves which was not answered."""


@dataclass(slots=True, kw_only=True)
class _Job:
    """One call under way."""

    id: str
    outside: OutsideModel
    wire: WireFormat
    attempt: Attempt
    reply: Reply
    request: Request
    sampling: Sampling
    conversation: Conversation
    plan: Plan
    started_ns: int
    agent: str | None
    """The name that the sub-agent gives itself."""
    span_id: str | None
    gone: bool = False
    """The agent has disconnected."""
    recorded: bool = False


class OutsideModels:
    """The text path. `grace_s` is how long a call goes on after its agent has gone."""

    def __init__(
        self,
        store: LightningStore,
        attempts: Attempts,
        metrics: GatewayMetrics,
        *,
        news: News,
        grace_s: float = 10.0,
    ) -> None:
        self._store = store
        self._attempts = attempts
        self._metrics = metrics
        self._grace_s = grace_s
        self._directory = Directory(store, news)
        self._endpoints = Endpoints()

    async def close(self) -> None:
        """Close the connections; a second call does nothing."""
        await self._endpoints.close()

    def forget(self, run_id: str) -> None:
        """The upstreams of this run changed."""
        self._directory.forget(run_id)

    async def find(self, run_id: str, model: str) -> OutsideModel | None:
        """The upstream that `model` belongs to, None where the policy answers. Raises Refusal where one is misconfigured."""
        return await self._directory.find(run_id, model)

    async def names(self, run_id: str) -> list[str]:
        """The models that a run's upstreams have by name; what a pattern stands for is not known here."""
        return await self._directory.names(run_id)

    async def answer(
        self,
        outside: OutsideModel,
        wire: WireFormat,
        route: str,
        data: JSON,
        body: bytes,
        attempt: Attempt,
        incoming: Incoming,
        reply: Reply,
    ) -> None:
        """Answer one request; `data` is what `body` says. Raises Refusal and the errors of the store."""
        started_ns = time.time_ns()
        request = wire.parse(data, trained=False)
        conversation, plan = await self._planned(request, attempt)
        job = _Job(
            id=str(uuid7()),
            outside=outside,
            wire=wire,
            attempt=attempt,
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
            question = self._question(job, route, incoming, data, body)
            await self._run(job, question, incoming)
        except Refusal as refusal:
            await self._leave_span(job, None, refusal.message)
            raise
        finally:
            self._metrics.in_flight.dec()
            if not job.recorded:
                conversation.withdraw(plan)

    # --- one call, step by step -------------------------------------------------------------------------------------

    async def _planned(self, request: Request, attempt: Attempt) -> tuple[Conversation, Plan]:
        """The call's place among the attempt's."""
        conversation = await self._attempts.conversation(attempt, None)
        plan = conversation.plan_text(request.messages, request.tools)
        if attempt.complete or plan.parent is not None or not _answers(request.messages):
            return conversation, plan
        conversation.withdraw(plan)  # what it continues may have gone through another gateway
        await self._attempts.refresh(attempt)
        return conversation, conversation.plan_text(request.messages, request.tools)

    def _question(self, job: _Job, route: str, incoming: Incoming, data: JSON, body: bytes) -> Question:
        settings, choices = job.outside.settings, data.get("n")
        return Question(
            outside=job.outside,
            route=route,
            headers=request_headers(job.outside, route, incoming.headers),
            body=body if settings.rename is None else orjson.dumps({**data, "model": settings.rename}),
            choices=max(1, choices) if isinstance(choices, int) else 1,
            deadline_s=asyncio.get_running_loop().time() + settings.timeout_s,
            new_reader=job.wire.reader,
            send=lambda events, kind: self._send(job, events, kind),
            reader=job.wire.reader(),
        )

    async def _run(self, job: _Job, question: Question, incoming: Incoming) -> None:
        answered = await self._asked(job, question, incoming)
        if answered is None:
            await self._record(job, question, ABANDONED)
        elif answered.failure is None:
            await self._record(job, question, question.reader.finish_reason)
            await _deliver(job.reply, answered)
        else:
            self._metrics.call(job.wire.NAME, _result(answered.status))
            await self._leave_span(job, answered.status, answered.failure)
            if any(name.endswith(b"request-id") for name, _ in answered.headers):
                job.reply.request_id = ""  # theirs counts
            await _deliver(job.reply, answered)

    async def _asked(self, job: _Job, question: Question, incoming: Incoming) -> Answered | None:
        """What the upstream said; None where the agent went away and the grace period ended first. Raises Refusal."""
        try:
            async with asyncio.timeout_at(question.deadline_s) as limit:
                watch = asyncio.ensure_future(self._watch(job, question, incoming, limit))
                try:
                    return await self._endpoints.ask(question)
                finally:
                    watch.cancel()
        except TimeoutError:
            if job.gone:
                return None
            sentence = f"upstream {job.outside.name!r} did not answer within {job.outside.settings.timeout_s:g} s"
            raise Refusal(sentence, status=504, type="server_error", code="deadline_exceeded") from None

    async def _watch(self, job: _Job, question: Question, incoming: Incoming, limit: asyncio.Timeout) -> None:
        """When the agent has gone, the call goes on for the grace period."""
        await incoming.gone()
        job.gone = True
        if not limit.expired():
            limit.reschedule(min(asyncio.get_running_loop().time() + self._grace_s, question.deadline_s))

    async def _send(self, job: _Job, events: bytes, content_type: bytes) -> bool:
        if job.gone:
            return False
        if job.reply.started:
            await job.reply.more(events)
        else:
            self._metrics.first_token((time.time_ns() - job.started_ns) / 1e9)
            await job.reply.start_events(events, content_type)
        return True

    # --- what is kept -----------------------------------------------------------------------------------------------

    async def _record(self, job: _Job, question: Question, finish_reason: str) -> None:
        """Make the call durable, then let later requests continue it."""
        reader = question.reader
        used = {"prompt_tokens": reader.prompt_tokens, "sampled_tokens": reader.sampled_tokens}
        call = _call(job, reader.message, used, finish_reason)
        await self._store.append_calls([call])
        self._metrics.record(call)
        if finish_reason == ABANDONED:
            self._metrics.outside(job.outside.name, "abandoned")
            return
        self._metrics.outside(job.outside.name, "recorded")
        job.conversation.record(job.plan, call.id, [], call.answer)
        job.recorded = True

    async def _leave_span(self, job: _Job, status: int | None, error: str) -> None:
        """The trace of a call that was not answered; `status` where the upstream gave one."""
        self._metrics.outside(job.outside.name, _result(status))
        rollout, upstream = job.attempt.rollout, job.outside.name
        span = Span(
            id=job.id,
            run_id=rollout.run_id,
            rollout_id=rollout.id,
            attempt=job.attempt.number,
            name=FAILED,
            attributes={"model": job.request.model, "upstream": upstream, "status": status, "error": error[:500]},
            started_ns=job.started_ns,
            finished_ns=time.time_ns(),
        )
        await self._store.append_spans([span])


async def _deliver(reply: Reply, answered: Answered) -> None:
    if not answered.streamed:
        await reply.whole(answered.status, answered.body, answered.content_type, answered.headers)
        return
    if not reply.started:
        await reply.start_events(b"", answered.content_type)
    await reply.end(answered.body)


def _answers(messages: list[JSON]) -> bool:
    return any(message["role"] == "assistant" for message in messages)


def _result(status: int | None) -> Literal["refused", "failed"]:
    return "refused" if status is not None and 400 <= status < 500 else "failed"


def _failed(job: _Job, refusal: Refusal) -> bytes:
    """How a stream that has begun says that it cannot go on."""
    events = job.wire.stream(job.request, job.id, job.request.model, job.started_ns // 10**9, 0)
    return events.failed(refusal)


def _sampling(data: JSON) -> Sampling:
    """How the agent asked an outside model to sample, in so far as a record has a place for it."""

    def number(*names: str) -> Any:
        return next((data[name] for name in names if type(data.get(name)) in (int, float)), None)

    temperature, top_p = number("temperature"), number("top_p")
    return Sampling(
        temperature=1.0 if temperature is None else float(temperature),
        top_p=1.0 if top_p is None else float(top_p),
        max_tokens=number("max_completion_tokens", "max_output_tokens", "max_tokens"),
    )


def _call(job: _Job, answer: JSON, used: JSON, finish_reason: str) -> Call:
    """The record: no tokens, and no policy."""
    plan, rollout = job.plan, job.attempt.rollout
    return Call(
        id=job.id,
        run_id=rollout.run_id,
        rollout_id=rollout.id,
        attempt=job.attempt.number,
        parent_id=plan.parent.call_id if plan.parent is not None else None,
        suffix_ids=[],
        sampled_ids=[],
        logprobs=[],
        versions=[],
        prompt_tokens=0,
        policy="",
        model=job.request.model,
        protocol=job.wire.NAME,
        sampling=job.sampling,
        history_hash=job.conversation.history_hash(plan, answer).hex(),
        request_hash=plan.request_hash.hex(),
        messages=plan.messages,
        answer=answer,
        tools=job.request.tools if plan.parent is None else None,
        usage=used if any(used.values()) else {},
        agent=job.agent,
        finish_reason=finish_reason,
        started_ns=job.started_ns,
        finished_ns=time.time_ns(),
        span_id=job.span_id,
    )
