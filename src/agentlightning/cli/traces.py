"""Spans on the command line: ``agl rollouts export --as traces`` and the tree of ``agl rollouts show --spans``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from agentlightning.cli.options import with_store

if TYPE_CHECKING:
    from rich.console import Console

    from agentlightning.records import Call, Span
    from agentlightning.store.base import LightningStore

DEEPEST_SHOWN = 40
MAX_TEXT_CHARS = 160
"""Characters that a span's line shows of each text that the agent gave."""


def export_traces(run: str, to: str, store: str | None) -> None:
    """Sends the finished rollouts of a run to an OTLP/HTTP endpoint, or writes them to a new .jsonl file, a trace each."""
    import os

    from agentlightning.store.scan import find_run
    from agentlightning.tracing.exporters import (
        OtlpFileExporter,
        OtlpHttpExporter,
        finished_rollouts,
        headers_of,
        resource_of,
        send_rollouts,
    )

    remote = to.startswith(("http://", "https://"))
    exporter = OtlpHttpExporter(to, headers_of(os.environ), timeout_s=30.0) if remote else OtlpFileExporter(Path(to))

    async def work(opened: LightningStore) -> None:
        sent = spans = 0
        await find_run(opened, run)
        async with exporter:
            async for rollouts in finished_rollouts(opened, run):
                spans += await send_rollouts(opened, rollouts, exporter, resource_of(run))
                sent += len(rollouts)
        rejected = f", of which {exporter.rejected} are rejected: {exporter.reason}" if exporter.rejected else ""
        typer.echo(f"{sent} rollouts, {spans} spans: {to}{rejected}")

    with_store(store, work)


def print_spans(console: Console, spans: list[Span], calls: list[Call]) -> None:
    """A line for each span of an attempt, with its time since the first, its duration and what went wrong; below a span
    the spans and the model calls that were made in it."""
    from agentlightning.adapters.semantics import error_of
    from agentlightning.adapters.span_tree import SpanTree
    from agentlightning.records import Call

    if not spans:
        console.print("no span was recorded")
        return
    tree = SpanTree(spans)
    children: dict[str | None, list[Span | Call]] = {}
    for span in tree.spans:
        parent = tree.parent(span)
        children.setdefault(None if parent is None else parent.id, []).append(span)
    for call in calls:
        if call.span_id is not None and tree.get(call.span_id) is not None:
            children.setdefault(call.span_id, []).append(call)
    first_ns = tree.spans[0].started_ns
    waiting = [(0, each) for each in reversed(children.get(None, []))]
    while waiting:
        depth, each = waiting.pop()
        what, wrong = "", None
        if isinstance(each, Call):
            what = f"model call {each.id}"
        else:
            what, wrong = each.name + _said(each), error_of(each)
            below = sorted(children.get(each.id, []), key=lambda child: (child.started_ns, child.id), reverse=True)
            waiting += [(depth + 1, child) for child in below]
        at, took = (each.started_ns - first_ns) / 1e9, (each.finished_ns - each.started_ns) / 1e9
        indent = "  " * min(depth, DEEPEST_SHOWN)
        console.print(f"{at:9.3f} s  {took:8.3f} s  {indent}{what}", soft_wrap=True, highlight=False, markup=False)
        if wrong:
            console.print(f"{'':24}{indent}{wrong}", soft_wrap=True, style="yellow", markup=False)


def _said(span: Span) -> str:
    """Content that the agent gave with the span: a message, an object, a tool's arguments and result; '' for any other."""
    from agentlightning.adapters.semantics import text_of, tool_use

    use = tool_use(span)
    texts = [text_of(span.attributes, name) for name in ("agl.message", "agl.object.name", "agl.object")]
    if use is not None:
        texts += [use.arguments, None if use.result is None else f"→ {use.result}"]
    parts = [" ".join(text.split()) for text in texts if text]
    return "".join(f"  {text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 1] + '…'}" for text in parts)
