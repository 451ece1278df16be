"""Access to the console: who may read it, and which web pages may not.

An ASGI middleware around all that the console serves, which marks read-only visitors. On loopback the token of the printed
URL gives full access, as in Jupyter. Pages of other sites are refused, recognised by Host, Origin and
Sec-Fetch-Site.
Elsewhere a browser logs in once with the server's key or a reader's token. Both get a session; the key is in no cookie,
since cookies go to every port.
"""

from __future__ import annotations

import hmac
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from cachetools import TTLCache
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentlightning.console.playground import PATH as PLAYGROUND
from agentlightning.console.playground import ROLE
from agentlightning.console.render import STATIC, Templates
from agentlightning.errors import AgentLightningError, InputError
from agentlightning.gateway.access import Authentication, cross_site_reason, presented_key

SESSION_S = 12 * 3600.0
MAX_SESSIONS = 1000
MAX_FORM_BYTES = 16_384
LOGIN = "/login"
FORMS = (LOGIN, "/models")
"""Pages that take forms; the playground takes JSON."""
FORM = b"application/x-www-form-urlencoded"
SERVED = re.compile(
    r"/(|run|live|rollouts|side|replay|compare|rewards|alerts|bottlenecks|suggestions|prompts|models|login|static/[a-z.]+"
    r"|playground(/(|theme\.css|favicon\.ico|manifest\.json|gradio_api/queue/(join|data)|gradio_api/heartbeat/\w+"
    r"|(assets|static)(/\w[\w.-]*)+))?)"
)
"""Paths that the pages need. Gradio also takes uploads, serves files and fetches URLs: nobody gets to those."""
PUBLIC = frozenset(f"/static/{name}" for name in STATIC)
"""Files of the login page, which say nothing of a store."""

Headers = list[tuple[bytes, bytes]]
Sessions = TTLCache[str, bytes]
"""Keys of the browsers that logged in, by the secret of their session. In memory: a restart ends them."""

PROTECTION = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "referrer-policy": "same-origin",  # with "no-referrer" the login form would have no Origin
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


GRADIO = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; worker-src 'self' blob:; connect-src 'self'; form-action 'self'; "
    "base-uri 'self'; frame-ancestors 'none'; object-src 'none'"
)
"""The policy of the playground: Gradio's page has inline scripts and compiles templates."""


def new_sessions(clock: Callable[[], float] = time.monotonic) -> Sessions:
    """No session yet; the oldest of too many ends."""
    return TTLCache(MAX_SESSIONS, SESSION_S, clock)


@dataclass(frozen=True, slots=True)
class Access:
    """Lets requests through to `app`: with `authentication` those of keys, else those of this machine with the `token`."""

    app: ASGIApp
    templates: Templates
    authentication: Authentication | None
    sessions: Sessions
    cookie: str = "agl_console"
    token: str = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or refuse."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None  # nothing here speaks over web sockets
        known = SERVED.fullmatch(scope["path"]) is not None
        refusal = await self._refusal(Request(scope, receive)) if known else PlainTextResponse("no such page", 404)
        await (self.app if refusal is None else refusal)(scope, receive, _protected(send, scope["path"]))

    async def _refusal(self, request: Request) -> Response | None:
        """The response to a request that may not read; None where it may."""
        headers: Headers = list(request.scope["headers"])
        login, local = request.url.path == LOGIN, self.authentication is None
        reason = _foreign(request.method, headers, FORM if request.url.path in FORMS else b"application/json", login)
        if local and reason is None:
            reason = cross_site_reason("GET", _without_navigation(request.method, headers))
        if reason is not None:
            return PlainTextResponse(reason, 403)
        if request.url.path in PUBLIC:
            return None
        if login:
            return await self._login(request)
        given = request.query_params.get("token", "").encode()
        if local and request.method == "GET" and await self._role(given):
            place = request.url.remove_query_params("token").replace(scheme="", netloc="")
            return self._entered(request, given, str(place))
        if role := await self._role(self._presented(headers)):
            request.scope[ROLE] = role
            return None
        if request.method == "GET" and b"text/html" in dict(headers).get(b"accept", b""):
            return self._login_page("", 401)
        return PlainTextResponse(f"the console wants the {self._wanted}", 401)

    @property
    def _wanted(self) -> str:
        """The name of the secret that opens the console."""
        return "token of the URL that it printed" if self.authentication is None else "server key or reader's token"

    def _presented(self, headers: Headers) -> bytes:
        jar: SimpleCookie = SimpleCookie()
        try:
            jar.load(dict(headers).get(b"cookie", b"").decode("latin-1"))
        except CookieError:
            return presented_key(headers)
        session = jar.get(self.cookie)
        return (self.sessions.get(session.value, b"") if session else b"") or presented_key(headers)

    async def _role(self, key: bytes) -> str:
        """``admin`` of the console's own token or the server's key, ``reader`` of tokens that read all runs, else ''."""
        if not key or self.authentication is None:
            return "admin" if self.token and hmac.compare_digest(key, self.token.encode()) else ""
        try:
            caller = await self.authentication.caller([(b"authorization", b"Bearer " + key)])
        except AgentLightningError:  # unknown; or a token, where the console itself may not look tokens up
            return ""
        return caller.role if caller.role in ("admin", "reader") and caller.run_id is None else ""

    async def _login(self, request: Request) -> Response:
        if request.method != "POST":
            return self._login_page("", 200)
        try:
            key = (await read_form(request)).get("key", "").strip().encode()
        except InputError as error:
            return self._login_page(str(error), 413)
        if not await self._role(key):
            return self._login_page(f"this key opens nothing here: give the {self._wanted}, of all runs", 401)
        return self._entered(request, key, "/")

    def _entered(self, request: Request, key: bytes, place: str) -> Response:
        """Leads a browser that presented this key to a place of ours, with a session."""
        session = secrets.token_urlsafe(32)
        self.sessions[session] = key
        response = RedirectResponse(place, 303)
        secure = request.url.scheme == "https"
        response.set_cookie(self.cookie, session, int(SESSION_S), httponly=True, samesite="lax", secure=secure)
        return response

    def _login_page(self, why: str, status: int) -> HTMLResponse:
        return HTMLResponse(self.templates.draw("login.html", wanted=self._wanted, why=why), status)


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form, the first value of each. InputError for more than `MAX_FORM_BYTES`."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            raise InputError(f"form: expected at most {MAX_FORM_BYTES:,} bytes")
    return {name: values[0] for name, values in parse_qs(body.decode("utf-8", "replace")).items()}


def _without_navigation(method: str, headers: Headers) -> Headers:
    """A link on another site may lead here: that site sees nothing of the page, which no frame shows."""
    given = dict(headers)
    navigation = (given.get(b"sec-fetch-mode"), given.get(b"sec-fetch-dest")) == (b"navigate", b"document")
    if method != "GET" or not navigation:
        return headers
    return [(name, value) for name, value in headers if name != b"sec-fetch-site"]


def _foreign(method: str, headers: Headers, expected: bytes, login: bool) -> str | None:
    """The reason why a request with a session could be another site's; None if it cannot.

    Other sites cannot send JSON without asking first, nor hide their Origin; with a name of their own they have no cookie.
    What changes something and has no key of its own must have an Origin: browsers send it with every form.
    """
    if method in ("GET", "HEAD"):
        return None
    given = dict(headers)
    host, origin = given.get(b"host", b""), given.get(b"origin", b"")
    if origin and origin.partition(b"://")[2] != host:
        return f"Origin: expected {host.decode('latin-1')!r:.80}, got {origin.decode('latin-1')!r:.80}"
    if not origin and not login and not presented_key(headers):
        return f"Origin: expected {host.decode('latin-1')!r:.80}, got none"
    content_type = given.get(b"content-type", b"").partition(b";")[0].strip().lower()
    return None if content_type == expected else f"Content-Type: expected {expected.decode()}"


def _protected(send: Send, path: str) -> Send:
    """Adds the headers that keep a page from being framed, and from loading anything from elsewhere."""
    policy = {"content-security-policy": GRADIO} if path.startswith(PLAYGROUND) else {}
    added = [(name.encode(), value.encode()) for name, value in (PROTECTION | policy).items()]

    async def protected(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = message.get("headers", [])
            kept = [(name, value) for name, value in given if name.decode().lower() not in PROTECTION]
            message = {**message, "headers": [*kept, *added]}
        await send(message)

    return protected
