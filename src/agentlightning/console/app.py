"""The console's pages as a web application: an address, its view, its template. Without access control.

A page is drawn from the query of its address alone, so that every state has an address to share, and can be read without
JavaScript. A run's page asks for what moves again, while somebody sees it, and gets nothing if nothing is new.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.console.access import read_form
from agentlightning.console.pages.advice import bottlenecks_page, suggestions_page
from agentlightning.console.pages.compare import compare_page
from agentlightning.console.pages.models import models_page, move_alias, prompts_page
from agentlightning.console.pages.replay import replay_page
from agentlightning.console.pages.rewards import rewards_page
from agentlightning.console.pages.rollouts import rollouts_page, side_page
from agentlightning.console.pages.runs import alerts_page, choose_page, live_part, run_page, runs_page
from agentlightning.console.playground import PATH as PLAYGROUND
from agentlightning.console.playground import ROLE
from agentlightning.console.reader import Reader
from agentlightning.console.render import STATIC, Page, Query, Templates, first, mark
from agentlightning.errors import AgentLightningError
from agentlightning.records import Run

log = logging.getLogger(__name__)

View = Callable[[Reader, Query], Awaitable[Page]]
RunView = Callable[[Reader, Run, Query], Awaitable[Page]]

PAGES: Mapping[str, View] = MappingProxyType(
    {
        "/": runs_page,
        "/compare": compare_page,
        "/alerts": alerts_page,
        "/rollouts": rollouts_page,
        "/side": side_page,
        "/replay": replay_page,
    }
)
RUN_PAGES: Mapping[str, tuple[str, RunView]] = MappingProxyType(
    {
        "/rewards": ("Rewards", rewards_page),
        "/bottlenecks": ("Bottlenecks", bottlenecks_page),
        "/models": ("Models", models_page),
        "/prompts": ("Prompts", prompts_page),
        "/suggestions": ("Suggestions", suggestions_page),
    }
)
"""Pages about one run; without one they offer the newest."""
PATHS = ("/run", *PAGES, *RUN_PAGES)
MAX_PICKED = 30
"""Runs that the picker of every page offers."""
MIN_COMPRESSED_BYTES = 2000


def create_app(reader: Reader, templates: Templates, playground: ASGIApp | None = None) -> FastAPI:
    """The pages over a reader. playground: what serves all below its path, which is not taken from its requests."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    if playground is not None:
        app.add_middleware(Aside, path=PLAYGROUND, aside=playground)
    app.add_middleware(GZipMiddleware, minimum_size=MIN_COMPRESSED_BYTES, compresslevel=5)

    async def page(request: Request) -> Response:
        role = request.scope.get(ROLE, "")
        html, status = await draw(reader, templates, request.url.path, _query(request), role)
        return HTMLResponse(html, status, {"cache-control": "no-store"})

    async def move(request: Request) -> Response:
        try:
            place = await move_alias(reader, await read_form(request), request.scope.get(ROLE, ""))
        except AgentLightningError as error:
            return HTMLResponse(_wrong(templates, request.url.path, str(error)), error.http_status)
        return RedirectResponse(place, 303)

    async def live(request: Request) -> Response:
        try:
            run = await reader.run(first(_query(request), "run"))
            part = await live_part(reader, templates, run)
        except AgentLightningError as error:
            return HTMLResponse(templates.draw("error.html", why=str(error)), error.http_status)
        # 304 where the browser has it: ticks of many browsers are no work.
        headers = {"etag": mark(part), "cache-control": "no-store"}
        if request.headers.get("if-none-match") == mark(part):
            return Response(status_code=304, headers=headers)
        return HTMLResponse(part, headers=headers)

    async def static(name: str) -> Response:
        if name not in STATIC:
            return PlainTextResponse("no such file", 404)
        kept = {"cache-control": "public, max-age=31536000, immutable"}  # its address has its version
        return Response(templates.static[name], media_type=STATIC[name], headers=kept)

    app.add_api_route("/live", live, methods=["GET"])
    app.add_api_route("/static/{name}", static, methods=["GET"])
    for path in PATHS:
        app.add_api_route(path, page, methods=["GET"])
    app.add_api_route("/models", move, methods=["POST"])
    return app


class Aside:
    """Gives requests at or below a path to another application."""

    def __init__(self, app: ASGIApp, path: str, aside: ASGIApp) -> None:
        self._app, self._path, self._aside = app, path, aside

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        below = scope["type"] == "http" and scope["path"].startswith(self._path)
        await (self._aside if below else self._app)(scope, receive, send)


async def draw(reader: Reader, templates: Templates, path: str, query: Query, role: str = "") -> tuple[str, int]:
    """A page and its status: in its place the sentence about a wrong address or store, or about a fault of the console."""
    try:
        runs = (await reader.runs())[:MAX_PICKED]
        page = await view(reader, templates, path, query)
        return _drawn(templates, page, path, runs, role), 200
    except AgentLightningError as error:
        why, status = str(error), error.http_status
    except Exception as error:
        log.error("a page failed", exc_info=error)
        why, status = f"this page failed ({type(error).__name__}); what the console printed says where", 500
    return _wrong(templates, path, why), status


def _wrong(templates: Templates, path: str, why: str) -> str:
    return _drawn(templates, Page(template="wrong.html", title="Not here", values={"why": why}), path)


def _drawn(templates: Templates, page: Page, path: str, runs: Sequence[Run] = (), role: str = "") -> str:
    layout = {
        "title": page.title,
        "path": path,
        "run": page.run,
        "runs": runs,
        "search": "",
        "may_write": role == "admin",
    }
    return templates.draw(page.template, **(layout | dict(page.values)))


async def view(reader: Reader, templates: Templates, path: str, query: Query) -> Page:
    """The page of an address before it is drawn."""
    if path in PAGES:
        return await PAGES[path](reader, query)
    title, own = RUN_PAGES.get(path, ("Run", None))
    if not (run_id := first(query, "run")):
        return await choose_page(reader, path, title)
    run = await reader.run(run_id)
    return await run_page(reader, templates, run, query) if own is None else await own(reader, run, query)


def _query(request: Request) -> Query:
    given = request.query_params
    return {name: given.getlist(name) for name in given}
