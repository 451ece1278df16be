"""Calls under way and their responses: `AgentCall`, `CallJob` with its record, and ResponseDecoder, which turns one sampled
completion from ids into what the agent may see of it.

Driven by policy/calls.py for streamed and whole completions alike, so that both are the same text, and by external_calls.py.
The decoder holds back what a stop string could still cut and leaves the reading of reasoning and tool calls to the model's
parser. Knows no wire format and no engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from uuid_utils import uuid7

from agentlightning.gateway.asgi_response import AgentRequest, AgentResponse, parent_span
from agentlightning.gateway.attempts import TrackedAttempt
from agentlightning.gateway.limits import Admission
from agentlightning.gateway.metrics import GatewayMetrics
from agentlightning.gateway.policy.decoding import engine_params
from agentlightning.gateway.policy.engine_client import SampledTokens
from agentlightning.gateway.policy.engine_router import Policy
from agentlightning.gateway.policy.images import CallImages, engine_prompt
from agentlightning.protocols.base import (
    ApiError,
    Choice,
    Completion,
    CompletionRequest,
    Delta,
    TokenLogprob,
    ToolCall,
    ToolDelta,
    WireFormat,
    replayed,
)
from agentlightning.protocols.response_items import FOLDS
from agentlightning.protocols.system_prompts import prompt_name, prompt_text
from agentlightning.records import (
    ABANDONED,
    JSON,
    SYSTEM_PROMPT,
    TEMPLATE_KWARGS,
    TOOL_SYNTAX,
    Call,
    Resource,
    Sampling,
    prefill_of,
)
from agentlightning.rendering.completion_parser import Piece, Splitter, WholeSplitter, held_back
from agentlightning.rendering.conversation import Conversation, PromptPlan
from agentlightning.rendering.model_folder import token_bytes
from agentlightning.rendering.renderer import Renderer, TextStream


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One request of an agent: who asks, in which protocol, within which limits, and where the response goes."""

    wire: WireFormat
    attempt: TrackedAttempt
    admission: Admission
    request: AgentRequest
    reply: AgentResponse
    resources: list[Resource]
    """The run's."""

    @property
    def affinity(self) -> str:
        """Name of the attempt, by which an engine with its prefix is found again."""
        return f"{self.attempt.rollout.id}/{self.attempt.number}"


@dataclass(slots=True, kw_only=True)
class CallJob:
    """One call under way."""

    id: str
    call: AgentCall
    request: CompletionRequest
    sampling: Sampling
    conversation: Conversation
    plan: PromptPlan
    started_ns: int
    overridden_params: JSON = field(default_factory=dict)
    decoding: JSON = field(default_factory=dict)
    finished_ns: int = 0
    """Time at which the last token was sampled; 0 where the record's own time is meant."""
    gone: bool = False
    """The agent has disconnected."""

    @property
    def alias(self) -> str:
        """Alias of the policy that samples; '' where an external model answers."""
        return ""

    def call_id(self, index: int) -> str:
        """The id under which choice `index` is recorded."""
        return f"{self.id}.{index}" if index else self.id

    def record(
        self,
        completion: JSON,
        finish_reason: str,
        *,
        index: int = 0,
        sampled: SampledTokens | None = None,
        usage: JSON | None = None,
    ) -> Call:
        """The record of choice `index`; without `sampled` it has no tokens."""
        plan, attempt, incoming = self.plan, self.call.attempt, self.call.request
        rollout = attempt.rollout
        sampled = sampled or SampledTokens()
        return Call(
            id=f"{self.id}.{index}" if index else self.id,
            run_id=rollout.run_id,
            rollout_id=rollout.id,
            attempt=attempt.number,
            parent_id=plan.parent.call_id if plan.parent is not None else None,
            suffix_ids=plan.suffix_ids,
            sampled_ids=sampled.ids,
            logprobs=sampled.logprobs,
            versions=sampled.versions,
            prompt_tokens=len(plan.prompt_ids),
            policy=self.alias,
            model=self.request.model,
            protocol=self.call.wire.NAME,
            sampling=self.sampling,
            history_hash=self.conversation.history_hash(plan, completion).hex(),
            request_hash=plan.request_hash.hex(),
            messages=plan.messages,
            completion=completion,
            tools=plan.tools if plan.parent is None else None,
            fork_cause=plan.fork_cause,
            untrained_tokens=plan.untrained_tokens,
            overridden_params=self.overridden_params,
            decoding=self.decoding,
            usage=usage or {},
            agent=incoming.agent or prompt_name(self._own_prompt()) or incoming.agent_id,
            finish_reason=finish_reason,
            started_ns=self.started_ns,
            finished_ns=self.finished_ns or time.time_ns(),
            span_id=parent_span(incoming.traceparent, rollout.id, attempt.number) if incoming.traceparent else None,
            delivered=not self.gone and finish_reason != ABANDONED,
            request_fields=self._request_fields(),
            images=list(plan.images),
        )

    def _own_prompt(self) -> str:
        """The system prompt that the agent sent, whatever a rule has put in its place."""
        rule = self.call.request.prompt
        return str(rule["replaced"]) if rule else prompt_text(self.request.messages)

    def _request_fields(self) -> JSON:
        kept: JSON = {}
        for name, value in self.request.echo.items():
            if value if name == FOLDS else not name.startswith("_"):
                kept[name] = value
        if self.plan.parent is None and self.plan.template_kwargs:
            kept[TEMPLATE_KWARGS] = self.plan.template_kwargs
        renderer = None if self.plan.external else self.conversation.renderer
        if self.plan.parent is None and self.plan.tools and renderer is not None and renderer.tool_text is not None:
            kept[TOOL_SYNTAX] = renderer.tool_text
        if prompt := self.call.request.prompt:
            replaced, seen = prompt["replaced"], self.call.attempt.replaced_prompts
            own = blake2b(replaced.encode(errors="replace"), digest_size=16).digest()
            known = self.plan.parent is not None and own in seen
            seen.add(own)
            kept[SYSTEM_PROMPT] = {name: value for name, value in prompt.items() if name != "replaced" or not known}
        return kept


class ResponseDecoder:
    """The text of one completion while it is sampled.

    `tool_ids` names the tool calls: call i is ``{tool_ids}{i}``.
    """

    def __init__(self, renderer: Renderer, request: CompletionRequest, prompt_text: str, tool_ids: str) -> None:
        self._renderer = renderer
        self._request = request
        self.sampled = SampledTokens()
        """The tokens sampled so far."""
        self._tool_ids = tool_ids
        parser = renderer.parser
        self._one_call = parser.tool_end if request.one_tool_call and request.parse_tools else None
        self.stops = request.stop
        """The texts at which the engine should stop."""
        self.stop_ids = request.stop_ids
        """The tokens after which the engine should stop; a special token is not in the text in which it looks for stops."""
        if self._one_call is not None:
            self.stops = (*request.stop, self._one_call)
            if (index := renderer.special_id(self._one_call)) is not None:
                self.stop_ids = (*request.stop_ids, index)
        self._text: TextStream | None = None
        self._splitter: Splitter | WholeSplitter | None = None
        """None where all is content."""
        tools = request.parse_tools or request.tools is not None
        if request.prompt is None and (tools or not parser.is_plain):
            begun = prefill_of(request.messages)
            self._splitter = parser.splitter(
                prompt_text, request.tools, tools, None if begun is None else begun["content"]
            )
        self._decoded = ""
        self._released = 0
        """Characters of the decoded text that went to the splitter."""
        self._end: list[Piece] = []
        """The pieces that came with the finish reason, and go out with it."""
        self._stopped: str | None = None
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []
        self._tokens = 0
        """Tokens whose logprobs have been given out."""
        self._ids = 0
        """Ids that have been given out."""

    def feed(self, ids: Sequence[int]) -> Delta:
        """Decodes these ids, the newest of `sampled`; returns what may be sent."""
        piece = Piece()
        if self._stopped is None:
            before = len(self._decoded)
            ends = ids and (ids[-1] in self._renderer.end_ids or ids[-1] in self._request.stop_ids)
            self._text = self._text or self._renderer.text_stream()
            self._decoded += self._text.feed(self._body(list(ids)) if ends else list(ids))
            piece = self._release(before, last=False)
        if self.sampled.finish_reason is None:
            return self._take(piece)
        self._end.append(piece)
        return Delta()

    def finish(self) -> Delta:
        """Returns what was held back, and what came with the finish reason, once sampling has ended."""
        if self._stopped is None:
            whole = self._decode(self._body(self.sampled.ids))
            if whole.startswith(self._decoded):  # the same text, and the character that the limit cut in two
                before, self._decoded = len(self._decoded), whole
            else:
                before = len(self._decoded)
            piece = self._release(before, last=True)
        else:
            piece = Piece()
        rest = self._splitter.finish() if self._splitter is not None else Piece()
        ended, self._end = self._end, []
        return replace(self._take(*ended, piece, rest), last=True)

    def choice(self) -> Choice:
        """The finished completion; only after `finish`."""
        calls: tuple[ToolCall, ...] = ()
        for index, (name, parts) in enumerate(self._calls):
            calls += (ToolCall(id=f"{self._tool_ids}{index}", name=name, arguments="".join(parts)),)
        content = "".join(self._content)
        reasoning = "".join(self._reasoning) or None
        limited = self.sampled.finish_reason == "length"
        return Choice(
            content=content if content or not calls else None,
            reasoning=reasoning,
            tool_calls=calls,
            finish_reason="length" if limited else "tool_calls" if calls else "stop",
            stop=self._stopped if self._stopped in self._request.stop else None,
            sampled_tokens=len(self.sampled.ids),
            reasoning_tokens=self._renderer.reasoning_size(self.sampled.ids, reasoning) if reasoning else 0,
            logprobs=self._logprobs(0) if self._request.logprobs else None,
            token_ids=tuple(self.sampled.ids),
        )

    # --- inside -----------------------------------------------------------------------------------------------------

    def _body(self, ids: list[int]) -> list[int]:
        """The ids that are text: without the token that ended the completion."""
        body, end = self._renderer.split_end(ids)
        stopped = end is None and body and body[-1] in self._request.stop_ids and not self._request.include_stop
        return body[:-1] if stopped else body

    def _decode(self, body: list[int]) -> str:
        return self._renderer.decode(body, special=self._renderer.parser.needs_special)

    def _release(self, before: int, last: bool) -> Piece:
        """Text up to a stop string goes to the splitter; what could begin one waits."""
        end = len(self._decoded)
        if self.stops:
            longest = max(map(len, self.stops))
            since = max(self._released, before - longest)
            found = [(at, stop) for stop in self.stops if (at := self._decoded.find(stop, since)) >= 0]
            if found:
                end, self._stopped = min(found)
                shown = self._stopped == self._one_call or self._request.include_stop  # the call is whole with it
                end += len(self._stopped) if shown else 0
            elif not last:
                end -= held_back(self._decoded[self._released :], self.stops)
        ready = self._decoded[self._released : end]
        self._released = end
        if not ready:
            return Piece()
        return Piece(content=ready) if self._splitter is None else self._splitter.feed(ready)

    def _take(self, *pieces: Piece) -> Delta:
        """Keep what the pieces say, and say it."""
        tools: list[ToolDelta] = []
        content = reasoning = ""
        for piece in pieces:
            content += piece.content
            reasoning += piece.reasoning
            # Where the agent wants no tool call (tool_choice: none) one that is sampled all the same is no text either.
            for tool in piece.tools if self._request.parse_tools else ():
                if tool.name is not None:
                    self._calls.append((tool.name, []))
                self._calls[tool.index][1].append(tool.arguments)
                call_id = f"{self._tool_ids}{tool.index}" if tool.name is not None else None
                tools.append(ToolDelta(index=tool.index, arguments=tool.arguments, id=call_id, name=tool.name))
        if content:
            self._content.append(content)
        if reasoning:
            self._reasoning.append(reasoning)
        logprobs = None
        if self._request.logprobs:
            logprobs = self._logprobs(self._tokens)
            self._tokens += len(logprobs)
        return Delta(
            content=content,
            reasoning=reasoning,
            tools=tuple(tools),
            logprobs=logprobs,
            token_ids=self._new_ids() if self._request.return_token_ids else (),
            sampled_tokens=len(self.sampled.ids),
        )

    def _new_ids(self) -> tuple[int, ...]:
        ids = tuple(self.sampled.ids[self._ids :])
        self._ids += len(ids)
        return ids

    def _logprobs(self, start: int) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of the tokens from `start` on."""
        sampled, renderer = self.sampled, self._renderer
        return tuple(
            token_logprob(renderer, sampled.ids[at], sampled.logprobs[at], self._likeliest(at))
            for at in range(start, len(shown_ids(self._request, renderer, sampled.ids)))
        )

    def _likeliest(self, at: int) -> list[tuple[int, float]]:
        """The requested number of alternatives: engines also return the token itself, wherever it ranks."""
        most = self._request.top_logprobs
        if not most or not self.sampled.top:
            return []
        return sorted(self.sampled.top[at], key=lambda pair: -pair[1])[:most]


def token_logprob(
    renderer: Renderer, index: int, logprob: float, top: Sequence[tuple[int, float]] = ()
) -> TokenLogprob:
    """A token with its text and bytes, and so its alternatives."""
    text, [piece] = renderer.token_text(index), renderer.pieces([index])
    others = tuple(token_logprob(renderer, *other) for other in top)
    return TokenLogprob(text=text, logprob=logprob, top=others, id=index, data=token_bytes(text, piece))


def shown_ids(request: CompletionRequest, renderer: Renderer, ids: list[int]) -> list[int]:
    """The sampled ids that log-probabilities are listed for: without the end token, which has no text, save where the agent
    asks for ids and aligns the two."""
    return ids if request.return_token_ids or request.tokens_as_ids else renderer.split_end(ids)[0]


@dataclass(slots=True, kw_only=True)
class PolicyJob(CallJob):
    """One call under way: n samples of one prompt."""

    policy: Policy
    seeds: list[int]
    decoders: list[ResponseDecoder]
    images: CallImages
    replayed: list[Call] = field(default_factory=list)
    """The recorded choices that it repeats; empty where it is sampled."""

    @property
    def alias(self) -> str:
        return self.policy.alias

    def record_choice(self, index: int, completion: JSON, finish_reason: str) -> Call:
        """The record of choice `index`, with its tokens."""
        call = self.record(completion, finish_reason, index=index, sampled=self.decoders[index].sampled)
        return replace(call, replayed_id=self.replayed[index].id) if self.replayed else call

    def engine_request(self, index: int) -> JSON:
        """The request for choice `index` in the form of vLLM's /inference/v1/generate."""
        tokens: JSON = {"token_ids": self.plan.prompt_ids}
        parameters: JSON = {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            # vLLM counts the token itself among its alternatives, and has 20 at most.
            "logprobs": min(self.request.top_logprobs + 1, 20) if self.request.top_logprobs else 0,
            "stop": self.decoders[index].stops,
            "stop_token_ids": self.decoders[index].stop_ids,
            **(engine_params(self.decoding) if self.decoding else {}),
        }
        if self.request.prompt_logprobs is not None and index == 0:
            parameters["prompt_logprobs"] = self.request.prompt_logprobs
        if self.policy.seed is not None:
            parameters["seed"] = self.seeds[index]
        if self.sampling.max_tokens is not None:
            parameters["max_tokens"] = self.sampling.max_tokens
        return {
            "request_id": f"{self.id}.{index}" if index else self.id,
            "model": self.policy.alias,
            **(engine_prompt(self.plan, self.images, self.policy.renderer) if self.images.files else tokens),
            "stream": self.request.stream,
            "sampling_params": parameters,
        }


class StreamedResponse:
    """The completion goes out as it is sampled; its end waits for the record."""

    def __init__(self, job: PolicyJob, metrics: GatewayMetrics) -> None:
        model = job.request.model or job.policy.model
        created_s = job.started_ns // 10**9
        prompt_tokens = len(job.plan.prompt_ids)
        request = replace(job.request, cached_tokens=prompt_tokens - len(job.plan.suffix_ids))
        self._events = job.call.wire.stream(request, job.id, model, created_s, prompt_tokens)
        self._started_ns = job.started_ns
        self._type = request.stream_type
        reply = self._reply = job.call.reply
        self._metrics = metrics
        reply.failed = self._events.failed

    async def more(self, index: int, delta: Delta) -> None:
        """Send what a choice adds. The opening is rendered first: events are numbered as they are made."""
        if not (delta.content or delta.reasoning or delta.tools or delta.logprobs or delta.token_ids):
            return
        if not self._reply.started:
            await self._start()
        events = self._events.delta(index, delta)
        await self._reply.send({"type": "http.response.body", "body": events, "more_body": True})

    async def last(self, rest: list[Delta], answer: Completion) -> None:
        """Send what was held back, and the end."""
        if not self._reply.started:
            await self._start()
        deltas = [self._events.delta(index, delta) for index, delta in enumerate(rest) if _says(delta)]
        await self._reply.end(b"".join(deltas) + self._events.last(answer))

    async def _start(self) -> None:
        self._metrics.first_token.observe((time.time_ns() - self._started_ns) / 1e9)
        await self._reply.start_events(self._events.first(), self._type)


async def send_recorded(call: AgentCall, request: CompletionRequest, answer: Completion) -> None:
    """Send a completion that is recorded already."""
    wire, reply = call.wire, call.reply
    reply.request_id = answer.call_id
    if answer.prompt_ids is not None:
        request = replace(request, planned_ids=list(answer.prompt_ids))
    if not request.stream:
        await reply.whole(200, wire.body(request, answer))
        return
    request = replace(request, cached_tokens=answer.cached_tokens)
    events = wire.stream(request, answer.call_id, answer.model, answer.created_s, answer.prompt_tokens)
    *parts, end = replayed(events, answer, bool(request.return_token_ids))
    await reply.start_events(b"".join(parts), request.stream_type)
    await reply.end(end)


async def send_end(call: AgentCall, request: CompletionRequest, reached: ApiError) -> None:
    """Send a message in place of a completion, which is in no record: a limit was reached, and the agent is to end."""
    content = f"The budget of this task is used up: {reached.message}. No further call is answered; end here."
    choice = Choice(content=content, logprobs=() if request.logprobs else None)
    now_s = int(time.time())
    answer = Completion(
        call_id=str(uuid7()),
        model=request.model,
        created_s=now_s,
        prompt_tokens=0,
        choices=(choice,) * request.n,
        completed_s=now_s,
    )
    await send_recorded(call, request, answer)


def _says(delta: Delta) -> bool:
    return bool(delta.content or delta.reasoning or delta.tools or delta.logprobs or delta.token_ids)
