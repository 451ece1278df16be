"""One rollout as a file: HTML that opens without the console, or JSON with all that is stored of it."""

from __future__ import annotations

from importlib.resources import files

import orjson

from agentlightning.console.markup import element, join
from agentlightning.console.pages.replay import call_view, head
from agentlightning.console.reader import Reader, Recorded
from agentlightning.console.waterfall import waterfall


def style_sheet() -> str:
    """The style sheet of pages and exports."""
    return files("agentlightning.console").joinpath("style.css").read_text(encoding="utf-8")


async def as_html(reader: Reader, one: Recorded) -> bytes:
    """The replay of every call, one below the other, in one file that asks nobody for anything."""
    lanes = waterfall(one.spans, one.calls, lambda call: f"#call-{call + 1}")
    one = await reader.with_uses(one, one.calls)
    texts = [await reader.texts(call) for call in one.calls]
    calls = [element("div", call_view(one, place, text), id=f"call-{place + 1}") for place, text in enumerate(texts)]
    body = element("div", join([head(one), element("h2", "What happened when"), lanes, *calls]), class_="agl")
    title = element("title", f"Rollout {one.rollout.id}")
    opening = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    guard = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return f"{opening}{guard}{title}<style>{style_sheet()}</style></head><body>{body}</body></html>".encode()


async def as_json(reader: Reader, one: Recorded) -> bytes:
    """The stored records; numbers that JSON does not know are null."""
    one = await reader.with_uses(one, one.calls)
    records = {
        "rollout": one.rollout,
        "attempts": one.attempts,
        "calls": one.calls,
        "spans": one.spans,
        "rewards": one.rewards,
        "credit": [use.credit for use in one.uses.values() if use.credit is not None],
    }
    return orjson.dumps(records, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS, default=str)
