"""One HTTP exchange in bare ASGI: the request, the response, and how long either side waits.

Driven by the app and the proxy; does not know what the bytes mean. W3C Trace Context (``traceparent:
00-{trace}-{span}-{flags}``) names the span within which an agent calls, W3C Baggage (``baggage: agl.agent=writer``) the
agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote

from agentlightning.protocols.base import EVENTS, ApiError
from agentlightning.records import JSON, RESERVED_AGENTS

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024 * 1024

BODY_TIMEOUT_S = 60.0
"""A client that sends nothing must not hold a connection for ever."""

WATCH_AFTER_S = 0.05
"""Seconds that a call is under way before its client's connection is watched."""

KEY_HEADERS = (b"x-api-key", b"x-goog-api-key", b"api-key")
"""Headers in which the SDKs of Anthropic, Google and Azure send a key."""

AGENT_HEADER = b"x-agl-agent"
"""Header with the name of the sub-agent that makes a call; `algorithm.agents` selects by it."""

SESSION_HEADER = b"x-agl-session"
"""Header with the id of a user's session with a served model; responses of sessions have it, too."""

SUBAGENT_HEADERS = (b"x-claude-code-agent-type", b"x-openai-subagent")
"""Headers in which Claude Code and Codex name the sub-agent that calls; `AGENT_HEADER` and baggage take precedence."""

SUBAGENT_ID_HEADER = b"x-claude-code-agent-id"
"""Header with Claude Code's id of the sub-agent, new for each: the name where neither its type nor its prompt gives one."""

AGENT_MARKS = frozenset((AGENT_HEADER, b"baggage", *SUBAGENT_HEADERS))
"""Headers that may name the agent."""

MAX_AGENT_CHARS = 200

AGENT_NAMES = ("agl.agent", "gen_ai.agent.name")
"""Keys of baggage that name the agent, the first that is there."""

MAX_BAGGAGE_BYTES = 8192
"""The bound of W3C Baggage."""

_TRACEPARENT = re.compile(
    rb"\s*[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-.*)?\s*", re.DOTALL
)

GOOGLE_CALLS = ("generateContent", "streamGenerateContent", "countTokens")
"""Methods of a model in Google's protocol: ``/v1beta/models/{model}:generateContent``."""

_GOOGLE_PATH = re.compile(rf"/v1(?:beta|alpha)?/models/(.+):({'|'.join(GOOGLE_CALLS)})", re.DOTALL)

BASE_PATHS = ("", "/", "/v1", "/v1beta", "/openai", "/openai/v1", "/v1beta/openai")

_OPENAI_PATH = re.compile(
    r"(?:/v1(?:beta)?)?/openai"
    r"(?:/deployments/(.+?)/(chat/completions|completions|embeddings|responses)|(?:/v1)?/(.+))", re.DOTALL
)  # fmt: skip
"""Azure's paths of OpenAI's routes, whose deployment is the model, and Google's: ``/v1beta/openai/chat/completions``."""

BARE_PATHS = ("/chat/completions", "/completions", "/responses", "/messages", "/messages/count_tokens", "/embeddings")
"""Calls of a client that was given a base URL without its /v1."""

STOPPING = "the server is stopping; try again"
AWAY = ((b"retry-after", b"1"), (b"connection", b"close"))
"""Headers of a refusal that the next server on this address will not repeat."""

Scope = Any
Receive = Any
Send = Any


class AgentRequest:
    """A request to the proxy."""

    __slots__ = (
        "_body", "_host", "_receive", "_scheme", "agent", "agent_id", "client", "headers", "idempotency_key", "is_json",
        "is_retry", "key", "length", "method", "model", "named", "path", "prompt", "query", "route", "session", "size",
        "traceparent",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self._scheme: str = scope.get("scheme", "http")
        self._body: bytes | None = None
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.client: str | None = scope["client"][0] if scope.get("client") else None
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        """The headers as received; names are in lower case."""
        given = dict(self.headers)
        if b"x-forwarded-for" in given or b"forwarded" in given:
            self.client = ""  # through a proxy: no program of this machine, which needs no key
        self._host = given.get(b"host", b"").decode("latin-1")
        length = given.get(b"content-length", b"")
        self.length = int(length) if length.isdigit() else 0
        """Bytes of the body, as far as the request tells."""
        self.size = 0
        """Bytes of the body that was read."""
        self.is_json = not given.get(b"content-type", b"").startswith((b"multipart/", b"application/x-"))
        """False where the request says that its body is something else."""
        self.is_retry = given.get(b"x-stainless-retry-count", b"0") != b"0"
        idempotency_key, session = given.get(b"idempotency-key"), given.get(SESSION_HEADER, b"")
        self.idempotency_key = None if idempotency_key is None else idempotency_key.decode("latin-1")
        self.session = session.decode("latin-1").strip() or None
        """The id that the request gives its session."""
        self.traceparent = given.get(b"traceparent", b"")
        self.agent = None if AGENT_MARKS.isdisjoint(given) else _agent(given, self.headers)
        """The name of the sub-agent behind the request, by itself or by its trace's baggage."""
        agent_id = given.get(SUBAGENT_ID_HEADER)
        self.agent_id = _unreserved(shown_name(agent_id.decode("latin-1"))) if agent_id else None
        self.prompt: JSON = {}
        """The system prompt that a rule put into the request: template, version, and the text that it replaced."""
        self.named, rest = _split(plain_path(self.path))
        self.model, self.route = _route(rest)
        """The model where the path names it, as Google's and Azure's do, and what comes after /v1/ (None where the path is
        not of that form)."""
        query: bytes = scope.get("query_string", b"")
        self.query = dict(parse_qsl(query.decode("latin-1"))) if query else {}
        self.key: str | None = None
        scheme, _, credentials = given.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() == "bearer":
            self.key = credentials.strip()
        elif key := next((given[name] for name in KEY_HEADERS if given.get(name)), None):
            self.key = key.decode("latin-1").strip()
        elif self.model is not None:
            self.key = self.query.get("key")

    async def body(self, take: Callable[[int], None] | None = None) -> bytes:
        """The whole body, read once; `take` gets the size of each part, and may raise. Raises ApiError as `read_body`
        does."""
        if self.length > MAX_BODY_BYTES:
            raise too_large(MAX_BODY_BYTES)
        if self._body is None:
            self._body = await read_body(self._receive, MAX_BODY_BYTES, BODY_TIMEOUT_S, take)
            self.size = len(self._body)
        elif take is not None:
            take(len(self._body))
        return self._body

    def on_disconnect(self, tell: Callable[[], None]) -> DisconnectWatch:
        """Call `tell` when the client disconnects, until the watch is stopped; only after `body`."""
        return DisconnectWatch(self._receive, tell)

    def base_url(self, identity: tuple[str, int] | None) -> str:
        """The base URL that this caller should use."""
        where = f"/r/{identity[0]}/{identity[1]}" if identity is not None else ""
        return f"{self._scheme}://{self._host}{where}/v1"


async def read_body(
    receive: Receive, max_bytes: int, timeout_s: float, take: Callable[[int], None] | None = None
) -> bytes:
    """The whole body of a request. Raises ApiError where it is too large, comes too slowly, or its sender goes away."""
    parts: list[bytes] = []
    size = 0

    def ends(message: Any) -> bool:
        nonlocal size
        if message["type"] == "http.disconnect":
            raise ApiError("the client went away before its request was complete", status=499)
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise too_large(max_bytes)
        if take is not None:
            take(len(part))
        parts.append(part)
        return not message.get("more_body")

    first = ready(receive)  # most bodies are there: those need no clock
    if first is None or not ends(first):
        try:
            async with asyncio.timeout(timeout_s):
                while not ends(await receive()):
                    pass
        except TimeoutError:
            sentence = f"the body did not arrive within {timeout_s:.0f} s"
            raise ApiError(sentence, status=408, code="body_timeout") from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def ready(receive: Receive) -> Any:
    """The next message of a request, if it is there already."""
    looking = receive()
    try:
        looking.send(None)
    except StopIteration as heard:
        return heard.value
    finally:
        looking.close()
    return None


async def disconnected(receive: Receive) -> None:
    """Returns when the client disconnects; only after its body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class DisconnectWatch:
    """Waits for the client to disconnect. Most calls end sooner than that is worth a task, which begins after a while."""

    __slots__ = ("_receive", "_task", "_tell", "_timer")

    def __init__(self, receive: Receive, tell: Callable[[], None]) -> None:
        self._receive = receive
        self._tell = tell
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._start)

    def look(self) -> None:
        """Tell now where the client has disconnected already: most calls end before anybody waits for that."""
        message = ready(self._receive)  # the body was read before, so it can be one thing only
        if message is not None and message["type"] == "http.disconnect":
            self._tell()

    def stop(self) -> None:
        """Wait no longer."""
        self._timer.cancel()
        if self._task is not None:
            # Forgotten, too: through its cancellation's traceback it would hold this watch, and the call, in a cycle.
            self._task.cancel()
            self._task = None

    def _start(self) -> None:
        self._task = asyncio.ensure_future(self._wait())

    async def _wait(self) -> None:
        await disconnected(self._receive)
        self._tell()


def end_within(timeout: asyncio.Timeout, seconds: float) -> None:
    """End the work in `timeout` in so many seconds, unless its end is nearer, was reached, or the work is done."""
    when = asyncio.get_running_loop().time() + seconds
    with contextlib.suppress(RuntimeError):
        if (set_for := timeout.when()) is None or when < set_for:
            timeout.reschedule(when)


class AgentResponse:
    """The answer to one request: whole, or a stream of events."""

    __slots__ = ("_boot", "failed", "ignored", "request_id", "send", "session", "started")

    def __init__(self, send: Send, boot: bytes) -> None:
        self.send = send
        self._boot = boot
        self.started = False
        self.request_id = ""
        """Sent as x-request-id and request-id, where SDKs look for it."""
        self.ignored = b""
        """Sent as x-agl-ignored: names of the request's fields that were dropped."""
        self.session = b""
        """Sent as x-agl-session: id of the session that the request belongs to."""
        self.failed: Callable[[ApiError], bytes] | None = None
        """Writes the event that ends a started stream with an error."""

    async def whole(
        self,
        status: int,
        body: bytes,
        content_type: bytes = b"application/json",
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        """Send everything at once."""
        self.started = True
        length = (b"content-length", str(len(body)).encode())
        start = {
            "type": "http.response.start",
            "status": status,
            "headers": self._headers(content_type, length, *headers),
        }
        await self.send(start)
        await self.send({"type": "http.response.body", "body": body})

    async def start_events(self, first: bytes, content_type: bytes = EVENTS) -> None:
        """Begin a stream."""
        self.started = True
        headers = self._headers(content_type, (b"cache-control", b"no-cache"))
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        if first:
            await self.more(first)

    async def more(self, events: bytes) -> None:
        """Send events."""
        await self.send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes) -> None:
        """Send the last events and end the stream."""
        await self.send({"type": "http.response.body", "body": events})

    def _headers(self, content_type: bytes, *more: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        headers = [(b"content-type", content_type), (b"x-agl-boot", self._boot), *more]
        if self.request_id:
            name = self.request_id.encode()
            headers += [(b"x-request-id", name), (b"request-id", name)]
        if self.session:
            headers.append((SESSION_HEADER, self.session))
        if self.ignored:
            headers.append((b"x-agl-ignored", self.ignored))
        return headers


def too_large(max_bytes: int) -> ApiError:
    """The refusal of a body of more than `max_bytes`."""
    return ApiError(f"the body is larger than {max_bytes} bytes", status=413, code="body_too_large")


def plain_path(path: str) -> str:
    """The path without double and trailing slashes, which clients make of a base URL and a route.

    >>> plain_path("//v1//chat/completions/"), plain_path("/")
    ('/v1/chat/completions', '/')
    """
    if "//" in path or path.endswith("/"):
        path = re.sub("/{2,}", "/", path).rstrip("/") or "/"
    return path


def _split(path: str) -> tuple[tuple[str, int] | None, str]:
    """(attempt, the rest) of a path.

    >>> _split("/r/abc/2/v1/chat/completions")
    (('abc', 2), '/v1/chat/completions')
    >>> _split("/v1/models")
    (None, '/v1/models')
    """
    if not path.startswith("/r/"):
        return None, path
    rollout_id, _, rest = path[3:].partition("/")
    number, slash, rest = rest.partition("/")
    if not (number.isascii() and number.isdigit() and len(number) < 6):
        raise ApiError(
            f"{path}: expected /r/<rollout>/<attempt>/v1/…, with the number of the attempt",
            status=404,
            code="unknown_route",
        )
    return (rollout_id, int(number)), slash + rest


def _route(rest: str) -> tuple[str | None, str | None]:
    """(the model that the path names, the route) of a path without its attempt.

    >>> _route("/v1/chat/completions"), _route("/v1/v1/messages"), _route("/messages"), _route("/nothing")
    ((None, 'chat/completions'), (None, 'messages'), (None, 'messages'), (None, None))
    >>> _route("/v1beta/models/org/name:generateContent"), _route("/v1beta/models")
    (('org/name', 'models:generateContent'), (None, 'v1beta/models'))
    >>> _route("/openai/deployments/name/chat/completions"), _route("/openai/v1/responses")
    (('name', 'chat/completions'), (None, 'responses'))
    """
    while rest.startswith("/v1/v1"):  # a base URL that has /v1, and a client that adds it
        rest = rest[3:]
    if ":" in rest and (match := _GOOGLE_PATH.fullmatch(rest)):
        return match[1], f"models:{match[2]}"
    if rest in BASE_PATHS:
        return None, ""
    if match := _OPENAI_PATH.fullmatch(rest):
        return match[1], match[2] or match[3]
    if rest.startswith(("/v1beta/", "/v1alpha/")):
        return None, "v1beta/" + rest.split("/", 2)[2]
    if rest in BARE_PATHS:
        return None, rest[1:]
    return None, rest[4:] if rest.startswith("/v1/") else None


def _agent(given: Mapping[bytes, bytes], headers: list[tuple[bytes, bytes]]) -> str | None:
    """The name of the agent: of its own header, of baggage, or of the headers of coding agents. None for a name that only
    a key gives (`RESERVED_AGENTS`)."""
    name = shown_name(given.get(AGENT_HEADER, b"").decode("latin-1"))
    name = name or baggage_agent(b",".join(value for header, value in headers if header == b"baggage"))
    if name is None:
        found = next((given[header] for header in SUBAGENT_HEADERS if given.get(header)), b"")
        name = shown_name(found.decode("latin-1"))
    return _unreserved(name)


def _unreserved(name: str | None) -> str | None:
    if name is not None and name.startswith(RESERVED_AGENTS):
        log.warning("an agent called itself %s, a name that only keys give: it has none in the record", name)
        return None
    return name


def parent_span(traceparent: bytes, rollout_id: str, attempt: int) -> str | None:
    """Id, as `Span.id` has it, of the span that a request of this attempt was made in; None where none is named.

    >>> parent_span(b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "abc", 1)
    'abc.1.00f067aa0ba902b7'
    """
    match = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    return f"{rollout_id}.{attempt}.{match[1].decode()}" if match is not None else None


def shown_name(given: str) -> str | None:
    r"""The name of an agent without characters that cannot be shown, cut to its bound; None where nothing is left.

    >>> shown_name(" researcher\x00 ")
    'researcher'
    """
    return "".join(filter(str.isprintable, given))[:MAX_AGENT_CHARS].strip() or None


def baggage_agent(baggage: bytes) -> str | None:
    """The agent's name by the request's baggage, without characters that cannot be shown: no database takes all of them.

    >>> baggage_agent(b"user=1, agl.agent=SQL%20writer;scope=run")
    'SQL writer'
    """
    found: dict[str, str] = {}
    for member in baggage[:MAX_BAGGAGE_BYTES].decode("latin-1").split(","):
        key, given, rest = member.partition("=")
        if given and key.strip() in AGENT_NAMES:
            found.setdefault(key.strip(), shown_name(unquote(rest.partition(";")[0].strip())) or "")
    return next((found[key] for key in AGENT_NAMES if found.get(key)), None)
