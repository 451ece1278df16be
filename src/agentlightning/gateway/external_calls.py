"""ExternalCalls: calls for models that are not trained: a judge, a user simulator, an embedding, a hosted policy.

Driven by the proxy. The request goes out in its own protocol as it came, with the server's key in place of the attempt's;
the answer comes back byte for byte, and its last bytes wait until the call is recorded. The record has no tokens and is
never trained on. A call that fails leaves a span; where limits count tokens, one that may cost something is recorded as
well. Knows no engine and no template.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import quote

import orjson
from uuid_utils import uuid7

from agentlightning.gateway.asgi_response import AgentResponse, end_within
from agentlightning.gateway.attempts import AttemptCache, TrackedAttempt
from agentlightning.gateway.external_client import (
    Exchange,
    ExternalClient,
    ExternalDirectory,
    ExternalModel,
    ExternalResponse,
    request_headers,
)
from agentlightning.gateway.metrics import GatewayMetrics
from agentlightning.gateway.policy.recorded import recorded_answer
from agentlightning.gateway.policy.response_decoder import AgentCall, CallJob, send_recorded
from agentlightning.protocols import generate_content
from agentlightning.protocols.base import EVENTS, ApiError, CompletionRequest
from agentlightning.records import ABANDONED, JSON, Call, Sampling, Span
from agentlightning.rendering.conversation import Conversation, PromptPlan
from agentlightning.rendering.graph import RequestView
from agentlightning.runtime import json_text
from agentlightning.store.base import LightningStore

BYTES_PER_TOKEN = 4

MAX_ASKED_TOKENS = 1 << 18
"""Of one call: a request may ask for any number, and none that failed may use up a run's budget alone."""

FAILED = "gateway.external_failed"
"""Name of the span that a failed call leaves."""


@dataclass(slots=True, kw_only=True)
class _ExternalJob(CallJob):
    """One call under way."""

    external: ExternalModel
    asked: int
    """Tokens of the answer that the request asks for, as far as it says."""
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

    async def answer(self, external: ExternalModel, call: AgentCall, data: JSON, body: bytes) -> None:
        """Answer one request; `data` is what `body` says. Raises ApiError and the errors of the store."""
        started_ns = time.time_ns()
        attempt, reply = call.attempt, call.reply
        request = call.wire.parse(data, trained=False)
        if call.wire.NAME == generate_content.NAME:
            data = {**data, **generate_content.external_settings(data)}
        if call.admission.counts_tokens and data.get("background") not in (None, False):
            raise ApiError(
                "background: expected false, since this run limits tokens: what a response in the background "
                "costs is known only after its call",
                param="background",
            )
        sampling = _sampling(data)
        asked = _asked_tokens(sampling, data.get("n"))
        await call.admission.begin(call.request, _prompt_tokens(body) + asked)
        conversation, plan = await self._planned(request, attempt)
        job = _ExternalJob(
            id=str(uuid7()),
            external=external,
            asked=asked,
            call=call,
            request=request,
            sampling=sampling,
            conversation=conversation,
            plan=plan,
            started_ns=started_ns,
        )
        reply.request_id = job.id
        reply.failed = lambda refusal: _failed(job, refusal)
        self._metrics.in_flight.inc()
        exchange: Exchange | None = None
        try:
            if await self._replayed(job, data):
                return
            exchange = self._exchange(job, data, body)
            await self._run(job, exchange)
        except asyncio.CancelledError:  # the server ends
            if exchange is not None and exchange.executed and not job.recorded:
                await self._record(job, exchange, ABANDONED)
            raise
        except ApiError as refusal:
            if exchange is not None:
                await self._charge(job, exchange)
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

    async def _replayed(self, job: _ExternalJob, data: JSON) -> bool:
        """Tells whether the call of a forked rollout was answered from the record."""
        replay, request = await self._attempts.replay(job.call.attempt), job.request
        if replay is None or data.get("logprobs") or data.get("n") not in (None, 1):
            return False
        found = replay.take_external(job.plan.request_hash.hex(), request.model, job.call.wire.NAME, job.sampling)
        if found is None:
            return False
        try:
            call = replace(job.record(found.completion, found.finish_reason), replayed_id=found.id)
            await self._keep(job, call)
        except BaseException:
            replay.give_back(found)
            raise
        answer = recorded_answer([call], call.id, None)
        assert answer is not None
        await send_recorded(job.call, request, answer)
        return True

    def _exchange(self, job: _ExternalJob, data: JSON, body: bytes) -> Exchange:
        incoming = job.call.request
        route = incoming.route or ""
        settings = job.external.settings
        headers = request_headers(job.external, route, incoming.headers)
        if job.call.wire.NAME == generate_content.NAME:  # the path names the model, not the body
            route = _google_route(route, settings.rename or job.request.model, job.request.stream_type == EVENTS)
        elif (model := settings.rename or incoming.model) is not None:
            body = json_text.dumps({**data, "model": model})
        return Exchange(
            external=job.external,
            route=route,
            headers=headers,
            body=body,
            choices=_count(data.get("n")),
            deadline_s=asyncio.get_running_loop().time() + settings.timeout_s,
            new_reader=job.call.wire.reader,
            send=lambda events, kind: self._send(job, events, kind),
            reader=job.call.wire.reader(),
        )

    async def _run(self, job: _ExternalJob, exchange: Exchange) -> None:
        response = await self._send_with_deadline(job, exchange)
        if response is None:
            await self._record(job, exchange, ABANDONED)
            self._metrics.external(job.external.name, "abandoned")
        elif response.failure is None:
            await self._record(job, exchange, exchange.reader.finish_reason)
            if job.request.stream and job.request.stream_type != EVENTS:
                response = replace(response, body=b"[" + response.body + b"]")
            await _deliver(job.call.reply, response)
        else:
            self._metrics.call(job.call.wire.NAME, _result(response.status))
            await self._charge(job, exchange)
            await self._leave_span(job, response.status, response.failure)
            if any(name.endswith(b"request-id") for name, _ in response.headers):
                job.call.reply.request_id = ""  # theirs counts
            await _deliver(job.call.reply, response)

    async def _send_with_deadline(self, job: _ExternalJob, exchange: Exchange) -> ExternalResponse | None:
        """The external model's response; None if the agent disconnected and the grace period ended first. Raises
        ApiError."""
        try:
            async with asyncio.timeout(job.external.settings.timeout_s) as timeout:
                watch = job.call.request.on_disconnect(lambda: self._abandon(job, timeout))
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

    def _abandon(self, job: _ExternalJob, timeout: asyncio.Timeout) -> None:
        """The agent has disconnected: the call goes on for the grace period, or to its end where limits need to know what it
        cost: the external model goes on, too."""
        job.gone = True
        if not job.call.admission.counts_tokens:
            end_within(timeout, self._grace_s)

    async def _send(self, job: _ExternalJob, events: bytes, content_type: bytes) -> bool:
        if job.gone:
            return False
        if job.call.reply.started:
            await job.call.reply.more(events)
        else:
            self._metrics.first_token.observe((time.time_ns() - job.started_ns) / 1e9)
            await job.call.reply.start_events(events, content_type)
        return True

    # --- what is kept -----------------------------------------------------------------------------------------------

    async def _record(self, job: _ExternalJob, exchange: Exchange, finish_reason: str) -> None:
        """Make the call durable, then let later requests continue it unless it was abandoned."""
        used = _usage(exchange, job.asked, finish_reason == ABANDONED, job.call.admission.counts_tokens)
        await self._keep(job, job.record(exchange.reader.message, finish_reason, usage=used))

    async def _charge(self, job: _ExternalJob, exchange: Exchange) -> None:
        """Record a call that failed and that the external model may have executed, where limits count it."""
        if job.call.admission.has_totals and exchange.executed:
            await self._record(job, exchange, ABANDONED)

    async def _keep(self, job: _ExternalJob, call: Call) -> None:
        await self._store.append_calls([call])
        job.call.admission.record([call])
        self._metrics.record(call)
        if call.finish_reason != ABANDONED:
            self._metrics.external(job.external.name, "recorded" if call.replayed_id is None else "replayed")
            job.conversation.record(job.plan, call.id, [], call.completion)
            job.recorded = True

    async def _leave_span(self, job: _ExternalJob, status: int | None, error: str) -> None:
        """The trace of a call that was not answered; `status` where the external model gave one."""
        self._metrics.external(job.external.name, _result(status))
        if not job.call.attempt.leaves_span(FAILED):
            return
        rollout = job.call.attempt.rollout
        span = Span(
            id=job.id,
            run_id=rollout.run_id,
            rollout_id=rollout.id,
            attempt=job.call.attempt.number,
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
    events = job.call.wire.stream(job.request, job.id, job.request.model, job.started_ns // 10**9, 0)
    return events.failed(refusal)


def _usage(exchange: Exchange, asked: int, cut_off: bool, counts: bool) -> JSON:
    """Tokens of a call: as reported, and where limits need them (`counts`) estimated from what came otherwise. Tries that
    may have been executed and of which nothing came cost what was `asked`.

    Streams have a report only where it is asked for: four bytes count as a token, as in English text.
    """
    reader, lost = exchange.reader, exchange.executed - exchange.answered
    reported: JSON = {"prompt_tokens": reader.prompt_tokens, "sampled_tokens": reader.sampled_tokens}
    known = any(reported.values())
    if not counts or (known and not cut_off and not lost):
        return reported if known else {}
    prompt, came = _prompt_tokens(exchange.body), 0
    if cut_off or not known:
        came = -(-max(len(orjson.dumps(reader.message)), reader.choice_bytes) // BYTES_PER_TOKEN)
    return {
        "prompt_tokens": exchange.answered * (reader.prompt_tokens or prompt) + lost * prompt,
        "sampled_tokens": exchange.answered * max(reader.sampled_tokens, came) + lost * asked,
        "estimated": True,
    }


def _prompt_tokens(body: bytes) -> int:
    return -(-len(body) // BYTES_PER_TOKEN)


def _asked_tokens(sampling: Sampling, choices: Any) -> int:
    """Tokens that all choices of an answer may have, as far as the request says.

    >>> _asked_tokens(Sampling(max_tokens=500), 2), _asked_tokens(Sampling(), None)
    (1000, 0)
    """
    return int(min(max(0, sampling.max_tokens or 0) * _count(choices), MAX_ASKED_TOKENS))


def _count(choices: Any) -> int:
    return max(1, choices) if isinstance(choices, int) else 1


def _google_route(route: str, model: str, as_events: bool) -> str:
    """The route of a call in Google's protocol, for this model. A stream that is an array comes whole.

    >>> _google_route("models:streamGenerateContent", "gemini-3-pro", True)
    'models/gemini-3-pro:streamGenerateContent?alt=sse'
    """
    streamed = as_events and route == "models:streamGenerateContent"
    return f"models/{quote(model)}:" + ("streamGenerateContent?alt=sse" if streamed else "generateContent")


def _sampling(data: JSON) -> Sampling:
    """The sampling parameters of a request, as far as the record has a place for them."""

    def number(*names: str) -> Any:
        return next((data[name] for name in names if type(data.get(name)) in (int, float)), None)

    temperature, top_p = number("temperature"), number("top_p")
    most = number("max_completion_tokens", "max_output_tokens", "max_tokens")
    whole = most is not None and most == most // 1 and 0 < most <= sys.maxsize  # no store could read another
    return Sampling(
        temperature=1.0 if temperature is None else float(temperature),
        top_p=1.0 if top_p is None else float(top_p),
        max_tokens=int(most) if whole else None,
    )
