"""Promotion of a prompt version: the one thing that a console writes, where its operator allows it.

A page of its own asks for confirmation and sends a form; `access.py` says whose form it is. Versions are the store's affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qs

from starlette.requests import Request

from agentlightning.console.export import style_sheet
from agentlightning.console.markup import Html, element, join, url
from agentlightning.console.pages.models import difference, promotion_command, template_text
from agentlightning.console.parts import Query, first, number
from agentlightning.console.reader import Reader
from agentlightning.errors import ConflictError, InputError
from agentlightning.records import Resource
from agentlightning.store.audit import Actor, acting_as
from agentlightning.store.templates import find_version, promote_version

MAX_FORM_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class _Chosen:
    version: Resource
    newest: Resource


async def promotion_page(reader: Reader, query: Query, may_promote: bool) -> Html:
    """The version of the address, how it differs from the newest, and the button that makes it the newest, or the command
    for who may only read."""
    chosen = await _chosen(reader, query)
    version, newest = chosen.version, chosen.newest
    name = f"{version.name}, version {version.version}"
    back = url("/prompts", {"run": version.run_id, "name": version.name, "version": version.version})
    parts: list[Html | None] = [element("h1", f"Promote {name}?")]
    if version.version == newest.version:
        parts.append(element("p", "It is the newest already: new rollouts get it.", class_="none"))
    else:
        told = f"New rollouts of run {version.run_id} get it at once; rollouts that have begun keep theirs."
        parts += [
            element("p", told),
            _form(version, newest) if may_promote else promotion_command(version),
            element("h2", f"Difference from version {newest.version}, the newest"),
            difference(template_text(newest.value), template_text(version.value)),
        ]
    parts += [element("p", element("a", "Back to its prompts", href=back))]
    return join(parts)


async def promote(reader: Reader, body: bytes, actor: str) -> str:
    """Makes the version of a sent form the newest; returns the address of the new one. ConflictError where another became
    the newest since the form was made: a form that is sent twice promotes once."""
    query: Query = parse_qs(body.decode("utf-8", "replace"))
    async with reader.promoting:
        chosen = await _chosen(reader, query)
        if chosen.newest.version != number(query, "newest"):
            raise ConflictError(
                f"{chosen.newest.name}@{chosen.newest.version} became the newest meanwhile: look at it before you promote "
                "another"
            )
        with acting_as(Actor(name=f"{actor}, through the console")):
            stored = await promote_version(reader.store, chosen.version)
    return url("/prompts", {"run": stored.run_id, "name": stored.name, "version": stored.version})


async def bounded_body(request: Request) -> bytes:
    """The form that was sent. InputError where it is larger than any of ours."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            raise InputError("form: expected that of the console's page, got too much")
    return bytes(body)


def whole_page(title: str, content: Html) -> str:
    """A page without Gradio."""
    opening = '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    opening += '<meta name="color-scheme" content="light dark">'
    head = f"{opening}{element('title', title)}<style>{style_sheet()}</style></head>"
    return f"{head}<body>{element('main', content, class_='agl')}</body></html>"


def _form(version: Resource, newest: Resource) -> Html:
    fields = {"run": version.run_id, "name": version.name}
    fields |= {"version": str(version.version), "newest": str(newest.version)}
    hidden = [element("input", type="hidden", name=field, value=value) for field, value in fields.items()]
    button = element("button", f"Promote version {version.version}")
    return element("form", *hidden, button, action="/promote", method="post")


async def _chosen(reader: Reader, query: Query) -> _Chosen:
    run, name, version = first(query, "run"), first(query, "name"), number(query, "version")
    if not run or not name or version is None:
        raise InputError("version: expected run, name and version of a prompt template")
    return _Chosen(
        await find_version(reader.store, run, f"{name}@{version}"), await find_version(reader.store, run, name)
    )
