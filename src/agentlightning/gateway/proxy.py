"""The proxy: a model call from bytes in to bytes out, for every protocol.

Driven by the ASGI app for paths under ``/r/{rollout}/{attempt}/v1`` and, with a key, under ``/v1``. For one call it finds
the attempt, plans the exact prompt, samples, parses, records, and only then sends the last byte: an agent cannot finish
before its tokens are durable. It knows no wire format (protocols/), no template (rendering/) and no engine (upstreams.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson
from uuid_utils import uuid7

from agentlightning.errors import AgentLightningError, EngineError, InputError
from agentlightning.gateway.auth import Attempt, Attempts
from agentlightning.gateway.metrics import GatewayMetrics
from agentlightning.gateway.reply import Incoming, Reply
from agentlightning.gateway.upstreams import Policy, Sampled, Upstreams
from agentlightning.protocols import chat
from agentlightning.protocols.neutral import Answer, Delta, Refusal, Request, TokenLogprob, ToolCall
from agentlightning.rendering.conversation import Conversation, Plan
from agentlightning.rendering.renderer import RenderError
from agentlightning.rendering.tools import held_back
from agentlightning.store.base import LightningStore, reward_number
from agentlightning.types import JSON, Call, Reward, Sampling, Span

log = logging.getLogger(__name__)

UNKNOWN_ROUTE = "gateway.unknown_route"
"""Name of the span that a request to a wrong path leaves, so that a rollout without calls can be explained."""


@dataclass(slots=True, kw_only=True)
class Job:
    """One model call under way."""

    id: str
    attempt: Attempt
    request: Request
    policy: Policy
    conversation: Conversation
    plan: Plan
    seed: int
    sampling: Sampling
    started_ns: int
    sampled: Sampled


class Proxy:
    """Answers agents."""

    def __init__(
        self, store: LightningStore, attempts: Attempts, upstreams: Upstreams, metrics: GatewayMetrics
    ) -> None:
        self._store = store
        self._attempts = attempts
        self._upstreams = upstreams
        self._metrics = metrics
        self._pending: dict[tuple[str, int, bytes], asyncio.Future[Answer]] = {}

    async def __call__(self, incoming: Incoming, reply: Reply) -> None:
        """Answer one request; whatever goes wrong becomes an error in the protocol's shape."""
        try:
            await self._answer(incoming, reply)
        except Refusal as refusal:
            await self._refuse(reply, refusal)
        except RenderError as cause:
            await self._refuse(reply, Refusal(str(cause), param="messages"))
        except InputError as cause:
            await self._refuse(reply, Refusal(str(cause), status=cause.http_status))
        except AgentLightningError as cause:
            code = "invalid_engine_response" if isinstance(cause, EngineError) else "store_unavailable"
            await self._refuse(reply, Refusal(str(cause), status=cause.http_status, type="server_error", code=code))
        except Exception:
            log.exception("a request to %s failed", incoming.path)
            await self._refuse(
                reply, Refusal("the gateway failed; its log says why", status=500, type="server_error", code="internal")
            )

    async def _refuse(self, reply: Reply, refusal: Refusal) -> None:
        self._metrics.refused.inc()
        if reply.started:
            await reply.end(b"data: " + chat.error(refusal) + b"\n\n")
        else:
            await reply.whole(refusal.status, chat.error(refusal))

    async def _answer(self, incoming: Incoming, reply: Reply) -> None:
        identity = await self._attempts.identify(incoming.named, incoming.key, incoming.client)
        route, method = incoming.route, incoming.method
        if route == "chat/completions" and method == "POST":
            await self._complete(await self._attempts.running(identity), incoming, reply)
        elif route == "reward" and method == "POST":
            await self._reward(await self._attempts.running(identity), incoming, reply)
        elif method == "GET" and (route == "models" or (route or "").startswith("models/")):
            await self._models(await self._attempts.running(identity), incoming, reply)
        else:
            await self._unknown(identity, incoming)

    # --- a model call -----------------------------------------------------------------------------------------------

    async def _complete(self, attempt: Attempt, incoming: Incoming, reply: Reply) -> None:
        started_ns = time.time_ns()
        request = chat.parse(await incoming.body())
        run_id = attempt.rollout.run_id
        policy = await self._upstreams.policy(run_id, request.model)
        conversation = await self._attempts.conversation(attempt, policy.renderer)
        if incoming.is_retry and await self._replay(attempt, conversation, request, reply):
            return
        job = self._job(attempt, request, policy, conversation, started_ns)
        pending = (attempt.rollout.id, attempt.number, job.plan.request_hash)
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._pending[pending] = answered
        self._metrics.in_flight.inc()
        try:
            if request.stream:
                answer = await self._stream(job, reply)
            else:
                answer = await self._whole(job, reply)
            answered.set_result(answer)
        except BaseException:
            conversation.withdraw(job.plan)
            raise
        finally:
            self._metrics.in_flight.dec()
            answered.cancel()
            if self._pending.get(pending) is answered:
                del self._pending[pending]
        self._metrics.seconds.observe((time.time_ns() - started_ns) / 1e9)

    async def _whole(self, job: Job, reply: Reply) -> Answer:
        job.sampled = await self._upstreams.generate(job.attempt.rollout.run_id, job.policy, _engine_request(job))
        answer = _answer(job)
        await self._record(job, answer)
        await reply.whole(200, chat.body(answer))
        return answer

    async def _stream(self, job: Job, reply: Reply) -> Answer:
        wire = chat.Stream(job.request, job.id, job.request.model or job.policy.model, job.started_ns // 10**9)
        live = _Live(job)
        async for ids in self._upstreams.stream(
            job.attempt.rollout.run_id, job.policy, _engine_request(job), job.sampled
        ):
            if not reply.started:
                await reply.start_events(wire.first())
            delta = live.feed(ids)
            if delta.content or delta.reasoning:
                await reply.more(wire.delta(delta, live.logprobs()))
        answer = _answer(job)
        await self._record(job, answer)
        if not reply.started:
            await reply.start_events(wire.first())
        delta = live.rest(answer)
        tokens = live.logprobs()
        rest = wire.delta(delta, tokens) if delta.content or delta.reasoning or tokens else b""
        await reply.end(rest + wire.last(answer))
        return answer

    def _job(
        self, attempt: Attempt, request: Request, policy: Policy, conversation: Conversation, started_ns: int
    ) -> Job:
        plan = conversation.plan(request.messages, request.tools)
        rollout = attempt.rollout
        limits = [limit for limit in (rollout.sampling.max_tokens, request.max_tokens) if limit is not None]
        place = f"{policy.seed}|{rollout.group_id}|{rollout.replica}|{plan.position}|".encode() + plan.request_hash
        return Job(
            id=str(uuid7()),
            attempt=attempt,
            request=request,
            policy=policy,
            conversation=conversation,
            plan=plan,
            seed=int.from_bytes(blake2b(place, digest_size=8).digest(), "big") >> 1,
            sampling=Sampling(
                temperature=rollout.sampling.temperature,
                top_p=rollout.sampling.top_p,
                max_tokens=min(limits, default=None),
            ),
            started_ns=started_ns,
            sampled=Sampled(),
        )

    async def _record(self, job: Job, answer: Answer) -> None:
        """Make the call durable, then let later requests continue it."""
        plan, rollout, message = job.plan, job.attempt.rollout, chat.message(answer)
        call = Call(
            id=job.id,
            run_id=rollout.run_id,
            rollout_id=rollout.id,
            attempt=job.attempt.number,
            parent_id=plan.parent.call_id if plan.parent is not None else None,
            suffix_ids=plan.suffix_ids,
            sampled_ids=job.sampled.ids,
            logprobs=job.sampled.logprobs,
            versions=job.sampled.versions,
            prompt_tokens=len(plan.prompt_ids),
            policy=job.policy.alias,
            model=job.request.model,
            protocol=chat.NAME,
            sampling=job.sampling,
            history_hash=job.conversation.history_hash(plan, message).hex(),
            request_hash=plan.request_hash.hex(),
            messages=job.request.messages[plan.known :],
            answer=message,
            tools=job.request.tools if plan.parent is None else None,
            fork_cause=plan.fork_cause,
            finish_reason=answer.finish_reason,
            started_ns=job.started_ns,
            finished_ns=time.time_ns(),
        )
        await self._store.append_calls([call])
        job.conversation.record(plan, job.id, job.sampled.ids, message)
        metrics = self._metrics
        metrics.recorded.inc()
        metrics.prompt_tokens.inc(call.prompt_tokens)
        metrics.sampled_tokens.inc(len(call.sampled_ids))
        if plan.fork_cause is not None:
            metrics.forked(plan.fork_cause)

    async def _replay(self, attempt: Attempt, conversation: Conversation, request: Request, reply: Reply) -> bool:
        """Answer an SDK's retry with what its first try recorded or is about to; False where there is nothing."""
        request_hash = conversation.request_hash(request.messages, request.tools)
        pending = self._pending.get((attempt.rollout.id, attempt.number, request_hash))
        if pending is not None:
            await asyncio.wait([pending])
            if pending.cancelled():
                return False
            answer = pending.result()
        else:
            call_id = conversation.unanswered(request_hash)
            calls = await self._store.calls([attempt.rollout.id], attempt.number) if call_id is not None else []
            call = next((call for call in calls if call.id == call_id), None)
            if call is None:
                return False
            answer = _recorded_answer(call, request, conversation)
        self._metrics.replayed.inc()
        if request.stream:
            wire = chat.Stream(request, answer.call_id, answer.model, answer.created_s)
            delta = Delta(content=answer.content or "", reasoning=answer.reasoning or "")
            await reply.start_events(wire.first())
            await reply.end(wire.delta(delta, answer.logprobs) + wire.last(answer))
        else:
            await reply.whole(200, chat.body(answer))
        return True

    # --- everything else --------------------------------------------------------------------------------------------

    async def _models(self, attempt: Attempt, incoming: Incoming, reply: Reply) -> None:
        policies = await self._upstreams.policies(attempt.rollout.run_id)
        await reply.whole(200, chat.models([policy.model for policy in policies.values()]))

    async def _reward(self, attempt: Attempt, incoming: Incoming, reply: Reply) -> None:
        data = _object(await incoming.body())
        if "value" not in data:
            raise Refusal('value: expected {"value": <a finite number>}, got none', status=422, param="value")
        name = data.get("name", "reward")
        if not isinstance(name, str) or not name:
            raise Refusal(f"name: expected a text, got {name!r}", status=422, param="name")
        call_id = data.get("call_id")
        if call_id is not None:
            call_id = chat.call_id(call_id) if isinstance(call_id, str) else ""
            if not await self._has_call(attempt, call_id):
                raise Refusal("call_id: expected the id of a call of this attempt", status=422, param="call_id")
        reward = Reward(
            id=str(uuid7()),
            run_id=attempt.rollout.run_id,
            rollout_id=attempt.rollout.id,
            attempt=attempt.number,
            value=reward_number(data["value"], "value"),
            name=name,
            call_id=call_id,
            source="posted",
            created_ns=time.time_ns(),
        )
        await self._store.record_rewards([reward])
        await reply.whole(200, orjson.dumps({"id": reward.id, "value": reward.value}))

    async def _has_call(self, attempt: Attempt, call_id: str) -> bool:
        if attempt.conversation is not None:
            return call_id in attempt.conversation
        return any(call.id == call_id for call in await self._store.calls([attempt.rollout.id], attempt.number))

    async def _unknown(self, identity: tuple[str, int], incoming: Incoming) -> None:
        attempt = await self._attempts.running(identity)
        now = time.time_ns()
        span = Span(
            id=str(uuid7()),
            run_id=attempt.rollout.run_id,
            rollout_id=attempt.rollout.id,
            attempt=attempt.number,
            name=UNKNOWN_ROUTE,
            attributes={"path": incoming.path, "method": incoming.method},
            started_ns=now,
            finished_ns=now,
        )
        await self._store.append_spans([span])
        base = incoming.base_url(identity if incoming.named is not None else None)
        raise Refusal(
            f"no route {incoming.method} {incoming.path}: the base URL of an OpenAI client is {base} (it ends in /v1, "
            "once); routes under it are chat/completions, models and reward",
            status=404,
            code="unknown_route",
        )


# --- one call, step by step -------------------------------------------------------------------------------------------


def _engine_request(job: Job) -> JSON:
    parameters: JSON = {
        "temperature": job.sampling.temperature,
        "top_p": job.sampling.top_p,
        "seed": job.seed,
        "logprobs": 0,
        "stop": list(job.request.stop),
        "stop_token_ids": [],
    }
    if job.sampling.max_tokens is not None:
        parameters["max_tokens"] = job.sampling.max_tokens
    return {
        "request_id": job.id,
        "model": job.policy.alias,
        "token_ids": job.plan.prompt_ids,
        "stream": job.request.stream,
        "sampling_params": parameters,
    }


def _answer(job: Job) -> Answer:
    renderer, request, sampled = job.policy.renderer, job.request, job.sampled
    body, _ = renderer.split_end(sampled.ids)
    text = _cut(renderer.decode(body, special=renderer.parser.needs_special), request.stop)
    parsed = renderer.parser.parse(text, job.plan.prompt_text, request.tools, request.parse_tools)
    calls = tuple(
        ToolCall(id=f"call_{job.seed:016x}{index}", name=name, arguments=arguments)
        for index, (name, arguments) in enumerate(parsed.tool_calls)
    )
    finish = "length" if sampled.finish_reason == "length" else "tool_calls" if calls else "stop"
    return Answer(
        call_id=job.id,
        model=request.model or job.policy.model,
        created_s=job.started_ns // 10**9,
        content=parsed.content if parsed.content or not calls else None,
        reasoning=parsed.reasoning,
        tool_calls=calls,
        finish_reason=finish,
        prompt_tokens=len(job.plan.prompt_ids),
        sampled_tokens=len(sampled.ids),
        logprobs=_token_logprobs(job, 0, len(body)) if request.logprobs else None,
    )


def _recorded_answer(call: Call, request: Request, conversation: Conversation) -> Answer:
    renderer = conversation.renderer
    body, _ = renderer.split_end(call.sampled_ids)
    tokens = tuple(
        TokenLogprob(text=renderer.token_text(index), logprob=logprob)
        for index, logprob in zip(body, call.logprobs, strict=False)
    )
    return Answer(
        call_id=call.id,
        model=call.model,
        created_s=call.started_ns // 10**9,
        content=call.answer.get("content"),
        reasoning=call.answer.get("reasoning_content"),
        tool_calls=tuple(
            ToolCall(id=one["id"], name=one["function"]["name"], arguments=one["function"]["arguments"])
            for one in call.answer.get("tool_calls", ())
        ),
        finish_reason=call.finish_reason,
        prompt_tokens=call.prompt_tokens,
        sampled_tokens=len(call.sampled_ids),
        logprobs=tokens if request.logprobs else None,
    )


def _token_logprobs(job: Job, start: int, end: int) -> tuple[TokenLogprob, ...]:
    renderer, sampled = job.policy.renderer, job.sampled
    return tuple(
        TokenLogprob(text=renderer.token_text(sampled.ids[i]), logprob=sampled.logprobs[i]) for i in range(start, end)
    )


def _cut(text: str, stops: tuple[str, ...]) -> str:
    """The text before the first stop string."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


class _Live:
    """The text of one streamed answer that may already be sent."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._text = job.policy.renderer.text_stream()
        self._splitter = job.policy.renderer.parser.splitter(job.plan.prompt_text, job.request.parse_tools)
        self._raw = ""
        """Text that a stop string could still cut."""
        self._content = 0
        self._reasoning = 0
        self._tokens = 0

    def feed(self, ids: list[int]) -> Delta:
        """What these ids allow to send."""
        stops = self._job.request.stop
        self._raw += self._text.feed(ids)
        ready = self._raw[: len(self._raw) - held_back(self._raw, stops)] if stops else self._raw
        if _cut(self._raw, stops) != self._raw:
            return Delta()
        self._raw = self._raw[len(ready) :]
        content, reasoning = self._splitter.feed(ready)
        self._content += len(content)
        self._reasoning += len(reasoning)
        return Delta(content=content, reasoning=reasoning)

    def rest(self, answer: Answer) -> Delta:
        """What was held back of the final answer."""
        return Delta(
            content=(answer.content or "")[self._content :], reasoning=(answer.reasoning or "")[self._reasoning :]
        )

    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Of the tokens since the last time; None where they were not asked for."""
        job = self._job
        if not job.request.logprobs:
            return None
        body, _ = job.policy.renderer.split_end(job.sampled.ids)
        start, self._tokens = self._tokens, len(body)
        return _token_logprobs(job, start, len(body))


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as cause:
        raise Refusal(f"the body is not valid JSON: {cause}", status=422) from None
    if not isinstance(data, dict):
        raise Refusal(f"the body: expected a JSON object, got {type(data).__name__}", status=422)
    return data
