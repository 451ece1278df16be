"""Endpoints: one question to an outside model over HTTP, with its tries and its deadline's last word.

Driven by outside.py. Until the first byte of an answer has gone on to the agent, connections that fail and refusals that
time may change (429, 5xx) are tried again. Redirects are never followed, cookies never kept, and nothing but the configured
URL decides where a request goes. Knows nothing of attempts or of the record.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypedDict

import aiohttp
import msgspec
import orjson

from agentlightning.gateway.directory import OutsideModel
from agentlightning.gateway.relay import Relay, error_in
from agentlightning.protocols.neutral import AnswerReader, Refusal
from agentlightning.types import JSON

ROUTES = {
    "openai": ("chat/completions", "completions", "responses", "embeddings"),
    "anthropic": ("messages",),
}
"""What an upstream of each protocol serves."""

PASSED_ON = {
    b"anthropic-version": "anthropic-version",
    b"anthropic-beta": "anthropic-beta",
    b"openai-beta": "openai-beta",
    b"idempotency-key": "idempotency-key",
}
"""Headers of the agent that the upstream sees, and no others: not its key, nor an address."""

HANDED_BACK = ("retry-after", "x-request-id", "request-id")
"""Headers of a refusal that the agent sees."""

ANTHROPIC_VERSION = "2023-06-01"

LARGEST_ANSWER = 64 * 1024 * 1024

PIECEWISE = 1024 * 1024
"""Bytes from which a body (of images, say) is sent piece by piece, so that it does not hold up other calls."""

CONNECT_S = 10.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0
LONGEST_RETRY_AFTER_S = 60.0
"""An upstream that asks for more patience than this is not asked again: the agent gets its refusal."""

UNREACHABLE = (aiohttp.ClientError, OSError)


@dataclass(slots=True, kw_only=True)
class Question:
    """One request to an upstream, and what has come back so far."""

    outside: OutsideModel
    route: str
    headers: dict[str, str]
    body: bytes
    choices: int
    """How many answers were asked for."""
    deadline_s: float
    """By the clock of the event loop."""
    new_reader: Callable[[], AnswerReader]
    send: Callable[[bytes, bytes], Awaitable[bool]]
    """Hands on events of a stream, with the content type; False where nobody takes them any more."""
    reader: AnswerReader
    """Of the present try."""
    begun: bool = False
    """Events have been handed on."""

    def failed(self, sentence: str, code: str = "upstream_unreachable") -> Refusal:
        """The refusal that says what went wrong with the upstream."""
        return Refusal(f"upstream {self.outside.name!r} {sentence}", status=502, type="server_error", code=code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What an upstream said, but for the part of a stream that was handed on already."""

    status: int
    body: bytes
    content_type: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()
    failure: str | None = None
    """Why it is no answer."""
    streamed: bool = False


class Endpoints:
    """The connections to all upstreams, without a cap on their number."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections; a second call does nothing."""
        if self._session is not None:
            await self._session.close()

    async def ask(self, question: Question) -> Answered:
        """Ask until there is an answer, or a refusal that more tries will not change. Raises Refusal."""
        tries, most = 0, question.outside.settings.max_retries
        while True:
            pause: float | None
            try:
                async with self._post(question) as response:
                    if response.status == 200:
                        return await _answered(question, response)
                    refused = await _refused(question, response)
                    pause = _pause(tries, response.status, response.headers)
            except UNREACHABLE as cause:
                why = f"{type(cause).__name__}: {cause}"
                if question.begun:
                    raise question.failed(f"went away in the middle of an answer: {why}") from cause
                if tries == most:
                    raise question.failed(f"cannot be reached: {why}") from cause
                # A connection that was kept open may just have ended: the first time says nothing.
                refused, pause = None, _backoff(tries) if tries else 0.0
            if refused is not None:
                late = asyncio.get_running_loop().time() + (pause or 0.0) > question.deadline_s
                if pause is None or tries == most or late:
                    return refused
            tries += 1
            await asyncio.sleep(pause or 0.0)

    def _post(self, question: Question) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                headers={"content-type": "application/json", "user-agent": "agentlightning"},
                skip_auto_headers=("accept-encoding", "accept"),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        url = f"{question.outside.settings.url.rstrip('/')}/{question.route}"
        body = question.body if len(question.body) < PIECEWISE else io.BytesIO(question.body)
        return self._session.post(url, data=body, headers=question.headers, allow_redirects=False)


def request_headers(outside: OutsideModel, route: str, given: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """What goes out with a body: the server's key, and what may pass of the agent's own headers.

    Raises Refusal where the upstream has no such route or its key is missing.
    """
    settings = outside.settings
    routes = ROUTES[settings.protocol]
    if route not in routes:
        raise Refusal(
            f"model: upstream {outside.name!r} speaks the {settings.protocol} protocol; expected a call of "
            f"{' or '.join(routes)}, got {route}",
            param="model",
            code="wrong_protocol",
        )
    headers = {PASSED_ON[name]: value.decode("latin-1") for name, value in given if name in PASSED_ON}
    if settings.protocol == "anthropic":
        headers.setdefault("anthropic-version", ANTHROPIC_VERSION)
    if settings.key_env is None:
        return headers
    key = _key(outside)
    if not key:
        raise Refusal(
            f"upstream {outside.name!r} needs a key: the environment variable {settings.key_env} is not set where the "
            "server runs",
            status=502,
            type="server_error",
            code="upstream_key_missing",
        )
    if settings.protocol == "anthropic":
        headers["x-api-key"] = key
    else:
        headers["authorization"] = f"Bearer {key}"
    return headers


async def _answered(question: Question, response: aiohttp.ClientResponse) -> Answered:
    """Take in an answer; what of a stream comes before its end is handed on at once."""
    kind = response.headers.get("content-type", "application/json").encode("latin-1")
    question.reader = question.new_reader()
    if not kind.startswith(b"text/event-stream"):
        body = await _whole(question, response)
        data = _object(question, body)
        question.reader.whole(data)
        return Answered(status=200, body=body, content_type=kind, failure=error_in(data))
    relay, size = Relay(question.reader, question.choices), 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        _check_size(question, size)
        if (events := relay.feed(chunk)) and await question.send(events, kind):
            question.begun = True
    relay.finish()
    if not relay.ended:
        raise question.failed("ended its stream before its answer was complete")
    return Answered(status=200, body=relay.held, content_type=kind, failure=relay.error, streamed=True)


async def _refused(question: Question, response: aiohttp.ClientResponse) -> Answered:
    """An answer that is none, with the words of the upstream. Raises Refusal for a redirect."""
    status, headers = response.status, response.headers
    if 300 <= status < 400:
        sentence = f"answered with a redirect (HTTP {status}), which is not followed; correct its url"
        raise question.failed(sentence, "upstream_redirected")
    body = await _whole(question, response)
    if key := _key(question.outside):
        body = body.replace(key.encode(), b"[key]")  # some repeat what they were sent
    return Answered(
        status=status,
        body=body,
        content_type=headers.get("content-type", "application/json").encode("latin-1"),
        headers=tuple((name.encode(), headers[name].encode("latin-1")) for name in HANDED_BACK if name in headers),
        failure=body[:500].decode(errors="replace"),
    )


async def _whole(question: Question, response: aiohttp.ClientResponse) -> bytes:
    parts, size = [], 0
    async for chunk in response.content.iter_any():
        parts.append(chunk)
        size += len(chunk)
        _check_size(question, size)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _check_size(question: Question, size: int) -> None:
    if size > LARGEST_ANSWER:
        raise question.failed(f"answered with more than {LARGEST_ANSWER} bytes", "upstream_unreadable")


def _object(question: Question, body: bytes) -> JSON:
    """What the record wants of an answer. Log-probabilities and vectors, most of the bytes, are skipped where they stand."""
    try:
        return _TOLD.decode(body)
    except (msgspec.DecodeError, RecursionError):  # not JSON, or of a form that no reader knows
        pass
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        data = None
    if not isinstance(data, dict):
        raise question.failed("answered with something that is not a JSON object", "upstream_unreadable")
    return data


class _Choice(TypedDict, total=False):
    index: Any
    message: Any
    text: Any
    finish_reason: Any


class _Told(TypedDict, total=False):
    """The fields that the protocols' readers and `error_in` look at."""

    type: Any
    choices: list[_Choice]
    output: Any
    content: Any
    status: Any
    stop_reason: Any
    usage: Any
    error: Any


_TOLD: msgspec.json.Decoder[JSON] = msgspec.json.Decoder(_Told)


def _key(outside: OutsideModel) -> str:
    """The key in the environment, read at every call so that it can be changed; empty where there is none."""
    name = outside.settings.key_env
    return "" if name is None else os.environ.get(name, "").strip()


def _pause(tries: int, status: int, headers: Mapping[str, str]) -> float | None:
    """Seconds to wait before the next try; None where another one would be of no use."""
    if status != 429 and status < 500:
        return None
    asked = _retry_after(headers.get("retry-after", ""))
    if asked is None:
        return _backoff(tries)
    return asked if asked <= LONGEST_RETRY_AFTER_S else None


def _backoff(tries: int) -> float:
    """Growing, and not the same for a crowd that was turned away together."""
    return min(FIRST_PAUSE_S * float(2**tries), LONGEST_PAUSE_S) * random.uniform(0.75, 1.25)


def _retry_after(value: str) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or a date; None where it says neither.

    >>> _retry_after("2"), _retry_after("Thu, 01 Jan 1970 00:00:00 GMT"), _retry_after("soon")
    (2.0, 0.0, None)
    """
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
