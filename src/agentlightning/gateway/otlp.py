"""Traces in: OTLP/HTTP requests of agents' programs (protobuf and JSON, gzip) to spans in the store.

Driven by the proxy for POST …/v1/traces. A span belongs to the attempt that the attributes ``agl.rollout_id`` and
``agl.attempt`` (default: the latest) of it or its resource name, else to that of the path or of the key. An admin may name
any attempt, an attempt's key those of its rollout. Answers in OTLP's own terms: a request that cannot be read is refused
whole, one in which spans were broken is a partial success that says what; only what may pass is to be sent again. Exporters
send in batches, so spans are accepted for a while after their attempt has ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import orjson

from agentlightning.errors import AgentLightningError, InputError
from agentlightning.gateway.access import Authentication, ServerKeyError, cross_site_reason
from agentlightning.gateway.asgi_response import AgentRequest, AgentResponse
from agentlightning.gateway.attempts import AttemptCache
from agentlightning.gateway.limits import CallLimits, LastUsed
from agentlightning.gateway.metrics import GatewayMetrics
from agentlightning.protocols.base import ApiError
from agentlightning.records import JSON, Rollout, Span
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.gateway_events import BROKEN_SPANS
from agentlightning.store.server_keys import is_loopback
from agentlightning.store.tokens import KEY_PREFIX, is_token
from agentlightning.tracing.otlp import (
    OtlpRequest,
    OtlpResource,
    OtlpSpan,
    read_json,
    read_protobuf,
    write_response,
    write_status,
)
from agentlightning.tracing.sanitize import SanitizedSpans, SpanOwner, SpanSanitizer

MAX_REQUEST_BYTES = 32 * 1024 * 1024
"""Bytes of a request, uncompressed."""
MAX_LATE_NS = 10 * 60 * 10**9
"""Time after its end for which an attempt's spans are accepted."""
MAX_CACHED_ATTEMPTS = 256
MAX_CACHED_SPAN_IDS = 20_000
"""Spans of an attempt whose ids are cached; where there are more, they are read from the store again."""
MAX_SPANS_PER_REQUEST = 50_000
MAX_REPORTS = 1000
"""Reports of broken spans per attempt: a program may send nothing else, without end."""
MAX_ATTEMPTS_PER_REQUEST = 256
TOO_MANY_ATTEMPTS = f"of more than {MAX_ATTEMPTS_PER_REQUEST} attempts in one request"
SPANS_PER_WRITE = 500
MAX_INLINE_BYTES = 256 * 1024
"""A larger request is read in a thread, so that model calls need not wait for it."""
ASSUMED_RATIO = 16
"""Uncompressed bytes per compressed byte, to estimate the time that reading takes."""

R = TypeVar("R")

Encoding = Literal["json", "protobuf"]
CONTENT_TYPES: dict[Encoding, bytes] = {"json": b"application/json", "protobuf": b"application/x-protobuf"}


@dataclass(slots=True, eq=False, weakref_slot=True)
class _AttemptState:
    """An attempt's sanitizer; None before it is read from the store, and after a write that failed."""

    sanitizer: SpanSanitizer | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Counts of an attempt's spans are read and written in turns."""


@dataclass(frozen=True, slots=True)
class _Sender:
    own: Rollout | None
    """The rollout of the path or key; None for an admin."""
    number: int


class TraceReceiver:
    """Takes spans in."""

    def __init__(
        self,
        store: LightningStore,
        attempts: AttemptCache,
        limits: CallLimits,
        metrics: GatewayMetrics,
        authentication: Authentication,
    ) -> None:
        self._store = store
        self._attempts = attempts
        self._limits = limits
        self._metrics = metrics
        self._authentication = authentication
        self._states = LastUsed[SpanOwner, _AttemptState](_AttemptState, MAX_CACHED_ATTEMPTS)

    async def answer(self, incoming: AgentRequest, reply: AgentResponse) -> None:
        """Answer one request, whatever goes wrong, in the encoding that it came in."""
        encoding: Encoding = "json"
        try:
            encoding = _encoding(incoming)
            sender = await self._sender(incoming)
            taken, refused = await self._admitted(sender, encoding, incoming)
        except ApiError as refusal:
            await _refuse(reply, encoding, refusal.status, str(refusal))
        except InputError as cause:
            await _refuse(reply, encoding, 400, str(cause))
        except AgentLightningError as cause:
            await _refuse(reply, encoding, cause.http_status, str(cause))
        else:
            self._metrics.spans(len(taken.spans), taken.broken)
            await _succeed(reply, encoding, taken, refused)

    async def _admitted(
        self, sender: _Sender, encoding: Encoding, incoming: AgentRequest
    ) -> tuple[SanitizedSpans, Counter[str]]:
        """Takes a request in within the server's limits of an attempt; those of the run are for calls."""
        admission = None
        if sender.own is not None:
            admission = await self._limits.enter(sender.own, sender.number, incoming.length)
        try:
            body = await incoming.body(None if admission is None else admission.take)
            packed = _is_packed(incoming)
            size = len(body) * (ASSUMED_RATIO if packed else 1)
            body = await _aside(size, lambda: _unpacked(body) if packed else body)
            if len(body) > MAX_REQUEST_BYTES:
                raise ApiError(f"the body is larger than {MAX_REQUEST_BYTES} bytes", status=413)
            read = read_json if encoding == "json" else read_protobuf
            received = await _aside(len(body), lambda: read(body, MAX_SPANS_PER_REQUEST))
            return await self._take(sender, received, body)
        finally:
            if admission is not None:
                admission.leave()

    # --- whose spans --------------------------------------------------------------------------------------------------

    async def _sender(self, incoming: AgentRequest) -> _Sender:
        """Authenticates the sender. Raises ApiError."""
        if incoming.named is None:
            has_key = self._authentication.server_key is not None
            if (has_key or is_token(incoming.key or "")) and await self._is_admin(incoming):
                return _Sender(None, 0)
            keyless = incoming.key is None or not incoming.key.startswith(KEY_PREFIX)
            if keyless and not has_key and incoming.client is not None and is_loopback(incoming.client):
                headers = [(name, value) for name, value in incoming.headers if name != b"content-type"]
                if why := cross_site_reason("POST", [*headers, (b"content-type", b"application/json")]):
                    raise ApiError(why, status=403, type="permission_error", code="cross_site")
                return _Sender(None, 0)
        owner = await self._attempts.identify(incoming.named, incoming.key, incoming.client)
        rollout_id, number = owner[:2]
        try:
            return _Sender((await self._attempts.running((rollout_id, number))).rollout, number)
        except ApiError as refusal:
            if refusal.code != "attempt_over":
                raise
        rollout = await self._rollout(rollout_id)
        if rollout is None:  # never without one: that is what an admin has
            raise ApiError(f"no rollout {rollout_id}", status=404, code="unknown_attempt")
        return _Sender(rollout, number)

    async def _is_admin(self, incoming: AgentRequest) -> bool:
        try:
            return (await self._authentication.caller(incoming.headers)).role == "admin"
        except ServerKeyError:  # it may be an attempt's key
            return False

    async def _rollout(self, rollout_id: str) -> Rollout | None:
        found = await self._store.rollouts(RolloutQuery(ids=[rollout_id]))
        return found[0] if found else None

    async def _sort(
        self, sender: _Sender, received: OtlpRequest
    ) -> tuple[dict[SpanOwner, list[OtlpResource]], Counter[str]]:
        """The spans by the attempt that they belong to, and the number of those that are refused, by reason."""
        known: dict[tuple[str | None, int | None], SpanOwner | str] = {}
        found: dict[SpanOwner, list[OtlpResource]] = {}
        refused = Counter[str]()
        for resource in received.resources:
            parts: dict[SpanOwner, OtlpResource] = {}
            for span in resource.spans:
                named = _named(span, resource.attributes)
                if named not in known:
                    over = len(known) >= MAX_ATTEMPTS_PER_REQUEST
                    known[named] = TOO_MANY_ATTEMPTS if over else await self._meant(sender, *named)
                owner = known[named]
                if isinstance(owner, str):
                    refused[owner] += 1
                    continue
                if owner not in parts:
                    parts[owner] = OtlpResource(attributes=resource.attributes)
                    found.setdefault(owner, []).append(parts[owner])
                parts[owner].spans.append(span)
        return found, refused

    async def _meant(self, sender: _Sender, rollout_id: str | None, number: int | None) -> SpanOwner | str:
        """The attempt, or the reason why its spans are refused."""
        if rollout_id is None:
            if sender.own is None:
                return "no attempt named (path, key, or the attributes agl.rollout_id and agl.attempt)"
            rollout, number = sender.own, sender.number
        else:
            found = await self._rollout(rollout_id) if sender.own is None else sender.own
            if found is None or found.id != rollout_id:
                return "of a rollout that this key does not open, or that does not exist"
            rollout = found
            number = rollout.attempt if number is None else number
        if not 1 <= number <= rollout.attempt:
            return "of an attempt that does not exist"
        if rollout.finished_ns is not None and time.time_ns() - rollout.finished_ns > MAX_LATE_NS:
            return "of an attempt that has long been over"
        return _owner(rollout, number)

    # --- taking -------------------------------------------------------------------------------------------------------

    async def _take(self, sender: _Sender, received: OtlpRequest, body: bytes) -> tuple[SanitizedSpans, Counter[str]]:
        """Records the spans; returns all that were recorded, and what was refused, by cause."""
        together = SanitizedSpans()
        by_attempt, refused = await self._sort(sender, received)
        if received.lost and sender.own is not None and not by_attempt:
            by_attempt[_owner(sender.own, sender.number)] = []
        lost = received.lost
        for owner, resources in by_attempt.items():
            state = self._states.use(owner)
            async with state.lock:
                taken = await self._take_of(state, owner, resources, lost, body)
            together.spans += taken.spans
            together.broken += taken.broken
            lost = 0  # nobody knows whose they were: the first attempt's
        if lost:
            together.broken["undecodable"] += lost
        return together, refused

    async def _take_of(
        self, state: _AttemptState, owner: SpanOwner, resources: list[OtlpResource], lost: int, body: bytes
    ) -> SanitizedSpans:
        sanitizer, state.sanitizer = state.sanitizer, None  # where a write fails, it is read again
        if sanitizer is None:
            spans = await self._store.spans([owner.rollout_id])
            sanitizer = SpanSanitizer(owner, [span for span in spans if span.attempt == owner.attempt])
        taken = await _aside(len(body), lambda: sanitizer.take(resources))
        if lost:
            taken.broken["undecodable"] += lost
        records = taken.spans
        if taken.broken and sanitizer.told < MAX_REPORTS:
            sanitizer.told += 1
            records = [_report(owner, taken, body), *records]
        for start in range(0, len(records), SPANS_PER_WRITE):
            await self._store.append_spans(records[start : start + SPANS_PER_WRITE])
        if sanitizer.count <= MAX_CACHED_SPAN_IDS:
            state.sanitizer = sanitizer
        return taken


def _owner(rollout: Rollout, number: int) -> SpanOwner:
    return SpanOwner(run_id=rollout.run_id, rollout_id=rollout.id, attempt=number)


def _report(owner: SpanOwner, taken: SanitizedSpans, body: bytes) -> Span:
    """Says what was wrong; its id follows from the request, so that what is sent again is not counted again."""
    now_ns = time.time_ns()
    return Span(
        id=owner.span_id(f"broken.{hashlib.blake2b(body, digest_size=8).hexdigest()}"),
        run_id=owner.run_id,
        rollout_id=owner.rollout_id,
        attempt=owner.attempt,
        name=BROKEN_SPANS,
        attributes=dict(taken.broken),
        started_ns=now_ns,
        finished_ns=now_ns,
    )


def _named(span: OtlpSpan, resource: JSON) -> tuple[str | None, int | None]:
    """The attempt that a span or its resource names."""
    for attributes in (span.attributes, resource):
        rollout_id = attributes.get("agl.rollout_id")
        if isinstance(rollout_id, str) and rollout_id:
            number = attributes.get("agl.attempt")
            if isinstance(number, str) and number.isascii() and number.isdigit() and len(number) < 6:
                number = int(number)
            return rollout_id, number if isinstance(number, int) else None
    return None, None


# --- bytes ------------------------------------------------------------------------------------------------------------


def _header(incoming: AgentRequest, wanted: bytes) -> bytes:
    return next((value for name, value in incoming.headers if name == wanted), b"")


def _encoding(incoming: AgentRequest) -> Encoding:
    kind = _header(incoming, b"content-type").partition(b";")[0].strip().lower()
    for encoding, content_type in CONTENT_TYPES.items():
        if kind == content_type:
            return encoding
    expected = " or ".join(name.decode() for name in CONTENT_TYPES.values())
    raise ApiError(f"Content-Type: expected {expected}, got {kind[:80].decode('latin-1')!r}", status=415)


def _is_packed(incoming: AgentRequest) -> bool:
    given = _header(incoming, b"content-encoding").strip().lower()
    if given not in (b"", b"identity", b"gzip"):
        raise ApiError(f"Content-Encoding: expected gzip, got {given[:80].decode('latin-1')!r}", status=415)
    return given == b"gzip"


def _unpacked(body: bytes) -> bytes:
    unpacker = zlib.decompressobj(wbits=31)
    try:
        plain = unpacker.decompress(body, MAX_REQUEST_BYTES + 1)
    except zlib.error as cause:
        raise ApiError(f"the body is not what Content-Encoding says: {cause}") from None
    if not unpacker.eof and len(plain) <= MAX_REQUEST_BYTES:
        raise ApiError("the body ends in the middle of its compressed data")
    if unpacker.unused_data:
        raise ApiError("the body goes on after the end of its compressed data")
    return plain


async def _aside(size: int, work: Callable[[], R]) -> R:
    """The result of some work, in a thread where there is much of it."""
    return work() if size <= MAX_INLINE_BYTES else await asyncio.to_thread(work)


async def _succeed(reply: AgentResponse, encoding: Encoding, taken: SanitizedSpans, refused: Counter[str]) -> None:
    rejected = taken.lost + refused.total()
    causes = [f"{count} {cause}" for cause, count in sorted((*taken.broken.items(), *refused.items()))]
    message = "; ".join(causes)
    if encoding == "json":
        partial = {"partialSuccess": {"rejectedSpans": str(rejected), "errorMessage": message}} if causes else {}
        await reply.whole(200, orjson.dumps(partial))
    else:
        await reply.whole(200, write_response(rejected, message), CONTENT_TYPES["protobuf"])


async def _refuse(reply: AgentResponse, encoding: Encoding, status: int, message: str) -> None:
    again = ((b"retry-after", b"1"),) if status in (429, 503) else ()
    content = orjson.dumps({"message": message}) if encoding == "json" else write_status(message)
    await reply.whole(status, content, CONTENT_TYPES[encoding], again)
