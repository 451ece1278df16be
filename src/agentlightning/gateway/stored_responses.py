"""StoredResponses: the responses of an attempt that its agent may fetch, continue, refer to and delete.

Driven by responses_api.py, and by policy/calls.py for `previous_response_id`. A response is its recorded call; what is
deleted here leaves a span, since a record is never changed: it is neither fetched nor continued by id any more, and trained
on as before. Responses with ``store: false`` are no stored ones. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentlightning.gateway.attempt_events import AttemptEvents
from agentlightning.gateway.attempts import TrackedAttempt
from agentlightning.protocols import responses
from agentlightning.protocols.base import ApiError
from agentlightning.protocols.input_items import call_of_item, dereferenced, referenced_ids
from agentlightning.records import ABANDONED, JSON, Call
from agentlightning.rendering.call_chain import call_chain, is_whole
from agentlightning.store.base import LightningStore

DELETED = "gateway.response_deleted"
"""Name of the span that a deleted response leaves."""


class StoredResponses:
    """Use from one event loop."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._events = AttemptEvents(store, frozenset({DELETED}))

    async def chain(self, attempt: TrackedAttempt, call_id: str) -> list[Call]:
        """The response of this id and the calls that it continues, oldest first; empty where none is stored."""
        by_id = await self._calls(attempt)
        if call_id not in await self._fetchable(attempt, by_id, [call_id]):
            return []
        chain = call_chain(by_id[call_id], by_id)
        return chain if is_whole(chain) else []

    async def dereference(self, attempt: TrackedAttempt, data: JSON) -> JSON:
        """The request with the recorded items that its input refers to. Raises ApiError where one is not stored."""
        names = referenced_ids(data)
        if not names:
            return data
        by_id = await self._calls(attempt)
        ids = await self._fetchable(attempt, by_id, {call_of_item(name) for name in names})
        return dereferenced(data, {call_id: by_id[call_id] for call_id in ids})

    async def delete(self, attempt: TrackedAttempt, call_id: str) -> bool:
        """Delete a response; False where none is stored. Durable when it returns."""
        if not await self.chain(attempt, call_id):
            return False
        await self._events.append(attempt, DELETED, {"call_id": call_id})
        return True

    async def _calls(self, attempt: TrackedAttempt) -> dict[str, Call]:
        return {call.id: call for call in await self._store.calls([attempt.rollout.id], attempt.number)}

    async def _fetchable(self, attempt: TrackedAttempt, by_id: dict[str, Call], ids: Iterable[str]) -> set[str]:
        """Those of `ids` that name responses which are stored and not deleted."""
        found = {call_id for call_id in ids if call_id in by_id and _is_stored(by_id[call_id])}
        return found - await self._deletions(attempt) if found else found

    async def _deletions(self, attempt: TrackedAttempt) -> set[str]:
        """Ids of the responses that were deleted."""
        return {str(span.attributes.get("call_id")) for span in await self._events.read(attempt)}


def not_found(response_id: str) -> ApiError:
    """The refusal of a response that is not stored."""
    return ApiError(
        f"Response with id {response_id!r} not found: this attempt has stored none, or it was deleted",
        status=404,
        param="response_id",
        code="response_not_found",
    )


def _is_stored(call: Call) -> bool:
    return (
        call.protocol == responses.NAME
        and bool(call.policy)
        and call.finish_reason != ABANDONED
        and call.request_fields.get("store", True) is True
        and bool(call.history_hash)  # else its texts are not kept
    )
