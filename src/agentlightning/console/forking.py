"""Forks of a rollout from its replay, where the console's operator allows them: continue from a call, or answer it instead.

A page of its own asks how many and sends a form; `access.py` says whose form it is. What a fork is, is the store's affair.
"""

from __future__ import annotations

import shlex
from urllib.parse import parse_qs

import orjson
from starlette.requests import Request
from uuid_utils import uuid7

from agentlightning.console.markup import Html, element, join, url
from agentlightning.console.parts import Query, choice, first, number, replay_link, select, table
from agentlightning.console.reader import Reader, Recorded
from agentlightning.errors import InputError
from agentlightning.records import FINAL_STATES, JSON
from agentlightning.store.base import RolloutQuery
from agentlightning.store.forks import calls_before, new_forks, read_message, replayable

MAX_FORM_BYTES = 16_384
MAX_COUNT = 64
"""Forks that one form makes."""
KINDS = {"text": "a text", "message": "an assistant message in JSON"}


def fork_links(reader: Reader, one: Recorded, current: int) -> Html | None:
    """Links to what continues the shown rollout from the shown call; None where that is not offered, or cannot be."""
    rollout = one.rollout
    finished = rollout.state in FINAL_STATES and one.attempt == rollout.attempt
    calls = calls_before(one.calls).get(one.calls[current].id)
    if not reader.forks or not finished or rollout.kind == "session" or calls is None:
        return None
    place: dict[str, str | int | float | None] = {"rollout": rollout.id, "calls": calls}
    links = [
        element("a", "Continue from here…", href=url("/fork", place)),
        element("a", "Answer this instead…", href=url("/fork", {**place, "answer": "1"})),
    ]
    return element("p", links[0], " ", links[1], class_="links")


async def fork_page(reader: Reader, query: Query, may_fork: bool) -> Html:
    """The form that continues a rollout at a call, or the command for who may only read; or the rollouts that it made."""
    if group := first(query, "group"):
        return await _made(reader, first(query, "run"), group)
    rollout_id, calls = first(query, "rollout"), number(query, "calls")
    if not rollout_id or calls is None:
        raise InputError("calls: expected a rollout and the number of its calls to replay")
    one = await reader.rollout(rollout_id)
    answers = choice(query, "answer", ("", "1")) == "1"
    recorded = replayable(one.calls)
    if calls >= len(recorded):
        raise InputError(f"calls: expected a number below {len(recorded)}, got {calls}")
    replayed = (
        f"Its first {calls} calls are answered from the record"
        if calls
        else "Nothing of it is answered from the record"
    )
    then = "the next one gets the answer below" if answers else "the next one is sampled anew"
    return join(
        [
            element("h1", f"{'Answer' if answers else 'Continue from'} call {calls + 1} of rollout {rollout_id}?"),
            element("p", f"The agent is started again by the workers of run {one.rollout.run_id}. {replayed}, {then}."),
            _form(rollout_id, calls, recorded[calls][0].completion if answers else None)
            if may_fork
            else _command(rollout_id, calls, answers),
            element("p", replay_link(rollout_id, "Back to its replay")),
        ]
    )


async def fork(reader: Reader, body: bytes) -> str:
    """Enqueues what a sent form asks for; returns the address of a page about it. A form that is sent twice makes nothing
    more."""
    query: Query = parse_qs(body.decode("utf-8", "replace"))
    rollout_id, calls, count = first(query, "rollout"), number(query, "calls"), number(query, "count", 1) or 0
    key = first(query, "key")
    if not rollout_id or calls is None or not key.replace("-", "").isalnum() or len(key) > 40:
        raise InputError("form: expected that of the console's page")
    if not 1 <= count <= MAX_COUNT:
        raise InputError(f"count: expected 1 to {MAX_COUNT}, got {count}")
    new = await new_forks(reader.store, rollout_id, calls, count, answer=_answer(query), key=key)
    made = await reader.store.enqueue(new)
    return url("/fork", {"run": made[0].run_id, "group": made[0].group_id})


async def bounded_body(request: Request) -> bytes:
    """The form that was sent. InputError where it is larger than ours."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            raise InputError("form: expected that of the console's page, got too much")
    return bytes(body)


def _answer(query: Query) -> str | JSON | None:
    text = first(query, "text").replace("\r\n", "\n")  # as browsers end lines
    if "kind" not in query:
        return None
    if choice(query, "kind", tuple(KINDS)) == "text":
        return text
    return read_message(text)


async def _made(reader: Reader, run_id: str, group: str) -> Html:
    made = await reader.store.rollouts(RolloutQuery(run_id=run_id, group_ids=[group], limit=MAX_COUNT))
    rows = [[replay_link(one.id), one.state, None if one.reward is None else f"{one.reward:g}"] for one in made]
    return join(
        [
            element("h1", f"{len(made)} new rollouts"),
            element("p", f"The workers of run {run_id} execute them, after its end: agl rollouts execute {run_id}"),
            element("p", "Load this page again to see how far they are."),
            table(["rollout", "state", "reward"], rows, "The new rollouts"),
            element("p", element("a", "Side by side", href=url("/side", {"run": run_id, "group": group}))),
        ]
    )


def _form(rollout_id: str, calls: int, completion: JSON | None) -> Html:
    """`completion`: what an answer begins with; None where none is given."""
    fields = {"rollout": rollout_id, "calls": str(calls), "key": str(uuid7())}
    hidden = [element("input", type="hidden", name=name, value=value) for name, value in fields.items()]
    count = element("input", type="number", name="count", min=1, max=MAX_COUNT, value=1)
    parts = [*hidden, element("p", element("label", "How many ", count))]
    if completion is not None:
        kind, text = _editable(completion)
        parts += [
            element("p", select("kind", "The answer is", KINDS, kind)),
            element("p", element("textarea", text, name="text", rows=12, cols=100, aria_label="answer")),
        ]
    return element("form", *parts, element("button", "Start"), action="/fork", method="post")


def _editable(completion: JSON) -> tuple[str, str]:
    """The kind and the text with which a recorded completion is given as an answer."""
    kept = {name: completion[name] for name in ("content", "reasoning_content") if completion.get(name)}
    if tools := completion.get("tool_calls"):
        kept["tool_calls"] = [{"type": "function", "function": one["function"]} for one in tools]
    if kept.keys() <= {"content"}:
        return "text", str(kept.get("content", ""))
    return "message", orjson.dumps(kept, option=orjson.OPT_INDENT_2).decode()


def _command(rollout_id: str, calls: int, answers: bool) -> Html:
    words = ["agl", "rollouts", "fork", rollout_id, "--calls", str(calls), *(("--answer", "TEXT") if answers else ())]
    return element("p", "Do it with: ", element("code", shlex.join(words)))
