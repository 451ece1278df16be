"""PolicyCalls: a call of the policy that is trained, from the agent's request to its response, for every protocol.

Driven by the proxy once it knows who calls and what for. For one call it plans the exact prompt, samples, parses, records,
and only then sends the last byte: an agent cannot finish before its tokens are durable. A call whose agent has gone goes on
for a grace period, so that a retry finds its completion, and is then recorded as far as it came. It knows no wire format
(protocols/), no template (rendering/) and no engine (policy/engine_router.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from uuid_utils import uuid7

from agentlightning.gateway.asgi_response import Deadline, DisconnectWatch
from agentlightning.gateway.attempts import AttemptCache, TrackedAttempt
from agentlightning.gateway.call_job import AgentCall
from agentlightning.gateway.metrics import GatewayMetrics
from agentlightning.gateway.policy.decoding import (
    decoding_of,
    ignored_header,
    recorded,
    request_digest,
    sampling_of,
    trained_cut,
    with_forced,
)
from agentlightning.gateway.policy.engine_client import PromptLogprob
from agentlightning.gateway.policy.engine_router import EngineRouter, Policy
from agentlightning.gateway.policy.grammar_checker import GrammarChecker
from agentlightning.gateway.policy.images import CallImages, check_prompt, read_images, read_placeholder
from agentlightning.gateway.policy.replayed_choices import replayed_choices
from agentlightning.gateway.policy.response_decoder import PolicyJob, ResponseDecoder, StreamedResponse, send_recorded
from agentlightning.gateway.policy.scoring import PromptScoring, prompt_table
from agentlightning.gateway.policy.sdk_retries import PendingCall, SdkRetries
from agentlightning.gateway.replay import recorded_tokens
from agentlightning.gateway.stored_responses import StoredResponses
from agentlightning.protocols.base import (
    ApiError,
    Choice,
    Completion,
    CompletionRequest,
    assistant_message,
)
from agentlightning.protocols.prompt_edits import apply_edits
from agentlightning.records import ABANDONED, JSON, TEMPLATE_KWARGS, Call
from agentlightning.rendering.call_chain import chain_messages
from agentlightning.rendering.conversation import Conversation, PromptPlan, prompt_hash
from agentlightning.rendering.graph import Digest, RequestView
from agentlightning.rendering.renderer import check_text
from agentlightning.store.base import LightningStore

log = logging.getLogger(__name__)

GRACE_S = 10.0
"""Grace period of a call whose agent has disconnected, in seconds."""

DEADLINE_S = 600.0
"""Time limit of one call, in seconds."""


class PolicyCalls:
    """The token path."""

    def __init__(
        self,
        store: LightningStore,
        attempts: AttemptCache,
        engine_router: EngineRouter,
        metrics: GatewayMetrics,
        responses: StoredResponses,
        *,
        grace_s: float = GRACE_S,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._store = store
        self._attempts = attempts
        self._engine_router = engine_router
        self._metrics = metrics
        self._responses = responses
        self._decoding = asyncio.Lock()
        """Held to decode an image: one at a time, since it takes a hundred times its file's bytes."""
        self._grace_s = grace_s
        self._deadline_s = deadline_s
        self._retries = SdkRetries(store)
        self._grammars = GrammarChecker()
        self._scoring = PromptScoring(engine_router)
        self._abandoned: set[Deadline] = set()
        """The deadlines of calls whose agents have gone."""

    def stop(self) -> None:
        """The server is about to end: nobody will come back for an abandoned call."""
        self._grace_s = 0.0
        for deadline in self._abandoned:
            deadline.shorten(0.0)

    def close(self) -> None:
        """End what was started beside the server."""
        self._grammars.close()

    async def answer(self, call: AgentCall, data: JSON) -> None:
        """Answer one request. Raises ApiError, RenderError and the errors of the store and of engines."""
        started_ns = time.time_ns()
        attempt, incoming, reply = call.attempt, call.request, call.reply
        request, policy, conversation, view, images = await self._understood(call, data)
        applied_edits: tuple[JSON, ...] = ()
        if request.context_edits:
            view, applied_edits = _edited(conversation, request, view)
        request, sampling, overridden_params, dropped = sampling_of(request, policy, attempt)
        if dropped:
            reply.ignored = ignored_header(dropped)
        digest = request_digest(request)
        request_hash = view.request_hash if request.prompt is None else prompt_hash(request.prompt)
        if incoming.is_retry or incoming.idempotency_key is not None:
            await self._attempts.refresh(attempt)
            found = await self._retries.find(call, policy.alias, conversation, request, request_hash, digest)
            if found is not None:
                self._metrics.call(call.wire.NAME, "replayed")
                found = replace(found, applied_edits=applied_edits, model=found.model or policy.model)
                await send_recorded(call, request, await self._scoring.complete(call, policy, request, found))
                return
        if request.max_tokens == 0:
            found = await self._scoring.complete(call, policy, request, _prompt_alone(policy, request))
            await send_recorded(call, request, found)
            return
        plan = _planned(conversation, request, view)
        try:
            decoding = await decoding_of(request, policy, plan.prompt_text, self._grammars, attempt, overridden_params)
            call.admission.begin()
            recorded_choices: list[Call] = []
            if attempt.rollout.fork is not None:
                replay = await self._attempts.replay(attempt)
                recorded_choices = replayed_choices(replay, policy, plan, view, digest, request, sampling.max_tokens)
        except BaseException:
            conversation.withdraw(plan)
            raise
        seeds = [_seed(policy, attempt, plan, request, index) for index in range(request.n)]
        job = PolicyJob(
            id=str(uuid7()),
            call=call,
            request=request,
            policy=policy,
            conversation=conversation,
            plan=plan,
            sampling=sampling,
            overridden_params=overridden_params,
            applied_edits=applied_edits,
            decoding=recorded(
                decoding,
                digest,
                trained_cut(attempt, sampling),
                read_placeholder(policy) if policy.renderer.images else None,
            ),
            started_ns=started_ns,
            seeds=seeds,
            images=images,
            replayed=recorded_choices,
            decoders=_decoders(policy, request, plan, seeds, recorded_choices),
        )
        await self._complete(job, request_hash, digest)

    async def count(self, call: AgentCall, data: JSON) -> tuple[int, int | None]:
        """The number of tokens in the prompt of a request, and before its context edits, where it has some."""
        request, _, conversation, view, _ = await self._understood(call, data)
        edited, _ = _edited(conversation, request, view)
        tokens = _count(conversation, request, edited)
        return tokens, _count(conversation, request, view) if request.context_edits else None

    async def _understood(
        self, call: AgentCall, data: JSON
    ) -> tuple[CompletionRequest, Policy, Conversation, RequestView, CallImages]:
        """The request with all its messages, the policy that it means, the graph that it belongs to, its view of it, and the
        images of the messages."""
        attempt = call.attempt
        request = call.wire.parse(data)
        policy = await self._engine_router.policy(attempt.rollout, request.model)
        conversation = await self._attempts.conversation(attempt, policy.renderer, policy.alias)
        if request.previous_id is not None:
            before = await self._responses.chain(attempt, request.previous_id)
            if not before:
                raise ApiError(
                    f"previous_response_id: this attempt has no response {data['previous_response_id']!r}",
                    status=404,
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            request = replace(request, messages=_after(chain_messages(before), request.messages))
        # Before anything is made of them: a chain is longer than the request that names it.
        check_text(request.messages, request.tools)
        images = CallImages()
        if any(isinstance(message.get("content"), list) for message in request.messages):
            images = await read_images(request, policy, self._store, self._decoding, call)
        if request.template_kwargs:
            request = _with_read_variables(request, policy)
        view = RequestView.of(
            request.messages, request.tools, expansions=images.expansions, template_kwargs=request.template_kwargs
        )
        if not attempt.complete and conversation.lacks_answer(view):
            await self._attempts.refresh(attempt)
        return request, policy, conversation, view, images

    # --- one call, step by step -------------------------------------------------------------------------------------

    async def _complete(self, job: PolicyJob, request_hash: Digest, digest: str) -> None:
        """Make the call where its retries find it."""
        request, prompt_ids = job.request, job.plan.prompt_ids
        if request.return_token_ids or request.repeats_prompt:
            job.request = replace(request, planned_ids=prompt_ids)
        job.call.reply.request_id = job.id
        pending = self._retries.begin(job.call, job.alias, request_hash, digest)
        self._metrics.in_flight.inc()
        try:
            await self._run(job, pending)
        except ApiError as refusal:
            if request.truncates and refusal.code == "context_length_exceeded":
                raise _would_truncate(len(prompt_ids), refusal) from refusal
            raise
        finally:
            self._metrics.in_flight.dec()
            self._retries.end(pending)

    async def _run(self, job: PolicyJob, pending: PendingCall) -> None:
        stream = StreamedResponse(job, self._metrics) if job.request.stream else None
        deadline = Deadline(self._deadline_s)
        watch = job.call.request.on_disconnect(lambda: self._abandon(job, pending, deadline))
        try:
            with deadline:
                if stream is not None and job.request.repeats_prompt:
                    echo = await self._scoring.echo(job.call, job.policy, job.request, job.plan.prompt_ids)
                    for index in range(job.request.n):
                        await stream.more(index, echo)
                await self._sample(job, stream)
            rest = [decoder.finish() for decoder in job.decoders]
            job.finished_ns = time.time_ns()
            answer = _answer(job)
            watch.look()
            recorded_as_gone = job.gone  # the watch may say so at any time from here on
            await self._record(job, answer)
            pending.call_id = answer.call_id
            await self._check_delivered(job, watch, recorded_as_gone)
            if stream is None:
                if job.request.repeats_prompt:
                    answer = await self._scoring.echoed(job.call, job.policy, job.request, answer)
                await job.call.reply.whole(200, job.call.wire.body(job.request, answer))
            else:
                await stream.last(rest, answer)
        except TimeoutError:
            await self._record_partial(job)
            if not job.gone:
                raise ApiError(
                    f"the completion did not finish within {self._deadline_s:g} s",
                    status=504,
                    type="server_error",
                    code="deadline_exceeded",
                ) from None
        finally:
            if pending.call_id is None:
                job.conversation.withdraw(job.plan)
                if job.replayed and job.call.attempt.replay is not None:
                    job.call.attempt.replay.give_back(job.replayed[0])
            watch.stop()
            self._abandoned.discard(deadline)

    async def _check_delivered(self, job: PolicyJob, watch: DisconnectWatch, recorded_as_gone: bool) -> None:
        """The agent may have gone while its call was being recorded; in every other case no second write is needed."""
        watch.look()
        if job.gone and not recorded_as_gone:
            ids = [job.call_id(index) for index in range(len(job.seeds))]
            await self._store.mark_delivered(job.call.attempt.rollout.id, job.call.attempt.number, ids, False)

    def _abandon(self, job: PolicyJob, pending: PendingCall, deadline: Deadline) -> None:
        """The agent has disconnected: the call goes on for the grace period, so that a retry finds it."""
        job.gone = pending.abandoned = True
        self._abandoned.add(deadline)
        deadline.shorten(self._grace_s)

    async def _sample(self, job: PolicyJob, stream: StreamedResponse | None) -> None:
        if len(job.seeds) == 1:
            await self._sample_one(job, 0, stream)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(job.seeds)):
                    group.create_task(self._sample_one(job, index, stream))
        except* Exception as several:
            raise several.exceptions[0] from None

    async def _sample_one(self, job: PolicyJob, index: int, stream: StreamedResponse | None) -> None:
        decoder = job.decoders[index]
        if job.replayed:
            decoder.sampled = recorded_tokens(job.replayed[index])
            if index == 0 and job.request.prompt_logprobs is not None:  # which no record keeps
                decoder.sampled.prompt_logprobs = await self._prompt_logprobs(job)
            if stream is not None:
                await stream.more(index, decoder.feed(decoder.sampled.ids))
            return
        request, affinity = job.engine_request(index), job.call.affinity
        if stream is None:
            decoder.sampled = await self._engine_router.generate(job.policy, request, affinity)
            if decoder.sampled.prompt_ids is not None:
                check_prompt(job.plan, decoder.sampled)
            return  # `finish` reads it at once, which costs a fraction of reading token by token
        async for ids in self._engine_router.stream(job.policy, request, decoder.sampled, affinity):
            if decoder.sampled.prompt_ids is not None:
                check_prompt(job.plan, decoder.sampled)
            await stream.more(index, decoder.feed(ids))

    async def _prompt_logprobs(self, job: PolicyJob) -> list[dict[int, PromptLogprob] | None] | None:
        """Asks the engine about the prompt; the one token that engines insist on sampling is dropped."""
        request = job.engine_request(0)
        request["sampling_params"]["max_tokens"] = 1
        return (await self._engine_router.generate(job.policy, request, job.call.affinity)).prompt_logprobs

    async def _record(self, job: PolicyJob, answer: Completion) -> None:
        """Make the calls durable, then let later requests continue them."""
        messages = [assistant_message(choice) for choice in answer.choices]
        calls = _records(job, messages, [choice.finish_reason for choice in answer.choices])
        if "grammar" in job.decoding and any(call.versions for call in calls):  # an answer that was given follows none
            calls = await with_forced(calls, job.policy.renderer)
        await self._keep_images(job)
        await self._store.append_calls(calls)
        job.call.admission.record(calls)
        for call in calls:
            job.conversation.record(job.plan, call.id, call.sampled_ids, call.completion)
            self._metrics.record(call)
        if job.plan.fork_cause is not None:
            log.info(
                "call %s forks: %s, %d sampled tokens are context only",
                job.id,
                job.plan.fork_cause,
                job.plan.untrained_tokens,
            )

    async def _keep_images(self, job: PolicyJob) -> None:
        """Before the calls that name them: whoever reads a call finds its images."""
        new = {image.hash: job.images.files[image.hash] for image in job.plan.images}
        if new:
            await self._store.put_files(job.call.attempt.rollout.run_id, job.call.attempt.rollout.id, new)

    async def _record_partial(self, job: PolicyJob) -> None:
        """The agent never saw the end of this call: what was sampled is kept, neither continued nor trained on."""
        for decoder in job.decoders:
            decoder.finish()
        messages = [assistant_message(decoder.choice()) for decoder in job.decoders]
        calls = _records(job, messages, [ABANDONED] * len(messages))
        await self._keep_images(job)
        await self._store.append_calls(calls)
        job.call.admission.record(calls)
        for call in calls:
            self._metrics.record(call)


def _prompt_alone(policy: Policy, request: CompletionRequest) -> Completion:
    """The completion of a request for no tokens, which samples and records nothing."""
    prompt = request.prompt
    ids = prompt if isinstance(prompt, list) else policy.renderer.encode(prompt or "")
    choice = Choice(content="", finish_reason="length", logprobs=() if request.logprobs else None)
    return Completion(
        call_id=str(uuid7()),
        model=request.model or policy.model,
        created_s=int(time.time()),
        prompt_tokens=len(ids),
        choices=(choice,) * request.n,
        prompt_ids=tuple(ids),
    )


def _would_truncate(tokens: int, refusal: ApiError) -> ApiError:
    return ApiError(
        f"truncation: auto would have to cut the prompt of {tokens} tokens ({refusal.message}); the gateway cuts no items, "
        "because the policy would be trained on prompts that nobody sent: send less of the history",
        param="truncation",
        code="context_length_exceeded",
    )


def _after(before: list[JSON], messages: list[JSON]) -> list[JSON]:
    """The messages of a request that continues a stored completion; instructions hold for one request only."""
    kept = [message for message in before if not message.get("instructions")]
    leading = next((at for at, message in enumerate(messages) if not message.get("instructions")), len(messages))
    return [*messages[:leading], *kept, *messages[leading:]]


def _with_read_variables(request: CompletionRequest, policy: Policy) -> CompletionRequest:
    """The request with those of its `chat_template_kwargs` that the policy's template reads; others are recorded."""
    unread = {name: value for name, value in request.template_kwargs.items() if name not in policy.renderer.variables}
    if not unread:
        return request
    read = {name: value for name, value in request.template_kwargs.items() if name not in unread}
    return replace(request, template_kwargs=read, not_applied={**request.not_applied, TEMPLATE_KWARGS: unread})


def _edited(
    conversation: Conversation, request: CompletionRequest, view: RequestView
) -> tuple[RequestView, tuple[JSON, ...]]:
    """The view of a request after its context edits, and what those cleared."""

    def count(messages: list[JSON]) -> int:
        return _count(conversation, request, view.with_messages(messages))

    messages, applied = apply_edits(request.context_edits, request.messages, count)
    return view.with_messages(messages, cleared=True) if applied else view, applied


def _count(conversation: Conversation, request: CompletionRequest, view: RequestView) -> int:
    plan = _planned(conversation, request, view)
    conversation.withdraw(plan)
    return len(plan.prompt_ids)


def _planned(conversation: Conversation, request: CompletionRequest, view: RequestView) -> PromptPlan:
    if request.prompt is not None:
        return conversation.plan_prompt(request.prompt)
    return conversation.plan(view)


def _seed(policy: Policy, attempt: TrackedAttempt, plan: PromptPlan, request: CompletionRequest, index: int) -> int:
    """The key of a call's noise: its place in the run. A rollout that is sampled again, again alone or in other company,
    draws the same; an agent's own seed takes the place of the count of equal requests, so that within a rollout equal
    requests with equal seeds have equal completions, while the rollouts of a group still differ."""
    rollout = attempt.rollout
    count: Any = plan.position if request.seed is None else f"s{request.seed}"
    place = f"{policy.seed or 0}|{rollout.group_id}|{rollout.replica}|{count}|".encode() + plan.request_hash
    if index:
        place += f"|{index}".encode()
    return int.from_bytes(blake2b(place, digest_size=8).digest(), "big") >> 1


def _decoders(
    policy: Policy, request: CompletionRequest, plan: PromptPlan, seeds: list[int], replayed: list[Call]
) -> list[ResponseDecoder]:
    """A decoder for each choice. Tool calls of a replayed one keep their ids: the agent repeats them in its next request.
    Those of an answer that was given have none yet."""
    names = [f"call_{seed:016x}" for seed in seeds]
    for index, call in enumerate(replayed):
        if (tool_calls := call.completion.get("tool_calls")) and "id" in tool_calls[0]:
            names[index] = str(tool_calls[0]["id"]).removesuffix("0")
    return [ResponseDecoder(policy.renderer, request, plan.prompt_text, name) for name in names]


def _answer(job: PolicyJob) -> Completion:
    request, prompt_ids = job.request, job.plan.prompt_ids
    asked = request.prompt_logprobs is not None
    return Completion(
        call_id=job.id,
        model=job.request.model or job.policy.model,
        created_s=job.started_ns // 10**9,
        prompt_tokens=len(job.plan.prompt_ids),
        choices=tuple(decoder.choice() for decoder in job.decoders),
        applied_edits=job.applied_edits,
        cached_tokens=len(prompt_ids) - len(job.plan.suffix_ids),
        prompt_ids=tuple(prompt_ids) if request.return_token_ids or request.repeats_prompt else None,
        prompt_logprobs=prompt_table(job.decoders[0].sampled, job.policy.renderer, len(prompt_ids)) if asked else None,
        completed_s=job.finished_ns // 10**9,
    )


def _records(job: PolicyJob, completions: list[JSON], finish_reasons: list[str]) -> list[Call]:
    """The records of a job's choices."""
    given = zip(job.decoders, completions, finish_reasons, strict=True)
    calls = [
        job.record(completion, finish_reason, index=index, sampled=decoder.sampled)
        for index, (decoder, completion, finish_reason) in enumerate(given)
    ]
    if not job.replayed:
        return calls
    return [replace(call, replayed_id=before.id) for call, before in zip(calls, job.replayed, strict=True)]
