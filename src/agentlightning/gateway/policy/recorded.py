"""Completions that are given from the record: to retries of SDKs, to forked rollouts, and as stored responses.

Driven by policy/calls.py and the proxy. A retry is known by its retry count or its idempotency key, never by its body alone:
identical calls side by side are legitimate. It joins the call that its first try left behind, or gets the recorded
completion. Responses with ``store: false`` are not found.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from cachetools import LRUCache

from agentlightning.gateway.attempts import AttemptReplay, TrackedAttempt
from agentlightning.gateway.policy.engine_client import SampledTokens
from agentlightning.gateway.policy.engine_router import EngineRouter, Policy
from agentlightning.gateway.policy.response_decoder import AgentCall, ResponseDecoder, shown_ids, token_logprob
from agentlightning.protocols import responses
from agentlightning.protocols.base import (
    ApiError,
    Choice,
    Completion,
    CompletionRequest,
    ToolCall,
    assistant_message,
    call_id,
)
from agentlightning.protocols.responses import call_of_item, dereferenced, referenced_ids
from agentlightning.records import ABANDONED, JSON, Call
from agentlightning.rendering.call_chain import call_chain, chain_prompt_ids, is_whole
from agentlightning.rendering.conversation import Conversation, PromptPlan
from agentlightning.rendering.graph import Digest, digest, normal
from agentlightning.rendering.renderer import Renderer
from agentlightning.store.base import LightningStore
from agentlightning.store.forks import Choices

REMEMBERED = 4096
"""Requests with an undelivered completion and idempotency keys that are kept, the newest ones."""
MAX_UNDELIVERED = 64
"""Undelivered completions of one request that are kept, the newest ones: an agent may repeat it and hang up for ever."""

Place = tuple[str, int, str, bytes]
"""Rollout, attempt, policy, and the request's hash or that of its idempotency key, which a client may make long."""


class PendingCall:
    """A call under way."""

    def __init__(self, place: Place, keyed: Place | None) -> None:
        self.place = place
        self.keyed = keyed
        self.abandoned = False
        """Its agent has gone."""
        self.joined = False
        """A retry waits for it already."""
        self.call_id: str | None = None
        """Id of its recorded completion, and no more of it: thousands of these are kept."""
        self.ended = asyncio.Event()
        """It was answered, or never will be."""

    async def wait(self) -> str | None:
        """Id of the completion, once it is recorded; None where the call failed."""
        await self.ended.wait()
        return self.call_id


class SdkRetries:
    """Calls under way, and completions that may not have arrived."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._pending: dict[Place, list[PendingCall]] = {}
        self._keyed: LRUCache[Place, PendingCall] = LRUCache(REMEMBERED)
        self._undelivered: LRUCache[Place, deque[str]] = LRUCache(REMEMBERED)

    def begin(self, call: AgentCall, policy: str, request_hash: Digest, decoding_digest: str = "") -> PendingCall:
        """Note a call under way; `end` must follow. Requests for other decoding (a grammar, penalties) are others."""
        identity, idempotency_key = (call.attempt.rollout.id, call.attempt.number, policy), call.request.idempotency_key
        keyed = None if idempotency_key is None else (*identity, _key_hash(idempotency_key))
        pending = PendingCall((*identity, request_hash + decoding_digest.encode()), keyed)
        self._pending.setdefault(pending.place, []).append(pending)
        if pending.keyed is not None:
            self._keyed[pending.keyed] = pending
        return pending

    def end(self, pending: PendingCall) -> None:
        """The call was answered or failed."""
        pending.ended.set()
        others = self._pending[pending.place]
        others.remove(pending)
        if not others:
            del self._pending[pending.place]
        if pending.call_id is None:
            if pending.keyed is not None and self._keyed.get(pending.keyed) is pending:
                del self._keyed[pending.keyed]
        elif pending.abandoned and not pending.joined:
            waiting = self._undelivered.get(pending.place) or deque[str](maxlen=MAX_UNDELIVERED)
            waiting.append(pending.call_id)
            self._undelivered[pending.place] = waiting

    async def find(
        self,
        call: AgentCall,
        policy: str,
        conversation: Conversation,
        request: CompletionRequest,
        request_hash: Digest,
        decoding_digest: str = "",
    ) -> Completion | None:
        """The completion that this request is another try at; None where it is the first, and where it asks for the
        alternatives of a completion's tokens, which are not kept: it is then sampled again, and the completion that did not
        arrive counts as undelivered. Raises ApiError where its key promises the completion of before."""
        attempt, incoming = call.attempt, call.request
        identity = attempt.rollout.id, attempt.number, policy
        whole_hash = request_hash + decoding_digest.encode()
        if incoming.idempotency_key is not None:
            keyed = self._keyed.get((*identity, _key_hash(incoming.idempotency_key)))
            if keyed is not None and keyed.place[3] == whole_hash and (answered := await keyed.wait()) is not None:
                if request.top_logprobs and not incoming.is_retry:
                    raise ApiError(
                        "Idempotency-Key: the completion of this key cannot be given again with top_logprobs, which are "
                        "not kept; ask without them, or with another key",
                        status=409,
                        param="top_logprobs",
                        code="alternatives_not_kept",
                        final=True,
                    )
                return await self._recorded(attempt, answered, request, conversation)
        if not incoming.is_retry:
            return None
        place = *identity, whole_hash
        while joinable := [one for one in self._pending.get(place, ()) if not one.joined]:
            pending = next((one for one in joinable if one.abandoned), joinable[0])
            pending.joined = True
            if (answered := await pending.wait()) is not None:
                return await self._recorded(attempt, answered, request, conversation)
        if undelivered := self._undelivered.get(place):
            call_id = undelivered.popleft()
            if not undelivered:
                del self._undelivered[place]
            return await self._recorded(attempt, call_id, request, conversation)
        if not (unanswered := conversation.unanswered(request_hash)):
            return None
        calls = {one.id: one for one in await self._store.calls([attempt.rollout.id], attempt.number)}
        same = (one for one in unanswered if one in calls and calls[one].decoding.get("request", "") == decoding_digest)
        call_id = next(same, "")
        return await self._recorded(attempt, call_id, request, conversation) if call_id else None

    async def _recorded(
        self, attempt: TrackedAttempt, call_id: str, request: CompletionRequest, conversation: Conversation
    ) -> Completion | None:
        calls = await self._store.calls([attempt.rollout.id], attempt.number)
        answer = recorded_answer(calls, call_id, conversation.renderer, request)
        if answer is not None and request.top_logprobs:
            ids = [call.id for call in calls if call.id.partition(".")[0] == answer.call_id]
            await self._store.mark_delivered(attempt.rollout.id, attempt.number, ids, False)
            return None
        if answer is not None:
            await mark_delivered(self._store, calls, answer)
        return answer


async def mark_delivered(store: LightningStore, calls: Sequence[Call], answer: Completion) -> None:
    """Record that the agent is about to get, after all, a completion which it had gone from; does nothing for others.

    Before it is sent: a server that is killed in between must not leave a call that was acted on as one that was not.
    """
    late = [call for call in calls if call.id.partition(".")[0] == answer.call_id and not call.delivered]
    if late:
        await store.mark_delivered(late[0].rollout_id, late[0].attempt, [call.id for call in late], True)


def recorded_answer(
    calls: Sequence[Call], call_id: str, renderer: Renderer | None, request: CompletionRequest | None = None
) -> Completion | None:
    """The completion that was recorded as `call_id`, with all its choices; None where there is none among `calls`.

    It has what `request` asks for: log-probabilities of its tokens (not their alternatives, which are not kept) and the ids
    of its prompt. Without a renderer, which the calls of external models have none of, neither these nor the number of
    reasoning tokens can be told.
    """
    first = call_id.partition(".")[0]
    found = {call.id: call for call in calls if call.id.partition(".")[0] == first}
    call = found.get(first)
    if call is None or call.finish_reason == ABANDONED or not call.history_hash:  # without one its texts are not kept
        return None
    ordered = [call, *(found[f"{first}.{index}"] for index in range(1, len(found)))]
    asks = request is not None and (
        request.return_token_ids or request.repeats_prompt or request.prompt_logprobs is not None
    )
    chain = call_chain(call, {one.id: one for one in calls}) if asks else []
    return Completion(
        call_id=first,
        model=call.model,
        created_s=call.started_ns // 10**9,
        prompt_tokens=call.prompt_tokens,
        choices=tuple(_choice(one, renderer, request) for one in ordered),
        cached_tokens=call.prompt_tokens - len(call.suffix_ids),
        completed_s=call.finished_ns // 10**9,
        prompt_ids=tuple(chain_prompt_ids(chain)) if chain and is_whole(chain) else None,
    )


def _choice(call: Call, renderer: Renderer | None, request: CompletionRequest | None) -> Choice:
    tokens = None
    reasoning = call.completion.get("reasoning_content")
    if renderer is not None and request is not None and request.logprobs:
        pairs = zip(shown_ids(request, renderer, call.sampled_ids), call.logprobs, strict=False)
        tokens = tuple(token_logprob(renderer, index, logprob) for index, logprob in pairs)
    return Choice(
        content=call.completion.get("content"),
        reasoning=reasoning,
        tool_calls=tuple(
            ToolCall(id=one["id"], name=one["function"]["name"], arguments=one["function"]["arguments"])
            for one in call.completion.get("tool_calls", ())
        ),
        finish_reason=call.finish_reason,
        sampled_tokens=len(call.sampled_ids),
        reasoning_tokens=0 if renderer is None else renderer.reasoning_size(call.sampled_ids, reasoning),
        logprobs=tokens,
        token_ids=tuple(call.sampled_ids),
    )


def _key_hash(idempotency_key: str) -> bytes:
    return blake2b(idempotency_key.encode(), digest_size=16).digest()


# --- forks --------------------------------------------------------------------------------------------------------------


def recorded_tokens(call: Call) -> SampledTokens:
    """The tokens of a recorded completion, as an engine would give them."""
    return SampledTokens(
        ids=list(call.sampled_ids),
        logprobs=list(call.logprobs),
        versions=list(call.versions),
        finish_reason="length" if call.finish_reason == "length" else "stop",
    )


def replayed_choices(
    replay: AttemptReplay | None,
    policy: Policy,
    plan: PromptPlan,
    request_digest: str,
    request: CompletionRequest,
    max_tokens: int | None,
) -> Choices:
    """The choices that a request with this bound of sampled tokens gets; empty where they are to be sampled."""
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

    return replay.take(plan.request_hash.hex(), request_digest, len(plan.prompt_ids), request.n, fits)


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


# --- stored responses ---------------------------------------------------------------------------------------------------


class StoredResponses:
    """Use from one event loop."""

    def __init__(self, store: LightningStore, engine_router: EngineRouter) -> None:
        self._store = store
        self._engine_router = engine_router

    async def fetch(self, asked: AgentCall, response_id: str) -> bytes:
        """The body of a stored response. Raises ApiError where there is none."""
        attempt = asked.attempt
        chain = await self.chain(attempt, call_id(response_id))
        policies = await self._engine_router.policies(attempt.rollout.run_id, asked.resources)
        for call in chain[-1:]:
            policy = policies.get(call.policy)
            request = responses.stored_request(call)
            completion = recorded_answer([call], call.id, policy.renderer if policy is not None else None, request)
            if completion is not None:
                await mark_delivered(self._store, [call], completion)
                return responses.body(request, completion)
        raise ApiError(
            f"Response with id {response_id!r} not found: this attempt has stored none",
            status=404,
            param="response_id",
            code="response_not_found",
        )

    async def chain(self, attempt: TrackedAttempt, call_id: str) -> list[Call]:
        """The response of this id and the calls that it continues, oldest first; empty where none is stored."""
        by_id = await self._calls(attempt)
        if call_id not in _stored(by_id, [call_id]):
            return []
        chain = call_chain(by_id[call_id], by_id)
        return chain if is_whole(chain) else []

    async def dereference(self, protocol: str, attempt: TrackedAttempt, data: JSON) -> JSON:
        """The request with the recorded items that its input refers to. Raises ApiError where an
        item is not stored."""
        names = referenced_ids(data) if protocol == responses.NAME else []
        if not names:
            return data
        return dereferenced(data, _stored(await self._calls(attempt), {call_of_item(name) for name in names}))

    async def _calls(self, attempt: TrackedAttempt) -> dict[str, Call]:
        return {call.id: call for call in await self._store.calls([attempt.rollout.id], attempt.number)}


def _stored(by_id: dict[str, Call], ids: Iterable[str]) -> dict[str, Call]:
    """Those of `ids` that name stored responses, by id."""
    return {call_id: by_id[call_id] for call_id in ids if call_id in by_id and _is_stored(by_id[call_id])}


def _is_stored(call: Call) -> bool:
    return (
        call.protocol == responses.NAME
        and bool(call.policy)
        and call.finish_reason != ABANDONED
        and call.request_fields.get("store", True) is True
    )
