"""Access to the console: who may read it, and which web pages may not.

An ASGI middleware around all that the console serves. On loopback without a key everybody on this machine may read, and no
page of another site: its requests are told by Host, Origin and Sec-Fetch-Site, as the server tells them. With a key a
browser logs in once with the server's key or a reader's token and gets a session; the key itself is in no cookie, since
cookies go to every port of a host.
"""

from __future__ import annotations

import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentlightning.console.markup import element, whole_page
from agentlightning.errors import AgentLightningError
from agentlightning.gateway.authentication import Authentication, cross_site_reason, presented_key
from agentlightning.gateway.roles import Caller

SESSION_S = 12 * 3600.0
MAX_SESSIONS = 1000
MAX_LOGIN_BYTES = 16_384
LOGIN = "/login"
FORK = "/fork"
ACTOR = "agl_actor"
"""Key of a request's scope: set where the caller may send its form."""
FORM = b"application/x-www-form-urlencoded"
SERVED = re.compile(
    r"/(|run|live|rollouts|side|replay|compare|rewards|alerts|bottlenecks|suggestions|prompts|models|login"
    r"|fork"
    r"|theme\.css|favicon\.ico|manifest\.json|gradio_api/queue/(join|data)|gradio_api/heartbeat/\w+|(assets|static)(/\w[\w.-]*)+)"
)
"""Paths that the pages need. Gradio also takes uploads, serves files and fetches URLs: nobody gets to those."""

Headers = list[tuple[bytes, bytes]]

PROTECTION = {
    # Gradio's pages carry inline scripts and compile templates; nothing else may be loaded from anywhere.
    "content-security-policy": "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; worker-src 'self' blob:; "
    "connect-src 'self'; form-action 'self'; base-uri 'self'; frame-ancestors 'none'; object-src 'none'",
    "referrer-policy": "same-origin",  # with "no-referrer" the login form would have no Origin
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class Sessions:
    """Browsers that logged in, each with the key it gave. In memory: a restart ends them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[str, tuple[bytes, float]] = OrderedDict()

    def begin(self, key: bytes) -> str:
        """Returns the secret of a new session; the oldest of too many ends."""
        session = secrets.token_urlsafe(32)
        self._known[session] = (key, self._clock() + SESSION_S)
        while len(self._known) > MAX_SESSIONS:
            self._known.popitem(last=False)
        return session

    def key(self, session: str) -> bytes:
        """The key of a session; empty where there is none, or no longer."""
        key, ends_s = self._known.get(session, (b"", 0.0))
        if self._clock() < ends_s:
            return key
        self._known.pop(session, None)
        return b""


@dataclass(frozen=True, slots=True)
class Access:
    """Lets requests through to `app`. Without `authentication` this machine may read.

    `forks`: the form that continues a rollout is taken, from the console's own page only: anybody's on this machine without
    `authentication`, with it that of the server's key or an admin's token.
    """

    app: ASGIApp
    authentication: Authentication | None
    sessions: Sessions
    cookie: str = "agl_console"
    forks: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or refuse."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None  # nothing here speaks over web sockets
        known = SERVED.fullmatch(scope["path"]) is not None
        refusal = await self._refusal(Request(scope, receive)) if known else PlainTextResponse("no such page", 404)
        answer = self.app if refusal is None else refusal
        await answer(scope, receive, _protected(send))

    async def _refusal(self, request: Request) -> Response | None:
        """The response to a request that may not read; None where it may."""
        headers: Headers = list(request.scope["headers"])
        if request.url.path == FORK:
            return await self._form_refusal(request, headers)
        if self.authentication is None:
            reason = cross_site_reason(request.method, _without_navigation(request.method, headers))
            return None if reason is None else PlainTextResponse(reason, 403)
        if reason := _foreign(request.method, headers, login=request.url.path == LOGIN):
            return PlainTextResponse(reason, 403)
        if request.url.path == LOGIN:
            return await self._login(request)
        if await self._may_read(self._presented(headers)):
            return None
        if request.method == "GET" and b"text/html" in dict(headers).get(b"accept", b""):
            return _login_page("", 401)
        return PlainTextResponse("the console wants the server's key or a reader's token", 401)

    async def _form_refusal(self, request: Request, headers: Headers) -> Response | None:
        """The response to a request that may not see what a form does, or may not send it; else None, and its scope says
        who asks where they may send it."""
        if not self.forks:
            return PlainTextResponse("this console only reads; start it with --allow-fork", 403)
        if request.method == "POST" and (reason := _foreign_form(headers)):
            return PlainTextResponse(reason, 403)
        if self.authentication is None:
            # What a form is was asked above; of its origin this asks once more, as of every request.
            if reason := cross_site_reason("GET", _without_navigation(request.method, headers)):
                return PlainTextResponse(reason, 403)
            request.scope[ACTOR] = "somebody of this machine"
            return None
        caller = await self._caller(self._presented(headers))
        if caller is not None and caller.role == "admin":
            request.scope[ACTOR] = caller.actor.name
        elif request.method == "POST" or not await self._may_read(self._presented(headers)):
            return PlainTextResponse("this wants the server's key or an admin's token", 403)
        return None

    def _presented(self, headers: Headers) -> bytes:
        jar: SimpleCookie = SimpleCookie()
        try:
            jar.load(dict(headers).get(b"cookie", b"").decode("latin-1"))
        except CookieError:
            return presented_key(headers)
        session = jar.get(self.cookie)
        return (self.sessions.key(session.value) if session else b"") or presented_key(headers)

    async def _may_read(self, key: bytes) -> bool:
        """True for the server's key, and for tokens that read all runs."""
        caller = await self._caller(key)
        return caller is not None and caller.role in ("admin", "reader") and caller.run_id is None

    async def _caller(self, key: bytes) -> Caller | None:
        """The holder of a key; None where nobody is known by it."""
        assert self.authentication is not None
        if not key:
            return None
        try:
            return await self.authentication.caller([(b"authorization", b"Bearer " + key)])
        except AgentLightningError:  # unknown; or a token, where the console itself may not look tokens up
            return None

    async def _login(self, request: Request) -> Response:
        if request.method != "POST":
            return _login_page("", 200)
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_LOGIN_BYTES:
                return _login_page("expected a key, got too much", 413)
        key = parse_qs(body.decode("utf-8", "replace")).get("key", [""])[0].strip().encode()
        if not await self._may_read(key):
            return _login_page(
                "this key opens nothing here: give the server's key, or a token of a reader of all runs", 401
            )
        response = RedirectResponse("/", 303)
        secure = request.url.scheme == "https"
        session = self.sessions.begin(key)
        response.set_cookie(self.cookie, session, max_age=int(SESSION_S), httponly=True, samesite="lax", secure=secure)
        return response


def _without_navigation(method: str, headers: Headers) -> Headers:
    """A link on another site may lead here: that site sees nothing of the page, which no frame shows."""
    given = dict(headers)
    navigation = (given.get(b"sec-fetch-mode"), given.get(b"sec-fetch-dest")) == (b"navigate", b"document")
    if method != "GET" or not navigation:
        return headers
    return [(name, value) for name, value in headers if name != b"sec-fetch-site"]


def _foreign(method: str, headers: Headers, login: bool) -> str | None:
    """The reason why a request with a session could be another site's; None if it cannot.

    Other sites cannot send JSON without asking first, nor hide their Origin; with a name of their own they have no cookie.
    """
    if method in ("GET", "HEAD"):
        return None
    given = dict(headers)
    host, origin = given.get(b"host", b""), given.get(b"origin", b"")
    if origin and origin.partition(b"://")[2] != host:
        return f"Origin: expected {host.decode('latin-1')!r:.80}, got {origin.decode('latin-1')!r:.80}"
    content_type = given.get(b"content-type", b"").partition(b";")[0].strip().lower()
    expected = FORM if login else b"application/json"
    return None if content_type == expected else f"Content-Type: expected {expected.decode()}"


def _foreign_form(headers: Headers) -> str | None:
    """The reason why a form could be another site's, be that another port of this host; None if it cannot. Browsers tell the
    Origin of every form that they send."""
    given = dict(headers)
    host, origin = given.get(b"host", b""), given.get(b"origin", b"")
    if not host or origin.partition(b"://")[2] != host:
        return f"Origin: expected {host.decode('latin-1')!r:.80}, got {origin.decode('latin-1')!r:.80}"
    content_type = given.get(b"content-type", b"").partition(b";")[0].strip().lower()
    return None if content_type == FORM else f"Content-Type: expected {FORM.decode()}"


def _login_page(wrong: str, status: int) -> HTMLResponse:
    form = element(
        "form",
        element("h1", "Agent Lightning"),
        element("label", "Server key or reader's token ", element("input", type="password", name="key", autofocus=True,
                                                                  required=True, autocomplete="current-password")),
        element("button", "Open the console"),
        element("p", wrong, class_="wrong", role="alert") if wrong else None,
        action=LOGIN,
        method="post",
    )  # fmt: skip
    return HTMLResponse(whole_page("Agent Lightning", element("div", form, class_="agl login")), status)


def _protected(send: Send) -> Send:
    """Adds the headers that keep a page from being framed, and from loading anything from elsewhere."""
    added = [(name.encode(), value.encode()) for name, value in PROTECTION.items()]

    async def protected(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [
                (name, value) for name, value in message.get("headers", []) if name.decode().lower() not in PROTECTION
            ]
            message = {**message, "headers": [*kept, *added]}
        await send(message)

    return protected
