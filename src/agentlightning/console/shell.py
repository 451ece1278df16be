"""The shell of the console: Gradio's pages around the HTML of ours, one per address.

A page is rendered when a browser opens it, from the query of its address alone, so that every state has an address to share.
A run's page asks for what moves again, while somebody sees it, and gets nothing if nothing is new.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

import gradio as gr
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse

from agentlightning.console.markup import PLACES, Html, Query, element, style_sheet, url, wrong
from agentlightning.console.pages.advice import bottlenecks_page, suggestions_page
from agentlightning.console.pages.compare import compare_page
from agentlightning.console.pages.models import models_page, prompts_page
from agentlightning.console.pages.replay import replay_page
from agentlightning.console.pages.rewards import rewards_page
from agentlightning.console.pages.rollouts import rollouts_page, side_page
from agentlightning.console.pages.runs import alerts_page, live_part, run_page, runs_page
from agentlightning.console.reader import Reader
from agentlightning.errors import AgentLightningError

log = logging.getLogger(__name__)

Page = Callable[[Reader, Query], Awaitable[Html]]

PAGES: Mapping[str, tuple[str, Page]] = MappingProxyType(
    {
        "/": ("Runs", runs_page),
        "/rollouts": ("Rollouts", rollouts_page),
        "/side": ("Side by side", side_page),
        "/replay": ("Replay", replay_page),
        "/compare": ("Compare", compare_page),
        "/rewards": ("Rewards", rewards_page),
        "/alerts": ("Alerts", alerts_page),
        "/bottlenecks": ("Bottlenecks", bottlenecks_page),
        "/suggestions": ("Suggestions", suggestions_page),
        "/prompts": ("Prompts", prompts_page),
        "/models": ("Models", models_page),
        "/run": ("Run", run_page),
    }
)
TICK_MS = 2000
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
});
</script>"""
"""Moves through the calls of a replay: by its slider, and by the arrow keys if nothing else takes them."""


def create_app(reader: Reader) -> FastAPI:
    """The pages over a reader, without access control."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/live")
    async def live(request: Request) -> Response:
        part, status = await _rendered(live_part, reader, _query(request))
        # 304 where the browser has it: ticks of many browsers are no work.
        mark = f'"{hashlib.blake2b(part.encode(), digest_size=16).hexdigest()}"'
        headers = {"etag": mark, "cache-control": "no-store"}
        if request.headers.get("if-none-match") == mark:
            return Response(status_code=304, headers=headers)
        return HTMLResponse(_framed("/run", part), status, headers)

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
        _view(blocks, reader, "/")
    for path, (name, _) in PAGES.items():
        if path != "/":
            with blocks.route(name, path):
                if path == "/run":
                    gr.HTML(apply_default_css=False, js_on_load=TICKING)
                _view(blocks, reader, path)
    blocks.queue(default_concurrency_limit=None)
    return blocks


def _view(blocks: gr.Blocks, reader: Reader, path: str) -> None:
    """A view, rendered when a browser opens its address."""
    view = gr.HTML(apply_default_css=False)

    async def show(request: gr.Request) -> str:
        content, _ = await _rendered(PAGES[path][1], reader, _query(request))
        return _framed(None if path == "/run" else path, content)  # a run's page begins with its live part

    blocks.load(show, None, view, show_progress="hidden", api_visibility="private")


async def _rendered(page: Page, reader: Reader, query: Query) -> tuple[Html, int]:
    """A view and its status: in its place the sentence about a wrong address or store, or about a fault of ours."""
    try:
        return await page(reader, query), 200
    except AgentLightningError as error:
        return wrong(str(error)), error.http_status
    except Exception as error:
        log.error("a page failed", exc_info=error)
        return wrong(f"this page failed ({type(error).__name__}); what the console printed says where"), 500


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
