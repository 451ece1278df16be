"""SeveralPrompts: a Completions request with several prompts, or with `echo`, as one recorded call for each prompt.

Driven by the proxy. Each prompt is a request to policy/calls.py, with a retry key of its own, which takes its part of the
response for a response; what the parts say goes out together, once all of them are recorded. `echo` puts the prompt before
each choice, with its log-probabilities where those are asked for; with ``max_tokens: 0`` nothing is sampled, and nothing
recorded.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from uuid_utils import uuid7

from agentlightning.gateway.asgi_response import AgentRequest, AgentResponse
from agentlightning.gateway.attempts import TrackedAttempt
from agentlightning.gateway.limits import Admission
from agentlightning.gateway.policy.calls import PolicyCalls
from agentlightning.gateway.policy.engine_router import EngineRouter, Policy
from agentlightning.gateway.policy.prompt_scores import prompt_tokens
from agentlightning.gateway.policy.scoring import PromptScoring
from agentlightning.protocols import completions
from agentlightning.protocols.base import (
    ApiError,
    Choice,
    Completion,
    CompletionReader,
    CompletionRequest,
    Delta,
    EventStream,
)
from agentlightning.records import JSON
from agentlightning.store.base import LightningStore


class SeveralPrompts:
    """Use from one event loop."""

    def __init__(self, store: LightningStore, calls: PolicyCalls, engine_router: EngineRouter) -> None:
        self._store = store
        self._calls = calls
        self._engine_router = engine_router
        self._scoring = PromptScoring(engine_router)

    async def answer(
        self,
        requests: list[JSON],
        attempt: TrackedAttempt,
        admission: Admission,
        incoming: AgentRequest,
        reply: AgentResponse,
    ) -> None:
        """Answer the requests that `completions.split` made of one. Raises as PolicyCalls.answer does."""
        parsed = [completions.parse(data) for data in requests]
        policy = await self._engine_router.policy(attempt.rollout, parsed[0].model)
        response = _Response(parsed, reply, _Echo(policy, attempt, admission, self._scoring))
        gone = asyncio.Event()
        watch = incoming.on_disconnect(gone.set)
        delivered = False
        try:
            async with asyncio.TaskGroup() as group:
                for part, data in zip(response.parts, requests, strict=True):
                    if part.request.max_tokens == 0:
                        group.create_task(part.without_sampling(policy))
                    else:
                        asked = _PartRequest(incoming, part.place)
                        group.create_task(self._calls.answer(part, data, attempt, admission, asked, part.reply))
            watch.look()
            delivered = not gone.is_set()
            await response.last()
        except* Exception as several:
            raise several.exceptions[0] from None
        finally:
            watch.stop()
            if not delivered:
                await self._mark_undelivered(attempt, response)

    async def _mark_undelivered(self, attempt: TrackedAttempt, response: _Response) -> None:
        """Parts that were recorded while others went on, or failed: the agent has got none of them."""
        ids = [
            one.call_id if not index else f"{one.call_id}.{index}"
            for part in response.parts
            if (one := part.completion) is not None and part.request.max_tokens != 0
            for index in range(len(one.choices))
        ]
        if ids:
            await self._store.mark_delivered(attempt.rollout.id, attempt.number, ids, False)


class _Echo:
    """The prompt as the beginning of a choice."""

    def __init__(self, policy: Policy, attempt: TrackedAttempt, admission: Admission, scoring: PromptScoring) -> None:
        self._policy = policy
        self._attempt = attempt
        self._admission = admission
        self._scoring = scoring

    async def of(self, request: CompletionRequest, ids: list[int]) -> Delta:
        """The text of the request's prompt, which has these ids, and its tokens where log-probabilities are asked for."""
        renderer, prompt = self._policy.renderer, request.prompt
        text = prompt if isinstance(prompt, str) else renderer.decode(ids, special=True)
        if not request.logprobs:
            return Delta(content=text)
        scored = await self._scoring.score(self._policy, ids, request.top_logprobs, self._attempt, self._admission)
        return Delta(content=text, logprobs=prompt_tokens(scored, renderer, ids, request.top_logprobs))

    async def scored(self, request: CompletionRequest, found: Completion) -> Completion:
        """The completion with the prompt's own table of log-probabilities, where it is asked for."""
        return await self._scoring.complete(self._policy, request, found, self._attempt, self._admission)


class _Response:
    """The response that the parts make up."""

    def __init__(self, requests: list[CompletionRequest], reply: AgentResponse, echo: _Echo) -> None:
        self.reply = reply
        self.echo = echo
        self.parts = [_Part(self, place, request) for place, request in enumerate(requests)]
        self.known = asyncio.Event()
        """All parts know the ids of their prompts, so that the stream can begin."""
        self._events: EventStream | None = None

    @property
    def events(self) -> EventStream:
        """The events of the whole stream; only when all parts are known."""
        if self._events is None:
            first = self.parts[0]
            self._events = completions.joined_stream(
                first.request,
                [part.prompt_ids for part in self.parts],
                completions.frame(first.call_id, first.model, int(time.time())),
                sum(part.prompt_tokens for part in self.parts),
            )
            self.reply.failed = self._events.failed
        return self._events

    async def start(self) -> None:
        """Begin the stream once all parts are known."""
        if all(part.call_id for part in self.parts):
            self.known.set()
        await self.known.wait()
        if not self.reply.started:
            self._head()
            await self.reply.start_events(self.events.first())

    async def last(self) -> None:
        """Send the end, or everything where nothing was streamed."""
        done = [part.completion for part in self.parts if part.completion is not None]
        if self.parts[0].request.stream:
            await self.start()
            await self.reply.end(self.events.last(completions.joined(done)))
        else:
            self._head()
            await self.reply.whole(200, completions.joined_body(self.parts[0].request, done))

    def _head(self) -> None:
        self.reply.request_id, self.reply.ignored = self.parts[0].call_id, self.parts[0].reply.ignored


class _Part:
    """One prompt's part: to policy/calls.py it is the protocol, whose bodies and events it keeps for the whole."""

    NAME = completions.NAME

    def __init__(self, response: _Response, place: int, request: CompletionRequest) -> None:
        self.response = response
        self.place = place
        self.request = request
        self.reply = _PartReply(self)
        self.call_id = self.model = ""
        self.prompt_ids: list[int] | None = None
        self.prompt_tokens = 0
        self.completion: Completion | None = None
        """Set once the call is recorded."""
        self._waiting: list[tuple[int, Delta]] = []

    async def without_sampling(self, policy: Policy) -> None:
        """The prompt alone."""
        prompt = self.request.prompt
        ids = prompt if isinstance(prompt, list) else policy.renderer.encode(prompt or "")
        self._known(replace(self.request, planned_ids=ids), str(uuid7()), self.request.model or policy.model, len(ids))
        found = Completion(
            call_id=self.call_id,
            model=self.model,
            created_s=int(time.time()),
            prompt_tokens=len(ids),
            choices=(Choice(content="", finish_reason="length", logprobs=() if self.request.logprobs else None),)
            * self.request.n,
            prompt_ids=tuple(ids),
        )
        self.completion = await self.response.echo.scored(self.request, found)
        if self.request.stream:
            await self.begin()
        else:
            await self.echoed()

    async def begin(self) -> None:
        """Begin the stream, with the prompt before each choice where that is wanted."""
        await self.response.start()
        if self.request.repeats_prompt:
            delta = await self.response.echo.of(self.request, self.prompt_ids or [])
            self._waiting = [*((index, delta) for index in range(self.request.n)), *self._waiting]
        await self.send()

    async def send(self) -> None:
        """Send what was said since."""
        waiting, self._waiting = self._waiting, []
        offset = self.place * self.request.n
        events = b"".join(self.response.events.delta(offset + index, delta) for index, delta in waiting)
        if events:
            await self.response.reply.more(events)

    async def echoed(self) -> None:
        """Put the prompt before each choice of the completion where that is wanted."""
        whole = self.completion
        if whole is None or not self.request.repeats_prompt:
            return
        echo = await self.response.echo.of(self.request, list(whole.prompt_ids or ()))
        choices = tuple(
            replace(
                choice,
                content=echo.content + (choice.content or ""),
                logprobs=None if choice.logprobs is None else (*(echo.logprobs or ()), *choice.logprobs),
            )
            for choice in whole.choices
        )
        self.completion = replace(whole, choices=choices)

    def _known(self, request: CompletionRequest, call_id: str, model: str, prompt_tokens: int) -> None:
        self.call_id, self.model, self.prompt_tokens = call_id, model, prompt_tokens
        self.prompt_ids = request.planned_ids
        if all(part.call_id for part in self.response.parts):
            self.response.known.set()

    # --- the protocol -----------------------------------------------------------------------------------------------

    def parse(self, data: JSON, trained: bool = True) -> CompletionRequest:
        return self.request

    def body(self, request: CompletionRequest, completion: Completion) -> bytes:
        self._known(request, completion.call_id, completion.model, completion.prompt_tokens)
        self.completion = completion
        return b""

    def stream(
        self, request: CompletionRequest, call_id: str, model: str, created_s: int, prompt_tokens: int
    ) -> EventStream:
        self._known(request, call_id, model, prompt_tokens)
        return self

    def error(self, refusal: ApiError) -> bytes:
        return completions.error(refusal)

    def reader(self) -> CompletionReader:
        return completions.reader()

    # --- its stream -------------------------------------------------------------------------------------------------

    def first(self) -> bytes:
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        self._waiting.append((index, delta))
        return b""

    def last(self, completion: Completion) -> bytes:
        self.completion = completion
        return b""

    def failed(self, refusal: ApiError) -> bytes:
        return b""


class _PartRequest(AgentRequest):
    """The request for one prompt: a retry of its own."""

    def __init__(self, whole: AgentRequest, place: int) -> None:
        for name in AgentRequest.__slots__:
            setattr(self, name, getattr(whole, name))
        if whole.idempotency_key is not None and place:
            self.idempotency_key = f"{whole.idempotency_key}.{place}"


class _PartReply(AgentResponse):
    """Takes one part of the response from policy/calls.py."""

    def __init__(self, part: _Part) -> None:
        super().__init__(None, b"")
        self._part = part

    async def whole(
        self, status: int, body: bytes, content_type: bytes = b"", headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        self.started = True
        await self._part.echoed()

    async def start_events(self, first: bytes, content_type: bytes = b"") -> None:
        self.started = True
        await self._part.begin()

    async def more(self, events: bytes) -> None:
        await self._part.send()

    async def end(self, events: bytes) -> None:
        await self._part.send()
