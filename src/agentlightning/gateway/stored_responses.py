"""StoredResponses: the recorded responses of an attempt that its agent may fetch, continue and refer to.

Driven by the proxy for GET responses/ID, and by policy/calls.py for `previous_response_id`. A response is its recorded call;
responses with ``store: false`` are not found.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.gateway.attempts import TrackedAttempt
from agentlightning.gateway.policy.engine_router import EngineRouter
from agentlightning.gateway.policy.sdk_retries import mark_delivered, recorded_answer
from agentlightning.protocols import responses
from agentlightning.protocols.base import ApiError, call_id
from agentlightning.protocols.responses import call_of_item, dereferenced, referenced_ids
from agentlightning.records import ABANDONED, JSON, Call
from agentlightning.rendering.call_chain import call_chain, is_whole
from agentlightning.store.base import LightningStore


class StoredResponses:
    """Use from one event loop."""

    def __init__(self, store: LightningStore, engine_router: EngineRouter) -> None:
        self._store = store
        self._engine_router = engine_router

    async def fetch(self, attempt: TrackedAttempt, response_id: str) -> bytes:
        """The body of a stored response. Raises ApiError where there is none."""
        chain = await self.chain(attempt, call_id(response_id))
        policies = await self._engine_router.policies(attempt.rollout.run_id)
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

    async def dereference(self, attempt: TrackedAttempt, data: JSON) -> JSON:
        """The request with the recorded items that its input refers to. Raises ApiError where one is not stored."""
        names = referenced_ids(data)
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
