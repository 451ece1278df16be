"""ResponsesApi: the routes of OpenAI Responses beside POST responses: stored responses, their input, and token counts.

Driven by the proxy for paths under ``responses/``. A response is fetched as JSON or as the stream that it would be, listed
with what it read, and deleted; none runs in the background, so that none can be cancelled. Calls of the policy, compactions
among them, are made by policy/calls.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from agentlightning.gateway.asgi_response import AgentRequest, AgentResponse
from agentlightning.gateway.attempts import TrackedAttempt
from agentlightning.gateway.limits import Admission
from agentlightning.gateway.policy.calls import PolicyCalls
from agentlightning.gateway.policy.engine_router import EngineRouter
from agentlightning.gateway.policy.sdk_retries import mark_delivered, recorded_answer
from agentlightning.gateway.stored_responses import StoredResponses, not_found
from agentlightning.protocols import compaction, responses
from agentlightning.protocols.base import ApiError, Completion, CompletionRequest, call_id
from agentlightning.protocols.fields import expected
from agentlightning.protocols.input_items import input_items
from agentlightning.protocols.response_events import ResponseEvents, replayed
from agentlightning.records import JSON, Call
from agentlightning.rendering.call_chain import chain_tools
from agentlightning.rendering.conversation import Conversation
from agentlightning.rendering.request_view import RequestView
from agentlightning.store.base import LightningStore

COMPACT, COUNT = "responses/compact", "responses/input_tokens"
"""Routes of calls."""

MAX_ITEMS, DEFAULT_ITEMS = 100, 20
"""Items that one page of a response's input may have, and has where nothing is said."""


class ResponsesApi:
    """Use from one event loop."""

    def __init__(
        self, store: LightningStore, stored: StoredResponses, calls: PolicyCalls, engine_router: EngineRouter
    ) -> None:
        self._store = store
        self._stored = stored
        self._calls = calls
        self._engine_router = engine_router

    async def prepared(self, route: str, data: JSON, attempt: TrackedAttempt) -> JSON:
        """The request of a call with all that only the record knows: referenced items, and a compaction's tools."""
        data = await self._stored.dereference(attempt, data)
        if route == COMPACT and "tools" not in data:  # a compaction has no such field, and its conversation had tools
            data = {**data, "tools": [_function(tool) for tool in await self._tools(data, attempt) or ()]}
        return data

    async def _tools(self, data: JSON, attempt: TrackedAttempt) -> list[JSON] | None:
        """The tools of the recorded conversation that a compaction continues, by id or by its items."""
        previous = data.get("previous_response_id")
        if isinstance(previous, str):
            return chain_tools(await self._stored.chain(attempt, call_id(previous)))
        messages = compaction.parse(data).messages[:-1]
        return _continued_tools(messages, await self._store.calls([attempt.rollout.id], attempt.number))

    async def count(self, data: JSON, attempt: TrackedAttempt, admission: Admission) -> bytes:
        """The body of POST responses/input_tokens."""
        prepared = await self.prepared(COUNT, data, attempt)
        tokens, _ = await self._calls.count(responses, prepared, attempt, admission)
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens})

    def knows(self, route: str, method: str) -> bool:
        """True where `answer` serves a request."""
        _, _, rest = route.partition("/")
        response_id, _, part = rest.partition("/")
        if not route.startswith("responses/") or not response_id:
            return False
        known = {"": ("GET", "DELETE"), "input_items": ("GET",), "cancel": ("POST",)}
        return method in known.get(part, ())

    async def answer(self, incoming: AgentRequest, attempt: TrackedAttempt, reply: AgentResponse) -> None:
        """Answer a request that `knows` is true of. Raises ApiError and the errors of the store."""
        _, _, rest = (incoming.route or "").partition("/")
        response_id, _, part = rest.partition("/")
        query = _Query(incoming.query_values)
        if incoming.method == "DELETE":
            if not await self._stored.delete(attempt, call_id(response_id)):
                raise not_found(response_id)
            await reply.whole(200, orjson.dumps({"id": response_id, "object": "response", "deleted": True}))
            return
        chain = await self._stored.chain(attempt, call_id(response_id))
        if not chain:
            raise not_found(response_id)
        if part == "input_items":
            await reply.whole(200, orjson.dumps(_page(input_items(chain), query)))
        elif part == "cancel":
            raise ApiError(
                "Cannot cancel a synchronous response: expected the id of one that was made in the background, "
                f"got {response_id!r}",
                param="response_id",
                code="response_not_cancellable",
            )
        else:
            await self._fetch(chain[-1], query, attempt, reply)

    async def _fetch(self, call: Call, query: _Query, attempt: TrackedAttempt, reply: AgentResponse) -> None:
        stream, after = query.boolean("stream"), query.whole("starting_after", -1, 2**63 - 1, -1)
        policy = (await self._engine_router.policies(attempt.rollout.run_id)).get(call.policy)
        request = responses.stored_request(call, query.several("include"))
        completion = recorded_answer([call], call.id, policy.renderer if policy is not None else None, request)
        if completion is None:
            raise not_found(f"resp_{call.id}")
        await mark_delivered(self._store, [call], completion)
        if not stream:
            await reply.whole(200, responses.body(request, completion))
            return
        await reply.start_events(b"")
        await reply.end(_events(request, completion, after))


def _events(request: CompletionRequest, completion: Completion, after: int) -> bytes:
    """The events of a stored response that come after the one of this number, its end in any case."""
    stream = ResponseEvents(request.echo, completion.call_id, completion.model, completion.created_s, after)
    return b"".join(replayed(stream, completion))


def _page(items: list[JSON], query: _Query) -> JSON:
    """A page of items, by the query's `limit`, `order` and `after`."""
    limit = query.whole("limit", 1, MAX_ITEMS, DEFAULT_ITEMS)
    if query.one_of("order", ("desc", "asc")) == "desc":
        items = items[::-1]
    after = query.text("after")
    if after is not None:
        place = next((index for index, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise expected("the id of an item of this response's input", after, "after")
        items = items[place + 1 :]
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }


def _function(tool: JSON) -> JSON:
    """A recorded tool in the form of Responses."""
    return {"type": "function", **tool["function"]} if tool.get("type") == "function" else tool


def _continued_tools(messages: list[JSON], calls: Sequence[Call]) -> list[JSON] | None:
    """The tools of that recorded conversation which the messages repeat furthest; None where it has none, and where they
    repeat none."""
    conversation = Conversation(None, calls)
    offered = {orjson.dumps(call.tools): call.tools for call in calls if call.policy and call.parent_id is None}
    known = [(conversation.known(RequestView.of(messages, tools)), tools) for tools in offered.values()]
    longest, found = max(known, key=lambda pair: pair[0], default=(0, None))
    return found if longest else None


class _Query:
    """The parameters of a URL. Raises ApiError, naming the one that is malformed."""

    def __init__(self, values: Sequence[tuple[str, str]]) -> None:
        self._values = values

    def text(self, name: str) -> str | None:
        return dict(self._values).get(name)

    def several(self, name: str) -> list[str]:
        return [value for key, value in self._values if key in (name, f"{name}[]")]

    def boolean(self, name: str) -> bool:
        value = self.text(name)
        if value is None:
            return False
        if value.lower() not in ("true", "false"):
            raise expected("true or false", value, name)
        return value.lower() == "true"

    def whole(self, name: str, low: int, high: int, default: int) -> int:
        value = self.text(name)
        if value is None:
            return default
        number: Any = int(value) if value.removeprefix("-").isdecimal() and len(value) < 20 else None
        if number is None or not low <= number <= high:
            raise expected(f"a whole number from {low} to {high}", value, name)
        return int(number)

    def one_of(self, name: str, known: tuple[str, ...]) -> str:
        """One of the known words; the first where none is given."""
        value = self.text(name)
        if value is None:
            return known[0]
        if value not in known:
            raise expected(f"one of {', '.join(known)}", value, name)
        return value
