"""External models of a run by model name, and one exchange with one of them over HTTP, with its retries.

Driven by external_calls.py. External models are resources of the run, in the form of the ``[external.NAME]`` tables. Until
the first byte of an answer has gone on to the agent, connections that fail and refusals that time may change (429, 5xx) are
tried again. Redirects are never followed, cookies never kept, and only the configured URL decides where a request goes.
Knows nothing of attempts or of the record.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Any, TypedDict

import msgspec
import orjson

from agentlightning.config.external import ExternalModelConfig, check_external_models, is_exact
from agentlightning.config.run import parse_settings
from agentlightning.errors import ConfigError, EngineError
from agentlightning.gateway.external_keys import ExternalKeys
from agentlightning.gateway.http_client import MAX_BODY_BYTES, HttpClient, HttpResponse
from agentlightning.protocols.base import MAX_EVENT_BYTES, ApiError, CompletionReader, EventReader, event_too_large
from agentlightning.records import JSON, Resource
from agentlightning.runtime import json_text
from agentlightning.runtime.backoff import Backoff


@dataclass(frozen=True, slots=True)
class ExternalModel:
    """The external model behind a model name."""

    name: str
    settings: ExternalModelConfig


class ExternalDirectory:
    """The external models of all runs."""

    def __init__(self, keys: ExternalKeys) -> None:
        self._keys = keys
        self._known: dict[str, tuple[list[Resource], RunModels]] = {}
        """By run, with the resources that they come from."""

    def forget(self, run_id: str) -> None:
        """The resources of this run changed, or it is not in use any more."""
        self._known.pop(run_id, None)

    def models(self, run_id: str, resources: list[Resource]) -> RunModels:
        """The external models among a run's resources. Raises ApiError where one is misconfigured."""
        known = self._known.get(run_id)
        if known is None or known[0] is not resources:
            known = self._known[run_id] = (resources, _run_models(resources, self._keys))
        return known[1]


@dataclass(slots=True)
class RunModels:
    """The external models of one run."""

    exact: dict[str, ExternalModel] = field(default_factory=dict)
    patterns: list[tuple[re.Pattern[str], ExternalModel]] = field(default_factory=list)
    """Longest first."""

    def find(self, model: str) -> ExternalModel | None:
        """The external model that `model` belongs to."""
        found = self.exact.get(model)
        if found is None:
            found = next((external for pattern, external in self.patterns if pattern.match(model)), None)
        return found


def _run_models(resources: list[Resource], keys: ExternalKeys) -> RunModels:
    """The external models among a run's resources. Raises ApiError where one is misconfigured: the calls meant for it would
    go to the policy."""
    policies = [str(name) for one in resources if one.kind == "policy" for name in (one.value.get("model"), one.name)]
    try:
        settings = {
            one.name: parse_settings(ExternalModelConfig, one.value, f"external model {one.name!r}")
            for one in resources
            if one.kind == "external"
        }
        check_external_models(settings, policies)
        for one in resources:
            if one.kind == "external" and (why := keys.refusal_of(one)) is not None:
                raise ConfigError(why)
    except (ConfigError, ValueError) as cause:
        raise ApiError(str(cause), status=502, type="server_error", code="external_misconfigured") from cause
    known = RunModels()
    for name, own in settings.items():
        external = ExternalModel(name, own)
        known.exact |= {model: external for model in own.models if is_exact(model)}
        known.patterns += [(re.compile(translate(one)), external) for one in own.models if not is_exact(one)]
    known.patterns.sort(key=lambda pair: len(pair[0].pattern), reverse=True)
    return known


BLANK_LINE = re.compile(rb"\r?\n\r?\n")
MAX_BLANK_LINE = 4

LAST_EVENTS = frozenset(
    {"message_delta", "message_stop", "response.completed", "response.incomplete", "response.failed", "error"}
)
"""Types of events from which on nothing is said any more. Chunks of OpenAI's older protocols and of Google's have none: they
end where every choice has a finish reason, or where Google's model declines the prompt."""


class StreamPassthrough:
    """One stream; `choices` is how many answers it has. An event that the network cut waits for its other half.

    >>> relay = StreamPassthrough(chat.reader(), 1)  # doctest: +SKIP
    >>> relay.feed(b'data: {"choices": [{"delta": {"content": "Hi"}}]}\\n\\ndata: [DO')  # doctest: +SKIP
    b'data: {"choices": [{"delta": {"content": "Hi"}}]}\\n\\n'
    """

    def __init__(self, reader: CompletionReader, choices: int) -> None:
        self._reader = reader
        self._choices = choices
        self._events = EventReader()
        self._rest = bytearray()
        """Bytes that came after the last blank line; searched for the next one only where it has not been, and never copied
        whole: one event in many pieces takes time linear in its bytes."""
        self._finished: set[str] = set()
        self.held = bytearray()
        self.ended = False
        self.error: str | None = None
        """The error that the external model sent."""

    def feed(self, chunk: bytes) -> bytes:
        """Take in what came; returns what may go on. Raises EngineError where an event is longer than MAX_EVENT_BYTES."""
        data, position, cut = self._rest, 0, 0 if self.ended else None
        searched = max(0, len(data) - MAX_BLANK_LINE + 1)
        data += chunk
        for match in BLANK_LINE.finditer(data, searched):
            end = match.end()
            self._take(bytes(data[position:end]))
            if self.ended and cut is None:
                cut = position
            position = end
        if len(data) - position > MAX_EVENT_BYTES:
            raise event_too_large()
        if cut is None:
            cut = position
        else:
            self.held += data[cut:position]
        passed_on = bytes(data[:cut])
        del data[:position]
        return passed_on

    def finish(self) -> None:
        """The stream has ended."""
        if self._rest:
            self._take(bytes(self._rest) + b"\n\n")
            self.held += self._rest
            self._rest = bytearray()

    def _take(self, block: bytes) -> None:
        for text in self._events.feed(block):
            if text == b"[DONE]":
                self.ended = True
                continue
            try:
                data = json_text.loads(text)
            except orjson.JSONDecodeError:
                continue  # for the agent to judge
            if isinstance(data, dict):
                self._reader.event(data)
                self.error = self.error or error_in(data)
                self.ended = self.ended or self.error is not None or self._is_last(data)

    def _is_last(self, data: JSON) -> bool:
        choices = data.get("choices") or data.get("candidates")
        if not choices or not isinstance(choices, list):
            kind, feedback = data.get("type"), data.get("promptFeedback")
            declined = isinstance(feedback, dict) and bool(feedback.get("blockReason"))
            return declined or (isinstance(kind, str) and kind in LAST_EVENTS)
        finished = [
            choice
            for choice in choices
            if isinstance(choice, dict) and (choice.get("finish_reason") or choice.get("finishReason"))
        ]
        self._finished |= {str(choice.get("index", 0)) for choice in finished}
        return len(self._finished) >= self._choices


def error_in(data: JSON) -> str | None:
    """The error in a response of status 200, or in an event; None where there is none."""
    error = data.get("error")
    if error is None and data.get("type") == "response.failed" and isinstance(data.get("response"), dict):
        error = data["response"].get("error") or "failed"
    return None if not error else orjson.dumps(error).decode()


ROUTES = {
    "openai": ("chat/completions", "completions", "responses", "embeddings"),
    "anthropic": ("messages",),
    "google": ("models:generateContent", "models:streamGenerateContent"),
}
"""Routes that an external model of each protocol serves."""

PASSED_ON = {
    b"anthropic-version": "anthropic-version",
    b"anthropic-beta": "anthropic-beta",
    b"openai-beta": "openai-beta",
    b"idempotency-key": "idempotency-key",
}
"""Headers of the agent that the external model sees, and no others: not its key, nor an address."""

HANDED_BACK = ("retry-after", "x-request-id", "request-id")
"""Headers of a refusal that the agent gets."""

ANTHROPIC_VERSION = "2023-06-01"

CONNECT_TIMEOUT_S = 10.0
MIN_PAUSE_S = 0.5
MAX_PAUSE_S = 8.0
NOT_EXECUTED = (501, 503, 529)
"""Statuses of server errors that say that the model was not asked."""
MAX_RETRY_AFTER_S = 60.0
"""An external model that asks for more patience than this is not asked again: the agent gets its refusal."""


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request to an external model, and what has come back so far."""

    external: ExternalModel
    route: str
    headers: dict[str, str]
    body: bytes
    choices: int
    """Number of choices requested (n)."""
    deadline_s: float
    """On the clock of the event loop."""
    new_reader: Callable[[], CompletionReader]
    send: Callable[[bytes, bytes], Awaitable[bool]]
    """Hands on events of a stream, with the content type; False where nobody takes them any more."""
    reader: CompletionReader
    """The reader of the current attempt's response."""
    begun: bool = False
    """Events have been handed on."""
    under_way: bool = False
    """The request of this try went out, and no refusal has come back: the external model may execute it."""
    left: int = 0
    """Tries before this one that were left while that was so."""
    answered: bool = False
    """The response of one of them came whole, or as a stream, which tells what it cost."""

    @property
    def executed(self) -> int:
        """Tries that the external model may have executed."""
        return self.left + self.under_way

    def begin(self) -> None:
        """The request of this try goes out."""
        self.under_way = True

    def failed(self, sentence: str, code: str = "external_unreachable") -> ApiError:
        """The refusal that says what went wrong with the external model."""
        return ApiError(f"external model {self.external.name!r} {sentence}", status=502, type="server_error", code=code)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalResponse:
    """A response of an external model, without the part of a stream that was passed on already."""

    status: int
    body: bytes
    content_type: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()
    failure: str | None = None
    """The reason why it is not a completion."""
    streamed: bool = False


class ExternalClient:
    """The connections to all external models, without a cap on their number."""

    def __init__(self) -> None:
        self._client = HttpClient(CONNECT_TIMEOUT_S)

    async def close(self) -> None:
        """Close the connections; a second call does nothing."""
        await self._client.close()

    async def send(self, exchange: Exchange) -> ExternalResponse:
        """Ask until there is an answer, or a refusal that more tries will not change. Raises ApiError."""
        tries, most = 0, exchange.external.settings.max_retries
        url = f"{exchange.external.settings.url.rstrip('/')}/{exchange.route}"
        backoff = Backoff(MIN_PAUSE_S, MAX_PAUSE_S)
        while True:
            pause: float | None
            exchange.left, exchange.under_way = exchange.executed, False
            try:
                sending = self._client.post(url, exchange.headers, exchange.body, on_send=exchange.begin)
                async with await sending as response:
                    if response.status == 200:
                        return await _read_response(exchange, response)
                    exchange.under_way = response.status >= 500 and response.status not in NOT_EXECUTED
                    refused = await _refused(exchange, response)
                    pause = _pause(backoff, response.status, response.headers)
            except OSError as cause:
                why = f"{type(cause).__name__}: {cause}"
                if exchange.begun:
                    raise exchange.failed(f"closed the connection in the middle of a response: {why}") from cause
                if tries == most:
                    raise exchange.failed(f"cannot be reached: {why}") from cause
                refused, pause = None, backoff.next_s()
            if refused is not None:
                late = asyncio.get_running_loop().time() + (pause or 0.0) > exchange.deadline_s
                if pause is None or tries == most or late:
                    return refused
            tries += 1
            await asyncio.sleep(pause or 0.0)


def request_headers(external: ExternalModel, route: str, given: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers of an outgoing request: the server's key, and those of the agent's own headers that may pass.

    Raises ApiError where the external model has no such route or its key is missing.
    """
    settings = external.settings
    routes = ROUTES[settings.protocol]
    if route not in routes:
        raise ApiError(
            f"model: external model {external.name!r} speaks the {settings.protocol} protocol; expected a call of "
            f"{' or '.join(routes)}, got {route}",
            param="model",
            code="wrong_protocol",
        )
    headers = {"content-type": "application/json", "user-agent": "agentlightning"}
    headers |= {PASSED_ON[name]: value.decode("latin-1") for name, value in given if name in PASSED_ON}
    if settings.protocol == "anthropic":
        headers.setdefault("anthropic-version", ANTHROPIC_VERSION)
    if settings.key_env is None:
        return headers
    key = _key(external)
    if not key:
        raise ApiError(
            f"external model {external.name!r} needs a key: the environment variable {settings.key_env} is not set where "
            "the server runs",
            status=502,
            type="server_error",
            code="external_key_missing",
        )
    if settings.protocol == "anthropic":
        headers["x-api-key"] = key
    elif settings.protocol == "google":
        headers["x-goog-api-key"] = key
    else:
        headers["authorization"] = f"Bearer {key}"
    return headers


async def _read_response(exchange: Exchange, response: HttpResponse) -> ExternalResponse:
    """Take in an answer; what of a stream comes before its end is handed on at once."""
    kind = response.headers.get("content-type", "application/json").encode("latin-1")
    exchange.reader = exchange.new_reader()
    if not kind.startswith(b"text/event-stream"):
        body = await _whole(exchange, response)
        exchange.answered = True
        data = _object(exchange, body)
        exchange.reader.whole(data)
        return ExternalResponse(status=200, body=body, content_type=kind, failure=error_in(data))
    exchange.answered = True
    relay, size = StreamPassthrough(exchange.reader, exchange.choices), 0
    async for chunk in response.chunks():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise _too_large(exchange)
        try:
            events = relay.feed(chunk)
        except EngineError as cause:
            raise exchange.failed(f"cannot be read: {cause}", "external_unreadable") from cause
        if events and await exchange.send(events, kind):
            exchange.begun = True
    relay.finish()
    if not relay.ended:
        raise exchange.failed("ended its stream before the response was complete")
    return ExternalResponse(status=200, body=bytes(relay.held), content_type=kind, failure=relay.error, streamed=True)


async def _refused(exchange: Exchange, response: HttpResponse) -> ExternalResponse:
    """An answer that is none, with the words of the external model. Raises ApiError for a redirect."""
    status, headers = response.status, response.headers
    if 300 <= status < 400:
        sentence = f"answered with a redirect (HTTP {status}), which is not followed; correct its url"
        raise exchange.failed(sentence, "external_redirected")
    body = await _whole(exchange, response)
    if key := _key(exchange.external):
        body = body.replace(key.encode(), b"[key]")  # some repeat what they were sent
    return ExternalResponse(
        status=status,
        body=body,
        content_type=headers.get("content-type", "application/json").encode("latin-1"),
        headers=tuple((name.encode(), headers[name].encode("latin-1")) for name in HANDED_BACK if name in headers),
        failure=body[:500].decode(errors="replace"),
    )


async def _whole(exchange: Exchange, response: HttpResponse) -> bytes:
    try:
        return await response.read()
    except EngineError:
        raise _too_large(exchange) from None


def _too_large(exchange: Exchange) -> ApiError:
    return exchange.failed(f"answered with more than {MAX_BODY_BYTES} bytes", "external_unreadable")


def _object(exchange: Exchange, body: bytes) -> JSON:
    """The recorded fields of a response. Log-probabilities and vectors, most of the bytes, are skipped by the decoder."""
    try:
        return _RECORDED_FIELDS.decode(body)
    except (msgspec.DecodeError, RecursionError):  # not JSON, or of a form that no reader knows
        pass
    try:
        data = json_text.loads(body)
    except orjson.JSONDecodeError:
        data = None
    if not isinstance(data, dict):
        raise exchange.failed("answered with something that is not a JSON object", "external_unreadable")
    return data


class _Choice(TypedDict, total=False):
    index: Any
    message: Any
    text: Any
    finish_reason: Any


class _RecordedFields(TypedDict, total=False):
    """The fields that the protocols' readers and `error_in` look at."""

    type: Any
    choices: list[_Choice]
    output: Any
    content: Any
    candidates: Any
    usageMetadata: Any
    promptFeedback: Any
    status: Any
    stop_reason: Any
    usage: Any
    error: Any


_RECORDED_FIELDS: msgspec.json.Decoder[JSON] = msgspec.json.Decoder(_RecordedFields)


def _key(external: ExternalModel) -> str:
    """The key in the environment, read at every call so that it can be changed; empty where there is none."""
    name = external.settings.key_env
    return "" if name is None else os.environ.get(name, "").strip()


def _pause(backoff: Backoff, status: int, headers: Mapping[str, str]) -> float | None:
    """The pause before the next retry, in seconds; None where a retry would not help."""
    if status != 429 and status < 500:
        return None
    try:
        asked = max(0.0, float(headers["retry-after"]))
    except (KeyError, ValueError):
        return backoff.next_s()
    return asked if asked <= MAX_RETRY_AFTER_S else None
