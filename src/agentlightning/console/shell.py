"""The shell of the console: Gradio's pages around the HTML of ours, one per address.

Driven by server.py. A page is rendered when a browser opens it, from the query of its address alone, so that every state has
an address that can be sent to somebody. What moves is asked for again by the page itself, which is silent while nobody sees
it, and gets nothing where nothing is new.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import gradio as gr
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from agentlightning.console.access import ACTOR, FORK
from agentlightning.console.forking import bounded_body, fork, fork_page
from agentlightning.console.markup import Html, element, join, style_sheet, url, whole_page
from agentlightning.console.pages.alerts import alerts_page
from agentlightning.console.pages.bottlenecks import bottlenecks_page
from agentlightning.console.pages.compare import compare_page
from agentlightning.console.pages.models import models_page, prompts_page
from agentlightning.console.pages.replay import replay_page
from agentlightning.console.pages.rewards import rewards_page
from agentlightning.console.pages.rollouts import rollouts_page
from agentlightning.console.pages.run import live_part, run_page
from agentlightning.console.pages.runs import runs_page
from agentlightning.console.pages.side import side_page
from agentlightning.console.pages.suggestions import suggestions_page
from agentlightning.console.parts import PLACES, Query
from agentlightning.console.reader import Reader
from agentlightning.errors import AgentLightningError

log = logging.getLogger(__name__)

Page = Callable[[Reader, Query], Awaitable[Html]]

TICK_MS = 2000
PLAY_MS = 2500
"""Time for which a replay that plays shows a call."""
LIVE = "/live"
TICKING = """
let mark = "", asking = false;
const tick = async () => {
  if (document.hidden || asking) return;
  asking = true;
  try {
    const answer = await fetch("live" + location.search, {headers: {"If-None-Match": mark}});
    const now = answer.headers.get("ETag");
    if (answer.status !== 304 && now) {
      element.innerHTML = await answer.text();
      mark = now;
    }
  } catch {
  } finally {
    asking = false;
  }
};
tick();
setInterval(tick, TICK_MS);
""".replace("TICK_MS", str(TICK_MS))
"""Run by the live part once: a hidden page asks for nothing, and while nobody answers it shows what it has."""

SCRUBBING = """<script>
document.addEventListener("change", (event) => {
  if (event.target.matches(".agl .scrub")) event.target.form.requestSubmit();
});
document.addEventListener("keydown", (event) => {
  const way = {ArrowLeft: "prev", ArrowRight: "next"}[event.key];
  const taken = event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || event.target.matches("input, select");
  if (way && !taken) document.querySelector(`.agl a[rel=${way}]`)?.click();
  if (event.key === "Escape") document.querySelector(".agl .playing .play")?.click();
});
setInterval(() => {
  const still = document.hidden || matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (!still) document.querySelector(".agl .playing a[rel=next]")?.click();
}, PLAY_MS);
</script>""".replace("PLAY_MS", str(PLAY_MS))
"""Moves through the calls of a replay: its slider, the arrow keys wherever nothing else takes them, and by itself while it
plays, which Escape ends; not for who prefers less motion."""


def create_app(reader: Reader) -> FastAPI:
    """The pages over a reader, without access control."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get(FORK)
    async def offer_fork(request: Request) -> Response:
        return await _own_page("Continue", fork_page(reader, _query(request), ACTOR in request.scope))

    @app.post(FORK)
    async def fork_chosen(request: Request) -> Response:
        return await _taken("Continue", reader, request, fork)

    @app.get(LIVE)
    async def live(request: Request) -> Response:
        return await _live(reader, request)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "SSR mode", UserWarning)  # told of the mode that is off, too
        gr.mount_gradio_app(
            app,
            _blocks(reader),
            path="",
            css=style_sheet(),
            head=SCRUBBING,
            theme=gr.themes.Base(font="system-ui", font_mono="ui-monospace"),
            ssr_mode=False,
            footer_links=[],
            show_error=False,
        )
    return app


def _blocks(reader: Reader) -> gr.Blocks:
    with gr.Blocks(title="Agent Lightning", analytics_enabled=False) as blocks:
        _view(blocks, reader, "/", runs_page)
    for path, name, page in (
        ("/rollouts", "Rollouts", rollouts_page),
        ("/side", "Side by side", side_page),
        ("/replay", "Replay", replay_page),
        ("/compare", "Compare", compare_page),
        ("/rewards", "Rewards", rewards_page),
        ("/alerts", "Alerts", alerts_page),
        ("/bottlenecks", "Bottlenecks", bottlenecks_page),
        ("/suggestions", "Suggestions", suggestions_page),
        ("/prompts", "Prompts", prompts_page),
        ("/models", "Models", models_page),
    ):
        with blocks.route(name, path):
            _view(blocks, reader, path, page)
    with blocks.route("Run", "/run"):
        gr.HTML(apply_default_css=False, js_on_load=TICKING)
        _view(blocks, reader, None, run_page)
    blocks.queue(default_concurrency_limit=None)
    return blocks


def _view(blocks: gr.Blocks, reader: Reader, path: str | None, page: Page) -> None:
    """A view, rendered when a browser opens its address."""
    view = gr.HTML(apply_default_css=False)

    async def show(request: gr.Request) -> str:
        return _framed(path, await _rendered(page, reader, _query(request)))

    blocks.load(show, None, view, show_progress="hidden", api_visibility="private")


async def _live(reader: Reader, request: Request) -> Response:
    """The view of what moves, or 304 where the browser has it: ticks of many browsers are no work."""
    try:
        part, status = await live_part(reader, _query(request)), 200
    except Exception as error:
        part, status = _wrong(error), _status(error)
    mark = f'"{hashlib.blake2b(part.encode(), digest_size=16).hexdigest()}"'
    headers = {"etag": mark, "cache-control": "no-store"}
    if request.headers.get("if-none-match") == mark:
        return Response(status_code=304, headers=headers)
    return HTMLResponse(_framed("/run", part), status, headers)


async def _rendered(page: Page, reader: Reader, query: Query) -> Html:
    try:
        return await page(reader, query)
    except Exception as error:
        return _wrong(error)


async def _own_page(title: str, content: Awaitable[Html]) -> Response:
    """A page without Gradio, or the sentence in its place."""
    try:
        return HTMLResponse(whole_page(title, await content))
    except Exception as error:
        return HTMLResponse(whole_page(title, join([element("h1", title), _wrong(error)])), _status(error))


async def _taken(
    title: str, reader: Reader, request: Request, take: Callable[[Reader, bytes], Awaitable[str]]
) -> Response:
    """Does what a sent form says, and leads to the address that `take` returns."""
    try:
        return RedirectResponse(await take(reader, await bounded_body(request)), 303)
    except Exception as error:
        return HTMLResponse(whole_page(title, join([element("h1", title), _wrong(error)])), _status(error))


def _wrong(error: Exception) -> Html:
    """The sentence in place of a view: of a wrong address or store, or of a fault of ours, which is logged."""
    if isinstance(error, AgentLightningError):
        told = str(error)
    else:
        log.error("a page failed", exc_info=error)
        told = f"this page failed ({type(error).__name__}); what the console printed says where"
    return element("p", told, class_="wrong", role="alert")


def _status(error: Exception) -> int:
    return error.http_status if isinstance(error, AgentLightningError) else 500


def _framed(path: str | None, content: Html) -> str:
    """The content with the navigation above it, where the view is the first of its page."""
    links = [
        element("a", name, href=url(place), aria_current="page" if place == path else None)
        for place, name in PLACES.items()
    ]
    pages = element("nav", *links, class_="pages", aria_label="pages") if path is not None else None
    return element("div", pages, content, class_="agl")


def _query(request: Any) -> Query:
    given = request.query_params
    return {name: given.getlist(name) for name in given}
