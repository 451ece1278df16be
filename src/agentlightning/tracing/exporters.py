"""Traces out: the rollouts of a run to an OpenTelemetry collector (Jaeger, Phoenix, Langfuse, …) or to a file.

Driven by the trainer while a run goes on, and by ``agl runs export --as traces`` afterwards. A collector that is away is
waited for, one that refuses is an error; what it has answered for is not sent again. The same record makes the same trace,
ids and all. Attributes have the names of OpenTelemetry's GenAI conventions, and of OpenInference beside them (Phoenix reads
nothing else); what they have no name for begins with ``agl.``. Spans of a rollout's trace are

    root    agl.run_id, agl.rollout_id, agl.attempt, agl.mode, agl.step, agl.group_id, agl.outcome, agl.reward,
            agl.rewards.NAME; the task is its input, the last completion its output
    call    gen_ai.request.model, .usage.input_tokens, .usage.output_tokens, .input.messages, .output.messages, .agent.name;
            agl.call_id, agl.policy, agl.policy_version, agl.continuation, agl.rewards.NAME (step rewards)
    others  as they were recorded; their own trace is agl.trace_id, a root among them is the root's child
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

import aiohttp
import orjson

from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.records import ABANDONED, JSON, Call, Reward, Rollout, Span
from agentlightning.rendering.call_chain import call_chain, chain_prompt, chain_tools
from agentlightning.runtime.backoff import Backoff
from agentlightning.runtime.disk import open_private
from agentlightning.store.base import LightningStore
from agentlightning.tracing.otlp import hex_of, read_response, write_json, write_protobuf

ROLLOUTS_PER_BATCH = 16
"""Rollouts that are read and sent at a time."""
TIMEOUT_S = 30.0
RETRYABLE_STATUSES = frozenset({429, 502, 503, 504})
"""Answers after which OTLP lets a client send again."""
MAX_REQUEST_BYTES = 8 * 1024 * 1024
"""Bytes of a request, unpacked: most collectors take 20 MiB."""


class ExportRejected(AgentLightningError):
    """The collector does not take the traces, and would not if they were sent again."""


class TraceExporter(AbstractAsyncContextManager["TraceExporter", None]):
    """A destination of traces."""

    rejected = 0
    """Spans that were accepted and then not kept, by what the other side says."""
    reason = ""

    @abstractmethod
    async def send(self, spans: Sequence[Span], resource: JSON) -> None:
        """Durable, or with the collector, on return. Raises ExportRejected."""


class OtlpHttpExporter(TraceExporter):
    """An OTLP/HTTP endpoint (protobuf, gzip).

    headers: sent with every request. timeout_s: how long the collector may be away. first_pause_s: between the first two
    tries; then it doubles, up to half a minute. A collector that asks for a longer pause gets it.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str], timeout_s: float = 300.0, first_pause_s: float = 1.0
    ) -> None:
        self._url = url
        self._headers = {**headers, "content-type": "application/x-protobuf", "content-encoding": "gzip"}
        self._timeout_s = timeout_s
        self._first_pause_s = first_pause_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, spans: Sequence[Span], resource: JSON) -> None:
        for body in await asyncio.to_thread(_packed, spans, resource):
            await self._send(body)

    async def _send(self, body: bytes) -> None:
        backoff = Backoff(self._first_pause_s, max_s=30.0, timeout_s=self._timeout_s)
        while (failure := await self._try(body)) is not None:
            why, asked_s = failure
            if not await backoff.sleep(asked_s):
                raise ExportRejected(f"{self._url}: took no traces for {self._timeout_s:.0f} s: {why}")

    async def _try(self, body: bytes) -> tuple[str, float] | None:
        """Returns why to send again, and after how many seconds at least; None where the collector took it."""
        assert self._session is not None
        try:
            # a redirected POST becomes a GET of a page that says 200 and takes nothing
            post = self._session.post(self._url, data=body, headers=self._headers, allow_redirects=False)
            async with post as response:
                said = await response.read()
        except (aiohttp.ClientError, TimeoutError) as cause:
            return str(cause) or type(cause).__name__, 0.0
        if response.status in RETRYABLE_STATUSES:
            asked = response.headers.get("retry-after", "")
            return f"HTTP {response.status}", float(asked) if asked.isascii() and asked.isdigit() else 0.0
        if response.status >= 300:
            text = response.headers.get("location") or said[:200].decode("utf-8", "replace").strip()
            raise ExportRejected(f"{self._url}: refuses traces with HTTP {response.status}: {text}")
        if response.content_type == "application/x-protobuf":
            rejected, reason = read_response(said)
            self.rejected += rejected
            self.reason = reason or self.reason
        return None


class OtlpFileExporter(TraceExporter):
    """A new file of one OTLP/JSON request per line, as the OpenTelemetry Collector's file exporter writes and reads it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def __aenter__(self) -> Self:
        try:
            self._file = open_private(self._path, "xb")
        except OSError as cause:
            raise ConfigError(f"--to {self._path}: expected a new file: {cause.strerror}") from cause
        return self

    async def __aexit__(self, *_: object) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    async def send(self, spans: Sequence[Span], resource: JSON) -> None:
        self._file.write(write_json(spans, resource) + b"\n")


async def send_rollouts(
    store: LightningStore, rollouts: Sequence[Rollout], exporter: TraceExporter, resource: JSON
) -> int:
    """Send these rollouts, each as a trace; how many spans they have."""
    ids = [rollout.id for rollout in rollouts]
    calls, spans, rewards = await store.calls(ids), await store.spans(ids), await store.rewards(ids)
    traces: list[Span] = []
    for rollout in rollouts:
        traces += trace_of(
            rollout,
            [call for call in calls if call.rollout_id == rollout.id],
            [span for span in spans if span.rollout_id == rollout.id],
            [reward for reward in rewards if reward.rollout_id == rollout.id],
        )
    if traces:
        await exporter.send(traces, resource)
    return len(traces)


async def finished_rollouts(store: LightningStore, run_id: str, after: int = 0) -> AsyncIterator[list[Rollout]]:
    """Rollouts of the run that have finished by now, in portions, in the order in which they did."""
    while found := await store.wait(run_id, after, timeout_s=0.0):
        for start in range(0, len(found), ROLLOUTS_PER_BATCH):
            yield found[start : start + ROLLOUTS_PER_BATCH]
        after = found[-1].finished_seq or after


def headers_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Headers as OpenTelemetry's own exporters take them from the environment.

    >>> headers_of({"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Basic%20eHl6,x-scope=a"})
    {'authorization': 'Basic eHl6', 'x-scope': 'a'}
    """
    given = environment.get("OTEL_EXPORTER_OTLP_TRACES_HEADERS") or environment.get("OTEL_EXPORTER_OTLP_HEADERS") or ""
    # The library leaves out a header with a character such as ";", and writes it to the log.
    pairs = [pair.partition("=") for pair in given.split(",") if "=" in pair]
    return {unquote(name.strip()).lower(): unquote(value.strip()) for name, _, value in pairs}


def _packed(spans: Sequence[Span], resource: JSON) -> list[bytes]:
    """As few requests as collectors take; a span that is larger than that goes alone."""
    body = write_protobuf(spans, resource)
    half = len(spans) // 2
    if len(body) <= MAX_REQUEST_BYTES or not half:
        return [gzip.compress(body, compresslevel=1)]
    return [*_packed(spans[:half], resource), *_packed(spans[half:], resource)]


# --- a rollout as one trace -------------------------------------------------------------------------------------------


def trace_of(rollout: Rollout, calls: Sequence[Call], spans: Iterable[Span], rewards: Iterable[Reward]) -> list[Span]:
    """The spans of the rollout's latest attempt, its root first. `calls` in the order they finished."""
    told = [reward for reward in rewards if reward.attempt == rollout.attempt]
    own = [span for span in spans if span.attempt == rollout.attempt]
    trace_id = _digest(rollout.id, str(rollout.attempt), size=16)
    root = _root(rollout, calls, told, trace_id)
    known = {span.id: f"{rollout.id}.{rollout.attempt}.{_span_digits(span.id)}" for span in own}
    by_id = {call.id: call for call in calls}
    chats = [
        replace(
            _chat(call, by_id, told, root.started_ns),
            trace_id=trace_id,
            parent_id=known.get(call.span_id or "", root.id),
        )
        for call in calls
    ]
    others = [
        replace(
            span,
            id=known[span.id],
            trace_id=trace_id,
            parent_id=known.get(span.parent_id or "", root.id),
            attributes=span.attributes | ({"agl.trace_id": span.trace_id} if span.trace_id else {}),
        )
        for span in own
    ]
    return [root, *chats, *others]


def resource_of(run_name: str) -> JSON:
    """Attributes of the resource of a run's traces; Phoenix and Langfuse sort by them."""
    return {"service.name": "agentlightning", "openinference.project.name": run_name or "agentlightning"}


def _root(rollout: Rollout, calls: Sequence[Call], rewards: Sequence[Reward], trace_id: str) -> Span:
    ends = [call.finished_ns for call in calls]
    started_ns = rollout.started_ns or rollout.created_ns
    attributes: JSON = {
        "openinference.span.kind": "AGENT",
        "gen_ai.operation.name": "invoke_agent",
        "session.id": rollout.run_id,
        "agl.run_id": rollout.run_id,
        "agl.rollout_id": rollout.id,
        "agl.attempt": rollout.attempt,
        "agl.mode": rollout.mode,
        "agl.step": rollout.step,
        "agl.group_id": rollout.group_id,
        "input.value": _json(rollout.task),
        "input.mime_type": "application/json",
        **_rewards(reward for reward in rewards if reward.call_id is None),
    }
    if calls:
        attributes["output.value"] = _text(calls[-1].completion.get("content"))
    told = {"agl.reward": rollout.reward, "agl.outcome": rollout.outcome, "agl.warning": rollout.warning}
    attributes |= {name: value for name, value in told.items() if value is not None}
    return Span(
        id=f"{rollout.id}.{rollout.attempt}.{_digest(rollout.id, str(rollout.attempt), 'root', size=8)}",
        run_id=rollout.run_id,
        rollout_id=rollout.id,
        attempt=rollout.attempt,
        name="rollout",
        attributes=attributes,
        started_ns=started_ns,
        finished_ns=max([started_ns, *ends, rollout.finished_ns or 0]),
        trace_id=trace_id,
        status="ok" if rollout.state == "succeeded" else "error",
        status_message=(rollout.error or rollout.state) if rollout.state != "succeeded" else "",
    )


def _chat(call: Call, by_id: Mapping[str, Call], rewards: Sequence[Reward], default_ns: int) -> Span:
    """default_ns: time of a call that has none, since it was imported from a conversation."""
    chain = call_chain(call, by_id)
    prompt = chain_prompt(chain)
    model = call.model or call.policy
    asked, sampled = call.prompt_tokens, len(call.sampled_ids)
    if not call.policy:
        asked, sampled = int(call.usage.get("prompt_tokens") or 0), int(call.usage.get("sampled_tokens") or 0)
    attributes: JSON = {
        "openinference.span.kind": "LLM",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "agentlightning",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": call.id,
        "gen_ai.response.finish_reasons": [call.finish_reason],
        "gen_ai.request.temperature": call.sampling.temperature,
        "gen_ai.request.top_p": call.sampling.top_p,
        "gen_ai.usage.input_tokens": asked,
        "gen_ai.usage.output_tokens": sampled,
        "gen_ai.input.messages": _json([_parts(message) for message in prompt]),
        "gen_ai.output.messages": _json([_parts(call.completion) | {"finish_reason": call.finish_reason}]),
        "llm.model_name": model,
        "llm.token_count.prompt": asked,
        "llm.token_count.completion": sampled,
        "llm.token_count.total": asked + sampled,
        "output.value": _text(call.completion.get("content")),
        "agl.call_id": call.id,
        "agl.protocol": call.protocol,
        "agl.continuation": call.continuation,
        **_flat("llm.input_messages", prompt),
        **_flat("llm.output_messages", [call.completion]),
        **_rewards(reward for reward in rewards if reward.call_id == call.id),
    }
    tools = chain_tools(chain)
    told = {
        "gen_ai.request.max_tokens": call.sampling.max_tokens,
        "gen_ai.agent.name": call.agent or None,
        "agl.policy": call.policy or None,
        "agl.policy_version": call.versions[-1].version if call.versions else None,
        "gen_ai.tool.definitions": _json(tools) if tools else None,
    }
    attributes |= {name: value for name, value in told.items() if value is not None}
    return Span(
        id=f"{call.rollout_id}.{call.attempt}.{_digest(call.id, size=8)}",
        run_id=call.run_id,
        rollout_id=call.rollout_id,
        attempt=call.attempt,
        name=f"chat {model}",
        attributes=attributes,
        started_ns=call.started_ns or default_ns,
        finished_ns=call.finished_ns or default_ns,
        kind="client",
        status="error" if call.finish_reason == ABANDONED else "unset",
    )


def _parts(message: JSON) -> JSON:
    """A message of ours in the form of the GenAI conventions."""
    role, content = str(message.get("role", "")), message.get("content")
    if role == "tool":
        reply = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}
        return {"role": role, "parts": [reply]}
    parts: list[JSON] = []
    if message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": message["reasoning_content"]})
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str) and text:
            parts.append({"type": "text", "content": text})
        elif isinstance(part, dict):
            parts.append(part)
    for call in message.get("tool_calls") or ():
        named = {name: (call.get("function") or {}).get(name) for name in ("name", "arguments")}
        parts.append({"type": "tool_call", "id": call.get("id"), **named})
    return {"role": role, "parts": parts}


def _flat(prefix: str, messages: Sequence[JSON]) -> JSON:
    """Messages as OpenInference flattens them."""
    found: JSON = {}
    for place, message in enumerate(messages):
        at = f"{prefix}.{place}.message"
        found[f"{at}.role"] = str(message.get("role", ""))
        found[f"{at}.content"] = _text(message.get("content"))
        found[f"{at}.tool_call_id"] = str(message.get("tool_call_id") or "")
        for number, call in enumerate(message.get("tool_calls") or ()):
            function, of = call.get("function") or {}, f"{at}.tool_calls.{number}.tool_call"
            found[f"{of}.id"] = str(call.get("id", ""))
            found[f"{of}.function.name"] = str(function.get("name", ""))
            found[f"{of}.function.arguments"] = _text(function.get("arguments"))
    return {name: value for name, value in found.items() if value}


def _rewards(rewards: Iterable[Reward]) -> JSON:
    return {f"agl.rewards.{reward.name}": reward.value for reward in rewards}


def _span_digits(span_id: str) -> str:
    return hex_of(span_id) or _digest(span_id, size=8)


def _digest(*parts: str, size: int) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=size).hexdigest()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else _json(value)


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
