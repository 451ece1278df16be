"""The verbs of the store over HTTP: one POST a verb, its arguments by name, its result as JSON.

An ASGI middleware inside the API's edge (edge.py); what is no verb goes on to FastAPI, whose routes describe the verbs and
serve people. Verbs are what workers send thousands of times a second, so they are served here in bare ASGI: a body is
unpacked, checked against the verb's signature in one pass and executed once for each key (repeats.py). Knows nothing of how
a store works.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import typing
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentlightning.config_base import expected
from agentlightning.errors import AgentLightningError, InputError, NotFoundError, StoreError
from agentlightning.gateway.edge import LARGEST_BODY, error_body
from agentlightning.gateway.repeats import Repeats, Response
from agentlightning.store.base import LightningStore
from agentlightning.store.channel import BATCH, COMPRESSED_FROM, KEY_HEADER, MOST, compressed, decompressed
from agentlightning.types import JSON, Metric

NAMES = tuple(
    sorted(LightningStore.__abstractmethods__ - {"open", "close", "signing_secret"})  # those are no verbs of clients
)

LONGEST_S = 86_400.0
"""Most seconds that a verb may be asked to wait, or a lease to last."""
LONGEST_KEY = 128

LONG_POLLS = frozenset({"claim", "wait", "wait_resources", "follow_metrics"})

After = Callable[[str, dict[str, Any], Any], None]
"""Told of a verb that was executed: its name, arguments and result."""


class Verb:
    """One verb of an open store."""

    def __init__(self, store: LightningStore, name: str, after: After) -> None:
        self.name = name
        self.contract: Callable[..., Any] = getattr(LightningStore, name)
        hints = typing.get_type_hints(self.contract)
        self.result = hints.pop("return")
        self.body = _body_model(name, self.contract, hints) if hints else None
        self._method: Callable[..., Coroutine[Any, Any, Any]] = getattr(store, name)
        self._after = after

    async def execute(self, body: bytes | JSON) -> Response:
        """The answer to a request with this body, as text or parsed; an error of ours is an answer too."""
        try:
            given = self._arguments(body)
            result = await self._method(**given)
            self._after(self.name, given, result)
            return Response(200, orjson.dumps(_speakable(self.name, result)))
        except AgentLightningError as error:
            return Response(error.http_status, error_body(type(error), str(error)))

    def _arguments(self, body: bytes | JSON) -> dict[str, Any]:
        if self.body is None:
            return {}
        try:
            model = self.body
            checked = model.model_validate_json(body) if isinstance(body, bytes) else model.model_validate(body)
        except ValidationError as error:
            raise InputError(_sentence(error)) from None
        return {name: getattr(checked, name) for name in self.body.model_fields}


class Verbs:
    """The middleware."""

    def __init__(self, app: ASGIApp, verbs: typing.Iterable[Verb], repeats: Repeats) -> None:
        self._app = app
        self._verbs = {verb.name: verb for verb in verbs}
        self._repeats = repeats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection's event, by ASGI."""
        name = ""
        if scope["type"] == "http" and scope["method"] == "POST":
            name = scope["path"].removeprefix(scope.get("root_path", "")).removeprefix("/")
        verb = self._verbs.get(name)
        if verb is None and name != BATCH:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        body = await _body(receive, headers.get(b"content-encoding", b"identity"))
        if verb is None:
            status, content = await self._answer_all(body)
        else:
            answering = self._answer(verb, body, headers.get(KEY_HEADER.encode(), b"").decode("latin-1"))
            status, content = await (_while_connected(receive, answering) if name in LONG_POLLS else answering)
        sent = [(b"content-type", b"application/json")]
        if len(content) >= COMPRESSED_FROM and b"gzip" in headers.get(b"accept-encoding", b""):
            content = await compressed(content)
            sent.append((b"content-encoding", b"gzip"))
        sent.append((b"content-length", str(len(content)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": content})

    async def _answer(self, verb: Verb, body: bytes | JSON, key: str) -> Response:
        if not key:
            return await verb.execute(body)
        if len(key) > LONGEST_KEY:
            raise InputError(f"{KEY_HEADER}: expected at most {LONGEST_KEY} characters")
        return await self._repeats.answer(f"{verb.name} {key}", lambda: verb.execute(body))

    async def _answer_all(self, body: bytes) -> Response:
        """Requests that travelled together are executed side by side; each has its own answer."""
        try:
            requests = _REQUESTS.validate_json(body)
        except ValidationError as error:
            raise InputError(_sentence(error)) from None
        for request in requests:
            if request.verb not in self._verbs:
                raise NotFoundError(f"verb: no such verb: {request.verb}")
            if any(request.given.get(name) for name in ("wait_s", "timeout_s")):
                raise InputError(f"{request.verb}: waits, which a request that travels with others may not")
        responses = await asyncio.gather(
            *[self._answer(self._verbs[request.verb], request.given, request.key) for request in requests]
        )
        parts = [b'{"status":%d,"answer":%s}' % (status, content) for status, content in responses]
        return Response(200, b"[" + b",".join(parts) + b"]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One of several requests that travel together."""

    verb: str
    key: str = ""
    """Names this request: one that is sent again with the same name is answered as the first was."""
    given: JSON
    """The verb's arguments; it may not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The answer to one of them."""

    status: int
    """As of the verb's own route."""
    answer: Any


_REQUESTS = TypeAdapter(Annotated[list[Request], Field(max_length=MOST)])


class _Gone(AgentLightningError):
    """The caller hung up."""

    http_status = 499


async def _body(receive: Receive, encoding: bytes) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone("the caller hung up")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    if encoding == b"identity":
        return body
    if encoding != b"gzip":
        raise HTTPException(415, f"Content-Encoding: expected gzip or none, got {encoding[:80].decode('latin-1')!r}")
    try:
        return await decompressed(body, LARGEST_BODY)
    except StoreError as refused:
        raise HTTPException(413, str(refused)) from None


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, Response]) -> Response:
    """The result of a long poll, which ends with its caller: else a worker that died could still be given rollouts."""
    task = asyncio.ensure_future(work)
    hung_up = asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait({task, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _Gone("the caller hung up")
        return task.result()
    finally:
        for unfinished in (task, hung_up):
            unfinished.cancel()


async def _hung_up(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _body_model(verb: str, contract: Callable[..., Any], hints: dict[str, Any]) -> type[BaseModel]:
    parameters = inspect.signature(contract).parameters
    fields: dict[str, Any] = {}
    for name, hint in hints.items():
        default = parameters[name].default
        seconds = Annotated[float, Field(allow_inf_nan=False, le=LONGEST_S)]
        fields[name] = (
            seconds if hint is float else hint,
            Field() if default is inspect.Parameter.empty else Field(default=default),
        )
    return create_model(
        "".join(part.capitalize() for part in verb.split("_")), __config__={"extra": "forbid"}, **fields
    )


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return f"body: expected JSON: {first['ctx']['error']}"
    return f"{'.'.join(str(part) for part in first['loc']) or 'body'}: {expected(first, 'an object')}"


def _speakable(verb: str, result: Any) -> Any:
    """What JSON cannot say: tuples as keys, and numbers that are none."""
    if verb == "count":
        by_mode: dict[str, dict[str, int]] = {}
        for (mode, state), number in result.items():
            by_mode.setdefault(mode, {})[state] = number
        return by_mode
    if verb in ("metrics", "follow_metrics"):
        return [metric if math.isfinite(metric.value) else _named(metric) for metric in result]
    return result


def _named(metric: Metric) -> dict[str, Any]:
    return {**asdict(metric), "value": str(metric.value)}
