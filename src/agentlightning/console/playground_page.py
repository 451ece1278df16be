"""The playground as Gradio's page: its fields and buttons over `Playground`. Nothing else imports Gradio."""

# No postponed annotations: Gradio reads those of handlers when it gives them the request.
import html
import warnings
from collections.abc import AsyncIterator
from typing import Any

import gradio as gr
from fastapi import FastAPI

from agentlightning.console.playground import MAX_CHARS, MAX_TOKENS, PATH, ROLE, Playground
from agentlightning.errors import AgentLightningError, printable

NO_MODEL = "No model version is registered yet: a training run registers its checkpoints, `agl demo` among them."


def mounted(playground: Playground) -> FastAPI:
    """The page at its path."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "SSR mode", UserWarning)  # given for the mode that is off, too
        gr.mount_gradio_app(
            app,
            _page(playground),
            path=PATH,
            theme=gr.themes.Soft(primary_hue="indigo", font="system-ui", font_mono="ui-monospace"),
            ssr_mode=False,
            footer_links=[],
            head='<link rel="icon" href="/static/icon.svg">',
            show_error=False,
        )
    return app


def _page(playground: Playground) -> gr.Blocks:
    """Two conversations, one message to both; what models say is shown as text."""
    with gr.Blocks(title="Playground · Agent Lightning", analytics_enabled=False) as page:
        gr.HTML('<p><a href="/">Agent Lightning</a> / Playground</p><h1>Playground</h1>')
        note = gr.Markdown()
        with gr.Row():
            sides = [_side(name) for name in ("A", "B")]
        message = gr.Textbox(label="Message to both", submit_btn=True, max_length=MAX_CHARS)
        with gr.Row():
            temperature = gr.Slider(0, 1.5, value=0, step=0.1, label="Temperature")
            tokens = gr.Slider(16, MAX_TOKENS, value=128, step=16, label="At most so many tokens")
            clear = gr.Button("Clear both")
        with gr.Accordion("Promote", open=False):
            alias = gr.Textbox("production", label="Alias")
            promoting = [gr.Button(f"Promote {name}") for name in ("A", "B")]
            moved = gr.Markdown()
        talks = [gr.State([]), gr.State([])]
        models, systems, chats = ([side[part] for side in sides] for part in range(3))

        async def load(request: gr.Request) -> list[Any]:
            query = dict(request.query_params)
            known = await playground.models()
            chosen = [query.get("a", known[0]), query.get("b", known[-1])] if known else ["", ""]
            prompts = [await playground.prompt(query, side) for side in "ab"]
            return [
                await playground.paired(query) if known else NO_MODEL,
                *(gr.update(choices=known, value=one or None) for one in chosen),
                *prompts,
            ]

        async def send(text: str, heat: float, most: int, *given: Any) -> AsyncIterator[list[Any]]:
            asked, instructions, said = given[:2], given[2:4], [list(one or ()) for one in given[4:]]
            if not text.strip() or None in asked:
                yield [text, *said, *map(_shown, said)]
                return
            said = [[*one, {"role": "user", "content": text}] for one in said]
            yield ["", *said, *map(_shown, said)]
            for place in range(2):
                reply = await playground.answer(asked[place], instructions[place], said[place], heat, int(most))
                said[place] = [*said[place], {"role": "assistant", "content": reply}]
                yield ["", *said, *map(_shown, said)]

        async def promote(model: str | None, name: str, request: gr.Request) -> str:
            role = str(request.request.scope.get(ROLE, ""))
            try:
                return await playground.promote(model or "", name, role)
            except AgentLightningError as error:
                return str(error)

        quiet: dict[str, Any] = {"api_visibility": "private", "show_progress": "minimal"}
        page.load(load, None, [note, *models, *systems], **quiet)
        message.submit(
            send, [message, temperature, tokens, *models, *systems, *talks], [message, *talks, *chats], **quiet
        )
        clear.click(lambda: [[]] * 4, None, [*talks, *chats], **quiet)
        for button, model in zip(promoting, models, strict=True):
            button.click(promote, [model, alias], moved, **quiet)
    page.queue(default_concurrency_limit=4)
    return page


def _shown(said: list[dict[str, str]]) -> list[dict[str, str]]:
    """A conversation as text: Gradio takes what it is given for HTML, and would load a picture that a model names."""
    return [{**one, "content": html.escape(printable(one["content"]))} for one in said]


def _side(name: str) -> tuple[gr.Dropdown, gr.Textbox, gr.Chatbot]:
    with gr.Column():
        model = gr.Dropdown([], label=f"Model {name}")
        system = gr.Textbox(label=f"System prompt {name}", lines=2, max_length=MAX_CHARS)
        chat = gr.Chatbot(label=f"Conversation {name}", height=320, render_markdown=False, buttons=["copy"])
    return model, system, chat
