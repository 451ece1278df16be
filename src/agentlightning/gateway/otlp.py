"""Traces in: OTLP/HTTP requests of agents' programs (protobuf and JSON, gzip) to spans in the store.

Driven by the proxy for POST …/v1/traces. Whose spans they are: what the attributes ``agl.rollout_id`` and ``agl.attempt``
(else the latest) of the span or its resource name, else the attempt of the path or of the key. An admin may name any
attempt, an attempt's key those of its rollout. Answers in OTLP's own terms: a request that cannot be read is refused whole,
one of which something was broken is a partial success that says what; only what may pass is to be sent again.

Spans often come when the attempt is over, exporters send in batches: they are taken for a while after.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import orjson

from agentlightning.errors import AgentLightningError, InputError
from agentlightning.gateway.access import Authentication, ServerKeyError, cross_site_reason
from agentlightning.gateway.asgi_response import AgentRequest, AgentResponse
from agentlightning.gateway.attempts import AttemptCache
from agentlightning.gateway.limits import CallLimits
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
MAX_CACHED_SPAN_IDS = 200_000
"""Attempts whose spans' ids are kept in memory, and such ids; those of others are read again from the store when needed."""
MAX_SPANS_PER_REQUEST = 50_000
MAX_REPORTS = 1000
"""Requests of an attempt of which the store keeps what was broken: a program may send nothing else, without end."""
MAX_ATTEMPTS_PER_REQUEST = 256
TOO_MANY_ATTEMPTS = f"of more than {MAX_ATTEMPTS_PER_REQUEST} attempts in one request"
SPANS_PER_WRITE = 500
MAX_INLINE_BYTES = 256 * 1024
"""Bytes that are read at once; what is more is read in a thread, so that model calls need not wait for it."""
ASSUMED_RATIO = 16
"""Of what a body is unpacked and packed, to tell how long it will take."""

R = TypeVar("R")

Encoding = Literal["json", "protobuf"]
CONTENT_TYPES: dict[Encoding, bytes] = {"json": b"application/json", "protobuf": b"application/x-protobuf"}
WINDOW_BITS = {b"gzip": 31, b"deflate": 15}
"""Of zlib, by Content-Encoding."""


@dataclass(slots=True, eq=False)
class _AttemptState:
    """An attempt's sanitizer; None before it is read from the store, and after a write that failed."""

    sanitizer: SpanSanitizer | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Counts of an attempt's spans are read and written in turns."""
    users: int = 0
    """Requests that have the lock or wait for it: another one must not be made beside it."""


@dataclass(frozen=True, slots=True)
class _Body:
    """Content of a request."""

    received: OtlpRequest
    size: int
    """Bytes, unpacked."""
    digest: str
    """Of its bytes: it is known by it when it is sent again."""


@dataclass(frozen=True, slots=True)
class _Sender:
    own: Rollout | None
    """The rollout of the path or key; None for an admin."""
    number: int


@dataclass(slots=True)
class _ByAttempt:
    """A request's spans by the attempt they belong to."""

    by_attempt: dict[tuple[str, int], tuple[SpanOwner, list[OtlpResource]]] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)


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
        self._held: OrderedDict[tuple[str, int], _AttemptState] = OrderedDict()

    async def answer(self, incoming: AgentRequest, reply: AgentResponse) -> None:
        """Answer one request, whatever goes wrong, in the encoding that it came in."""
        encoding: Encoding = "json"
        try:
            encoding = _encoding(incoming)
            caller = await self._caller(incoming)
            sanitized, refused = await self._admitted(caller, encoding, incoming)
        except ApiError as refusal:
            await _refuse(reply, encoding, refusal.status, str(refusal))
        except InputError as cause:
            await _refuse(reply, encoding, 400, str(cause))
        except AgentLightningError as cause:
            await _refuse(reply, encoding, cause.http_status, str(cause))
        else:
            self._metrics.spans(len(sanitized.spans), sanitized.broken)
            await _succeed(reply, encoding, sanitized, refused)

    async def _admitted(
        self, caller: _Sender, encoding: Encoding, incoming: AgentRequest
    ) -> tuple[SanitizedSpans, Counter[str]]:
        """Takes a request in within the server's limits of an attempt; those of the run are for calls."""
        admission = None
        if caller.own is not None:
            admission = await self._limits.enter(caller.own, caller.number, incoming.length)
        try:
            body = await incoming.body(None if admission is None else admission.take)
            packing = _packing(incoming)
            size = len(body) * (ASSUMED_RATIO if packing else 1)
            return await self._take(caller, await _aside(size, lambda: _read(encoding, packing, body)))
        finally:
            if admission is not None:
                admission.leave()

    # --- whose spans --------------------------------------------------------------------------------------------------

    async def _caller(self, incoming: AgentRequest) -> _Sender:
        """Authenticates the sender. Raises ApiError."""
        if incoming.named is None:
            has_key = self._authentication.server_key is not None
            if (has_key or is_token(incoming.key or "")) and await self._is_admin(incoming):
                return _Sender(None, 0)
            keyless = incoming.key is None or not incoming.key.startswith(KEY_PREFIX)
            if keyless and not has_key and incoming.client is not None and is_loopback(incoming.client):
                _refuse_pages(incoming)
                return _Sender(None, 0)
        rollout_id, number = await self._attempts.identify(incoming.named, incoming.key, incoming.client)
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

    async def _sort(self, caller: _Sender, received: OtlpRequest) -> _ByAttempt:
        known: dict[tuple[str | None, int | None], tuple[Rollout, int] | str] = {}
        found = _ByAttempt()
        for resource in received.resources:
            parts: dict[tuple[str, int], OtlpResource] = {}
            for span in resource.spans:
                named = _named(span, resource.attributes)
                if named not in known:
                    over = len(known) >= MAX_ATTEMPTS_PER_REQUEST
                    known[named] = TOO_MANY_ATTEMPTS if over else await self._meant(caller, *named)
                meant = known[named]
                if isinstance(meant, str):
                    found.refused[meant] += 1
                    continue
                rollout, number = meant
                identity = (rollout.id, number)
                if identity not in parts:
                    part = parts[identity] = OtlpResource(attributes=resource.attributes)
                    found.by_attempt.setdefault(identity, (_owner(rollout, number), []))[1].append(part)
                parts[identity].spans.append(span)
        return found

    async def _meant(self, caller: _Sender, rollout_id: str | None, number: int | None) -> tuple[Rollout, int] | str:
        """The attempt, or why its spans are refused."""
        if rollout_id is None:
            if caller.own is None:
                return "no attempt named (path, key, or the attributes agl.rollout_id and agl.attempt)"
            rollout, number = caller.own, caller.number
        else:
            found = await self._rollout(rollout_id) if caller.own is None else caller.own
            if found is None or found.id != rollout_id:
                return "of a rollout that this key does not open, or that does not exist"
            rollout = found
            number = rollout.attempt if number is None else number
        if not 1 <= number <= rollout.attempt:
            return "of an attempt that does not exist"
        if rollout.finished_ns is not None and time.time_ns() - rollout.finished_ns > MAX_LATE_NS:
            return "of an attempt that has long been over"
        return rollout, number

    # --- taking -------------------------------------------------------------------------------------------------------

    async def _take(self, caller: _Sender, request: _Body) -> tuple[SanitizedSpans, Counter[str]]:
        """Record its spans; all that was recorded, and what was refused, by cause."""
        together = SanitizedSpans()
        found = await self._sort(caller, request.received)
        lost = request.received.lost
        if lost and caller.own is not None and not found.by_attempt:
            found.by_attempt[caller.own.id, caller.number] = (_owner(caller.own, caller.number), [])
        for identity, (owner, resources) in found.by_attempt.items():
            held = self._held.setdefault(identity, _AttemptState())
            self._held.move_to_end(identity)
            held.users += 1
            try:
                async with held.lock:
                    sanitized = await self._take_of(held, owner, resources, lost, request)
            finally:
                held.users -= 1
            together.spans += sanitized.spans
            together.broken += sanitized.broken
            lost = 0  # nobody knows whose they were: the first attempt's
        if lost:
            together.broken["undecodable"] += lost
        self._forget_some()
        return together, found.refused

    def _forget_some(self) -> None:
        """Of the attempts that sent nothing for longest, those beyond the bounds."""
        kept = 0
        for number, identity in enumerate(reversed(list(self._held))):
            held = self._held[identity]
            kept += held.sanitizer.count if held.sanitizer is not None else 0
            if (number >= MAX_CACHED_ATTEMPTS or kept > MAX_CACHED_SPAN_IDS) and not held.users:
                del self._held[identity]

    async def _take_of(
        self, held: _AttemptState, owner: SpanOwner, resources: list[OtlpResource], lost: int, request: _Body
    ) -> SanitizedSpans:
        sanitizer, held.sanitizer = held.sanitizer, None  # where a write fails, it is read anew
        if sanitizer is None:
            spans = await self._store.spans([owner.rollout_id])
            sanitizer = SpanSanitizer(owner, [span for span in spans if span.attempt == owner.attempt])
        sanitized = await _aside(request.size, lambda: sanitizer.take(resources))
        if lost:
            sanitized.broken["undecodable"] += lost
        reports = (
            [_broken(owner, sanitized, request.digest)] if sanitized.broken and sanitizer.told < MAX_REPORTS else []
        )
        sanitizer.told += len(reports)
        records = [*reports, *sanitized.spans]
        for start in range(0, len(records), SPANS_PER_WRITE):
            await self._store.append_spans(records[start : start + SPANS_PER_WRITE])
        held.sanitizer = sanitizer
        return sanitized


def _owner(rollout: Rollout, number: int) -> SpanOwner:
    return SpanOwner(run_id=rollout.run_id, rollout_id=rollout.id, attempt=number)


def _broken(owner: SpanOwner, sanitized: SanitizedSpans, digest: str) -> Span:
    """Says what was wrong; under an id that follows from the request, so that what is sent again is not counted again."""
    now_ns = time.time_ns()
    return Span(
        id=owner.span_id(f"broken.{digest}"),
        run_id=owner.run_id,
        rollout_id=owner.rollout_id,
        attempt=owner.attempt,
        name=BROKEN_SPANS,
        attributes=dict(sanitized.broken),
        started_ns=now_ns,
        finished_ns=now_ns,
    )


def _named(span: OtlpSpan, resource: JSON) -> tuple[str | None, int | None]:
    for attributes in (span.attributes, resource):
        rollout_id = attributes.get("agl.rollout_id")
        if isinstance(rollout_id, str) and rollout_id:
            number = attributes.get("agl.attempt")
            if isinstance(number, str) and number.isascii() and number.isdigit() and len(number) < 6:
                number = int(number)
            return rollout_id, number if isinstance(number, int) else None
    return None, None


def _refuse_pages(incoming: AgentRequest) -> None:
    headers = [(name, value) for name, value in incoming.headers if name != b"content-type"]
    why = cross_site_reason("POST", [*headers, (b"content-type", b"application/json")])
    if why is not None:
        raise ApiError(why, status=403, type="permission_error", code="cross_site")


# --- bytes ------------------------------------------------------------------------------------------------------------


def _encoding(incoming: AgentRequest) -> Encoding:
    given = next((value for name, value in incoming.headers if name == b"content-type"), b"")
    kind = given.partition(b";")[0].strip().lower()
    for encoding, content_type in CONTENT_TYPES.items():
        if kind == content_type:
            return encoding
    expected = " or ".join(name.decode() for name in CONTENT_TYPES.values())
    raise ApiError(f"Content-Type: expected {expected}, got {kind[:80].decode('latin-1')!r}", status=415)


def _packing(incoming: AgentRequest) -> bytes:
    """gzip, deflate, or nothing."""
    given = next((value for name, value in incoming.headers if name == b"content-encoding"), b"").strip().lower()
    if given in (b"", b"identity"):
        return b""
    if given in WINDOW_BITS:
        return given
    raise ApiError(f"Content-Encoding: expected gzip, got {given[:80].decode('latin-1')!r}", status=415)


def _unpacked(packing: bytes, body: bytes) -> bytes:
    if packing:
        unpacker = zlib.decompressobj(wbits=WINDOW_BITS[packing])
        try:
            body = unpacker.decompress(body, MAX_REQUEST_BYTES + 1)
        except zlib.error as cause:
            raise ApiError(f"the body is not what Content-Encoding says: {cause}") from None
        if not unpacker.eof and len(body) <= MAX_REQUEST_BYTES:
            raise ApiError("the body ends in the middle of its compressed data")
        if unpacker.unused_data:
            raise ApiError("the body goes on after the end of its compressed data")
    if len(body) > MAX_REQUEST_BYTES:
        raise ApiError(f"the body is larger than {MAX_REQUEST_BYTES} bytes", status=413)
    return body


async def _aside(size: int, work: Callable[[], R]) -> R:
    """The result of some work, in a thread where there is much of it."""
    return work() if size <= MAX_INLINE_BYTES else await asyncio.to_thread(work)


def _read(encoding: Encoding, packing: bytes, body: bytes) -> _Body:
    body = _unpacked(packing, body)
    digest = hashlib.blake2b(body, digest_size=8).hexdigest()
    if encoding == "json":
        return _Body(read_json(body, MAX_SPANS_PER_REQUEST), len(body), digest)
    return _Body(read_protobuf(body, MAX_SPANS_PER_REQUEST), len(body), digest)


async def _succeed(reply: AgentResponse, encoding: Encoding, sanitized: SanitizedSpans, refused: Counter[str]) -> None:
    rejected = sanitized.lost + refused.total()
    causes = [f"{count} {cause}" for cause, count in sorted((*sanitized.broken.items(), *refused.items()))]
    message = "; ".join(causes)
    if encoding == "json":
        partial = {"partialSuccess": {"rejectedSpans": str(rejected), "errorMessage": message}} if causes else {}
        await reply.whole(200, orjson.dumps(partial))
        return
    await reply.whole(200, write_response(rejected, message), CONTENT_TYPES["protobuf"])


async def _refuse(reply: AgentResponse, encoding: Encoding, status: int, message: str) -> None:
    again = ((b"retry-after", b"1"),) if status in (429, 503) else ()
    if encoding == "json":
        await reply.whole(status, orjson.dumps({"message": message}), headers=again)
        return
    await reply.whole(status, write_status(message), CONTENT_TYPES["protobuf"], again)
