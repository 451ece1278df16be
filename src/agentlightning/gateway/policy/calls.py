"""PolicyCalls: a call of the policy that is trained, from the agent's request to its response, for every protocol.

Driven by the proxy once it knows who calls and what for. For one call it plans the exact prompt, samples, parses, records,
and only then sends the last byte: an agent cannot finish before its tokens are durable. A call whose agent has gone goes on
for a grace period, so that a retry finds its completion, and is then recorded as far as it came. It knows no wire format
(protocols/), no template (rendering/) and no engine (policy/engine_router.py).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from uuid_utils import uuid7

from agentlightning.errors import EngineError
from agentlightning.gateway.asgi_response import end_within
from agentlightning.gateway.attempts import AttemptCache, TrackedAttempt
from agentlightning.gateway.metrics import GatewayMetrics
from agentlightning.gateway.policy.decoding import (
    GrammarChecker,
    decoding_of,
    ignored_header,
    recorded,
    request_digest,
    trained_cut,
    unsupported_error,
    with_forced,
)
from agentlightning.gateway.policy.engine_client import PromptLogprob
from agentlightning.gateway.policy.engine_router import EngineRouter, Policy
from agentlightning.gateway.policy.images import CallImages, check_prompt, read_images, read_placeholder
from agentlightning.gateway.policy.recorded import (
    PendingCall,
    SdkRetries,
    StoredResponses,
    recorded_tokens,
    replayed_choices,
)
from agentlightning.gateway.policy.response_decoder import (
    AgentCall,
    PolicyJob,
    ResponseDecoder,
    StreamedResponse,
    send_recorded,
    token_logprob,
)
from agentlightning.protocols import fields, tokens
from agentlightning.protocols.base import (
    ApiError,
    Choice,
    Completion,
    CompletionRequest,
    Delta,
    assistant_message,
)
from agentlightning.records import ABANDONED, JSON, TEMPLATE_KWARGS, Call, Sampling
from agentlightning.rendering.call_chain import chain_messages
from agentlightning.rendering.conversation import Conversation, PromptPlan, prompt_hash
from agentlightning.rendering.graph import RequestView
from agentlightning.rendering.renderer import MAX_TEXT, Renderer, check_text
from agentlightning.store.base import LightningStore

log = logging.getLogger(__name__)

MIN_LOGPROB = -9999.0
"""vLLM's stand-in for minus infinity, which JSON lacks."""

GRACE_S = 10.0
"""Grace period of a call whose agent has disconnected, in seconds."""

DEADLINE_S = 600.0
"""Time limit of one call, in seconds."""


@dataclass(slots=True)
class _Understood:
    """A request with all its messages, the policy that it means, the graph that it belongs to, and its images."""

    request: CompletionRequest
    policy: Policy
    conversation: Conversation
    view: RequestView
    images: CallImages


class PolicyCalls:
    """The token path."""

    def __init__(
        self,
        store: LightningStore,
        attempts: AttemptCache,
        engine_router: EngineRouter,
        metrics: GatewayMetrics,
        *,
        grace_s: float = GRACE_S,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._store = store
        self._attempts = attempts
        self._engine_router = engine_router
        self._metrics = metrics
        self.stored = StoredResponses(store, engine_router)
        self._decoding = asyncio.Lock()
        """Held to decode an image: one at a time, since it takes a hundred times its file's bytes."""
        self._grace_s = grace_s
        self._deadline_s = deadline_s
        self._retries = SdkRetries(store)
        self._grammars = GrammarChecker()
        self._abandoned: set[asyncio.Timeout] = set()
        """Time limits of calls whose agents have gone."""

    def stop(self) -> None:
        """The server is about to end: nobody will come back for an abandoned call."""
        self._grace_s = 0.0
        for timeout in self._abandoned:
            end_within(timeout, 0.0)

    def close(self) -> None:
        """End what was started beside the server."""
        self._grammars.close()

    async def answer(self, call: AgentCall, data: JSON) -> None:
        """Answer one request. Raises ApiError, RenderError and the errors of the store and of engines."""
        started_ns = time.time_ns()
        attempt, incoming, reply = call.attempt, call.request, call.reply
        asked = await self._understood(call, data)
        policy, conversation = asked.policy, asked.conversation
        request, sampling, overridden_params, dropped = sampling_of(asked.request, policy, attempt)
        if dropped:
            reply.ignored = ignored_header(dropped)
        asked.request = request
        digest = request_digest(request) if request.grammar or request.logits else ""
        request_hash = asked.view.request_hash if request.prompt is None else prompt_hash(request.prompt)
        if incoming.is_retry or incoming.idempotency_key is not None:
            await self._attempts.refresh(attempt)
            found = await self._retries.find(call, policy.alias, conversation, request, request_hash, digest)
            if found is not None:
                self._metrics.call(call.wire.NAME, "replayed")
                found = replace(found, model=found.model or policy.model)
                await send_recorded(call, request, await self._echoed(call, policy, request, found))
                return
        if request.max_tokens == 0:
            found = await self._echoed(call, policy, request, _prompt_alone(policy, request))
            await send_recorded(call, request, found)
            return
        job = await self._job(call, asked, sampling, overridden_params, digest)
        job.started_ns = started_ns
        reply.request_id = job.id
        pending = self._retries.begin(call, policy.alias, request_hash, digest)
        self._metrics.in_flight.inc()
        try:
            await self._run(job, pending)
        except ApiError as refusal:
            if request.truncates and refusal.code == "context_length_exceeded":
                raise _would_truncate(len(job.plan.prompt_ids), refusal) from refusal
            raise
        finally:
            self._metrics.in_flight.dec()
            self._retries.end(pending)

    async def count(self, call: AgentCall, data: JSON) -> int:
        """The number of tokens in the prompt of a request."""
        asked = await self._understood(call, data)
        plan = _planned(asked.conversation, asked.request, asked.view)
        asked.conversation.withdraw(plan)
        return len(plan.prompt_ids)

    async def _job(
        self, call: AgentCall, asked: _Understood, sampling: Sampling, overridden_params: JSON, digest: str
    ) -> PolicyJob:
        """The call with its exact prompt and its decoders, within the limits. Raises ApiError and RenderError."""
        request, policy, attempt, conversation = asked.request, asked.policy, call.attempt, asked.conversation
        plan = _planned(conversation, request, asked.view)
        decoding: JSON = {}
        replayed: list[Call] = []
        try:
            if request.grammar or request.logits:
                decoding = await decoding_of(
                    request, policy, plan.prompt_text, self._grammars, attempt, overridden_params
                )
            tokens = await self._tokens_of(call, asked, plan, sampling)
            await call.admission.begin(call.request, tokens)
            if attempt.rollout.fork is not None:
                replay = await self._attempts.replay(attempt)
                replayed = replayed_choices(replay, policy, plan, digest, request, sampling.max_tokens)
        except BaseException:
            conversation.withdraw(plan)
            raise
        if decoding or sampling.top_p < 1 or policy.renderer.images:
            decoding = recorded(decoding, digest, trained_cut(attempt, sampling), read_placeholder(policy))
        seeds, decoders = [], []
        for index in range(request.n):
            seeds.append(_seed(policy, attempt, plan, request, index))
            name = f"call_{seeds[-1]:016x}"
            tools = replayed[index].completion.get("tool_calls") if replayed else None
            if tools:  # the agent repeats its id in its next request
                name = str(tools[0]["id"]).removesuffix("0")
            decoders.append(ResponseDecoder(policy.renderer, request, plan.prompt_text, name))
        if request.return_token_ids or request.repeats_prompt:
            request = replace(request, planned_ids=plan.prompt_ids)
        return PolicyJob(
            id=str(uuid7()),
            call=call,
            request=request,
            policy=policy,
            conversation=conversation,
            plan=plan,
            sampling=sampling,
            overridden_params=overridden_params,
            decoding=decoding,
            started_ns=0,
            seeds=seeds,
            images=asked.images,
            replayed=replayed,
            decoders=decoders,
        )

    async def _tokens_of(self, call: AgentCall, asked: _Understood, plan: PromptPlan, sampling: Sampling) -> int:
        """Tokens that a call may use, where limits count them."""
        if not call.admission.counts_tokens:
            return 0
        prompt, context = len(plan.prompt_ids), await self._engine_router.context(asked.policy)
        bounds = [sampling.max_tokens, None if context is None else max(0, context - prompt)]
        return prompt + asked.request.n * min((one for one in bounds if one is not None), default=0)

    async def _understood(self, call: AgentCall, data: JSON) -> _Understood:
        """The request with all that it refers to."""
        attempt = call.attempt
        request = call.wire.parse(data)
        policy = await self._engine_router.policy(attempt.rollout, request.model, call.resources)
        if isinstance(request.prompt, list):
            _check_ids(policy.renderer, request.prompt, "prompt_ids" if call.wire.NAME == tokens.NAME else "prompt")
        conversation = await self._attempts.conversation(attempt, policy.renderer, policy.alias)
        if request.previous_id is not None:
            before = await self.stored.chain(attempt, request.previous_id)
            if not before:
                if attempt.ended_by is not None:
                    raise attempt.ended_by.with_traceback(None)
                field = "previous_response_id"
                sentence = f"{field}: this attempt has no response {data[field]!r}"
                raise ApiError(sentence, status=404, param=field, code="previous_response_not_found")
            request = replace(request, messages=_after(chain_messages(before), request.messages))
        # Before anything is made of them: a chain is longer than the request that names it.
        if request.previous_id is not None or call.request.size > MAX_TEXT:
            check_text(request.messages, request.tools)
        images = CallImages()
        for message in request.messages:
            if isinstance(message.get("content"), list):
                images = await read_images(request, policy, self._store, self._decoding, call)
                break
        if request.template_kwargs:
            request = _with_read_variables(request, policy)
        view = RequestView.of(
            request.messages, request.tools, expansions=images.expansions, template_kwargs=request.template_kwargs
        )
        if not attempt.complete and conversation.lacks_answer(view):
            await self._attempts.refresh(attempt)
        return _Understood(request, policy, conversation, view, images)

    # --- one call, step by step -------------------------------------------------------------------------------------

    async def _run(self, job: PolicyJob, pending: PendingCall) -> None:
        stream = StreamedResponse(job, self._metrics) if job.request.stream else None
        timeout = asyncio.timeout(self._deadline_s)
        watch = job.call.request.on_disconnect(lambda: self._abandon(job, pending, timeout))
        try:
            async with timeout:
                await self._sample(job, stream)
            rest = [decoder.finish() for decoder in job.decoders]
            job.finished_ns = time.time_ns()
            completion = _completion(job)
            watch.look()
            recorded_as_gone = job.gone  # the watch may say so at any time from here on
            calls = _records(job, completion.choices)
            if "grammar" in job.decoding:
                calls = await with_forced(calls, job.policy.renderer)
        except (Exception, asyncio.CancelledError) as cause:
            # Whatever fails once tokens are sampled, they are recorded.
            sampled = not job.replayed and any(decoder.sampled.logprobs for decoder in job.decoders)
            if sampled or isinstance(cause, TimeoutError):
                await self._append(job, _partial_records(job))
            if not isinstance(cause, TimeoutError):
                raise
            if not job.gone:
                raise ApiError(
                    f"the completion did not finish within {self._deadline_s:g} s",
                    status=504,
                    type="server_error",
                    code="deadline_exceeded",
                ) from None
        else:
            await self._record(job, calls)
            pending.call_id = completion.call_id
            watch.look()
            if job.gone and not recorded_as_gone:  # the agent left while its call was being recorded
                ids = [job.call_id(index) for index in range(len(job.seeds))]
                attempt = job.call.attempt
                await self._store.mark_delivered(attempt.rollout.id, attempt.number, ids, False)
            if stream is None:
                if job.request.repeats_prompt:
                    completion = await self._echoed(job.call, job.policy, job.request, completion)
                await job.call.reply.whole(200, job.call.wire.body(job.request, completion))
            else:
                await stream.last(rest, completion)
        finally:
            if pending.call_id is None:
                job.conversation.withdraw(job.plan)
                if job.replayed and job.call.attempt.replay is not None:
                    job.call.attempt.replay.give_back(job.replayed[0])
            watch.stop()
            self._abandoned.discard(timeout)

    def _abandon(self, job: PolicyJob, pending: PendingCall, timeout: asyncio.Timeout) -> None:
        """The agent has disconnected: the call goes on for the grace period, so that a retry finds it."""
        job.gone = pending.abandoned = True
        self._abandoned.add(timeout)
        end_within(timeout, self._grace_s)

    async def _sample(self, job: PolicyJob, stream: StreamedResponse | None) -> None:
        if stream is not None and job.request.repeats_prompt:
            echo = await self._echo(job.call, job.policy, job.request, job.plan.prompt_ids)
            for index in range(job.request.n):
                await stream.more(index, echo)
        if len(job.seeds) == 1 and stream is None:
            await self._sample_one(job, 0, None)
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
            if index == 0 and (alternatives := job.request.prompt_logprobs) is not None:  # which no record keeps
                ids = job.plan.prompt_ids
                decoder.sampled.prompt_logprobs = await self._engine_scores(
                    job.policy, ids, alternatives, job.call.affinity
                )
            if stream is not None:
                await stream.more(index, decoder.feed(decoder.sampled.ids))
            return
        request, affinity = job.engine_request(index), job.call.affinity
        if stream is None:
            decoder.sampled = await self._engine_router.generate(job.policy, request, affinity)
            if decoder.sampled.prompt_ids is not None:
                check_prompt(job.plan, decoder.sampled)
            return  # `finish` decodes it at once, which costs a fraction of decoding token by token
        async for ids in self._engine_router.stream(job.policy, request, decoder.sampled, affinity):
            if decoder.sampled.prompt_ids is not None:
                check_prompt(job.plan, decoder.sampled)
            await stream.more(index, decoder.feed(ids))

    async def _record(self, job: PolicyJob, calls: list[Call]) -> None:
        """Make the calls durable, then let later requests continue them."""
        await self._append(job, calls)
        for call in calls:
            job.conversation.record(job.plan, call.id, call.sampled_ids, call.completion)
        if job.plan.fork_cause is not None:
            log.info(
                "call %s forks: %s, %d sampled tokens are context only",
                job.id,
                job.plan.fork_cause,
                job.plan.untrained_tokens,
            )

    async def _append(self, job: PolicyJob, calls: list[Call]) -> None:
        """Make sampled calls durable, though the server ends meanwhile: appending may be repeated."""
        try:
            await self._keep(job, calls)
        except asyncio.CancelledError:
            await self._keep(job, calls)
            raise

    async def _keep(self, job: PolicyJob, calls: list[Call]) -> None:
        if job.plan.images:  # before the calls that name them: whoever reads a call finds its images
            new = {image.hash: job.images.files[image.hash] for image in job.plan.images}
            await self._store.put_files(job.call.attempt.rollout.run_id, job.call.attempt.rollout.id, new)
        await self._store.append_calls(calls)
        job.call.admission.record(calls)
        for call in calls:
            self._metrics.record(call)

    # --- log-probabilities of prompts -------------------------------------------------------------------------------

    async def score(self, call: AgentCall, data: JSON) -> None:
        """Answer one request for log-probabilities of given tokens (``POST /v1/tokens/logprobs``)."""
        tokens.check_known(data, frozenset(("model", "token_ids")))
        asked = fields.read(tokens.ScoringRequest, data)
        model, ids = asked.model or "", asked.token_ids
        policy = await self._engine_router.policy(call.attempt.rollout, model, call.resources)
        _check_ids(policy.renderer, ids, "token_ids")
        scored = await self._scored(call, policy, ids, 0)
        found = [
            None if table is None else max(table[index].logprob, MIN_LOGPROB)
            for index, table in zip(ids, scored, strict=True)
        ]
        await call.reply.whole(200, tokens.logprobs_body(model or policy.model, found))

    async def _echo(self, call: AgentCall, policy: Policy, request: CompletionRequest, ids: list[int]) -> Delta:
        """The prompt as the beginning of a choice, with its tokens where log-probabilities are asked for."""
        renderer = policy.renderer
        text = request.prompt if isinstance(request.prompt, str) else renderer.decode(ids, special=True)
        if not request.logprobs:
            return Delta(content=text)
        found = []
        scored = await self._scored(call, policy, ids, request.top_logprobs)
        for index, table in zip(ids, scored, strict=True):
            likeliest = sorted((table or {}).items(), key=lambda pair: -pair[1].logprob)[: request.top_logprobs]
            logprob = math.nan if table is None else max(table[index].logprob, MIN_LOGPROB)
            top = [(other, max(one.logprob, MIN_LOGPROB)) for other, one in likeliest]
            found.append(token_logprob(renderer, index, logprob, top))
        return Delta(content=text, logprobs=tuple(found))

    async def _echoed(
        self, call: AgentCall, policy: Policy, request: CompletionRequest, found: Completion
    ) -> Completion:
        """A completion with its prompt before each choice, and with log-probabilities of the prompt, which no record keeps,
        where the request asks for them."""
        if (alternatives := request.prompt_logprobs) is not None and found.prompt_ids and found.prompt_logprobs is None:
            scored = await self._scored(call, policy, list(found.prompt_ids), alternatives)
            found = replace(found, prompt_logprobs=_prompt_table(scored, policy.renderer))
        if not request.repeats_prompt:
            return found
        echo = await self._echo(call, policy, request, list(found.prompt_ids or ()))
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

    async def _scored(
        self, call: AgentCall, policy: Policy, ids: list[int], alternatives: int
    ) -> list[dict[int, PromptLogprob] | None]:
        """By token of a prompt the log-probabilities of itself and its alternatives, None for the first. It is a call by the
        limits. Raises ApiError where one is reached."""
        await call.admission.begin(call.request, len(ids))
        found = await self._engine_scores(policy, ids, alternatives, call.affinity)
        call.admission.count_prompt(len(ids))
        return found

    async def _engine_scores(
        self, policy: Policy, ids: list[int], alternatives: int, affinity: str
    ) -> list[dict[int, PromptLogprob] | None]:
        """The same, uncounted. The one token that engines insist on sampling is dropped."""
        request = {
            "request_id": str(uuid7()),
            "model": policy.alias,
            "token_ids": ids,
            "stream": False,
            "sampling_params": {"temperature": 0.0, "max_tokens": 1, "logprobs": 0, "prompt_logprobs": alternatives},
        }
        return _checked((await self._engine_router.generate(policy, request, affinity)).prompt_logprobs, len(ids))


def _check_ids(renderer: Renderer, ids: Sequence[int], field: str) -> None:
    """ApiError for ids that the model has no tokens for: engines fail on them, and learners on their record."""
    if (wrong := renderer.unknown_id(ids)) is not None:
        raise ApiError(f"{field}: expected ids of the model's vocabulary, got {wrong}", param=field)


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


def _checked(found: list[dict[int, PromptLogprob] | None] | None, count: int) -> list[dict[int, PromptLogprob] | None]:
    """Raises EngineError where the engine did not give one entry per token."""
    if found is None or len(found) != count:
        got = "none" if found is None else str(len(found))
        raise EngineError(f"the engine was asked for prompt_logprobs of {count} tokens and gave {got}")
    return found


def _prompt_table(found: list[dict[int, PromptLogprob] | None], renderer: Renderer) -> list[JSON | None]:
    """For each token of the prompt the table of {logprob, rank, decoded_token} by id; None for the first."""

    def text(index: int) -> str:
        shown = renderer.token_text(index)
        return "" if shown.endswith("\N{REPLACEMENT CHARACTER}") else shown  # a part of a character, as vLLM has it

    return [
        None
        if table is None
        else {
            str(index): {
                "logprob": max(score.logprob, MIN_LOGPROB),
                "rank": score.rank,
                "decoded_token": text(index),
            }
            for index, score in table.items()
        }
        for table in found
    ]


def _completion(job: PolicyJob) -> Completion:
    request, plan = job.request, job.plan
    shows_ids = request.return_token_ids or request.repeats_prompt
    return Completion(
        call_id=job.id,
        model=request.model or job.policy.model,
        created_s=job.started_ns // 10**9,
        prompt_tokens=len(plan.prompt_ids),
        choices=tuple([decoder.choice() for decoder in job.decoders]),
        cached_tokens=len(plan.prompt_ids) - len(plan.suffix_ids),
        prompt_ids=tuple(plan.prompt_ids) if shows_ids else None,
        prompt_logprobs=None
        if request.prompt_logprobs is None
        else _prompt_table(
            _checked(job.decoders[0].sampled.prompt_logprobs, len(plan.prompt_ids)), job.policy.renderer
        ),
        completed_s=job.finished_ns // 10**9,
    )


def _records(job: PolicyJob, choices: Sequence[Choice]) -> list[Call]:
    """The records of a job's choices."""
    return [
        job.record_choice(index, assistant_message(choice), choice.finish_reason)
        for index, choice in enumerate(choices)
    ]


def _partial_records(job: PolicyJob) -> list[Call]:
    """The records of a call whose end the agent never saw: what was sampled is kept, neither continued nor trained on. Never
    raises: where it cannot be read as a message, it is kept as text."""
    calls = []
    for index, decoder in enumerate(job.decoders):
        ids = decoder.sampled.ids
        del ids[len(decoder.sampled.logprobs) :]  # an engine's answer that is refused may have too few
        try:
            decoder.finish()
            calls.append(job.record_choice(index, assistant_message(decoder.choice()), ABANDONED))
        except Exception:
            log.exception("call %s: what was sampled cannot be read; it is recorded as text", job.id)
            text = job.policy.renderer.decode(ids, special=True)
            calls.append(job.record_choice(index, {"role": "assistant", "content": text}, ABANDONED))
    return calls


def sampling_of(
    request: CompletionRequest, policy: Policy, attempt: TrackedAttempt
) -> tuple[CompletionRequest, Sampling, JSON, list[str]]:
    """The sampling parameters of a request, by the rollout and `agent.unsupported_params`, the parameters that were
    overridden, and the names of those among them that were not applied.

    What the agent asks for never reaches the engine where it would make recorded log-probabilities wrong.
    """
    given = attempt.rollout.sampling
    unsupported, forced = dict(request.unsupported), {}
    if request.forced:
        applied = {"temperature": given.temperature, "top_p": given.top_p}
        forced = {name: value for name, value in request.forced.items() if value != applied.get(name)}
    if policy.unsupported_params == "error" and attempt.rollout.mode == "train":  # an evaluation's are not the run's
        unsupported |= forced
    if request.seed is not None and policy.seed is None:
        unsupported["seed"] = request.seed
    if request.one_tool_call and request.parse_tools and policy.renderer.parser.tool_end is None:
        unsupported["parallel_tool_calls"] = False
    drops = policy.unsupported_params == "drop"
    if request.refused or (unsupported and not drops):
        raise unsupported_error({} if drops else unsupported, request.refused)
    reason = None
    if attempt.rollout.mode == "train" and (given.top_p < 1 or policy.logprobs == "raw"):
        reason = policy.check_sampling(given.temperature, given.top_p)
    if reason is not None:
        raise ApiError(
            f"the rollout's sampling: {reason}", status=409, type="server_error", code="sampling_not_trainable"
        )
    most = given.max_tokens
    if most is None or (request.max_tokens is not None and request.max_tokens < most):
        most = request.max_tokens
    sampling = Sampling(temperature=given.temperature, top_p=given.top_p, max_tokens=most)
    if "seed" in unsupported:
        request = replace(request, seed=None)
    return request, sampling, {**forced, **request.not_applied, **unsupported}, [*unsupported, *forced]
