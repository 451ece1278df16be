"""Rollout traces: the record of rollouts as text, for a model that reflects on them.

`store_search.py` drives it with what a store gave. Pure: it cuts nothing, which is for whoever asks a model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from agentlightning.algorithms.prompts.search import RolloutScore, Trace
from agentlightning.records import JSON, Call, Rollout, Span
from agentlightning.store.feedback import FEEDBACK


def rollout_trace(rollout: Rollout, calls: Sequence[Call], spans: Sequence[Span], score: RolloutScore) -> Trace:
    """One rollout: its calls and spans of the last attempt, in the order in which they began."""
    steps = [(call.started_ns, call_step(call)) for call in calls if call.attempt == rollout.attempt]
    steps += [
        (span.started_ns, span_step(span))
        for span in spans
        if span.attempt == rollout.attempt and span.name != FEEDBACK
    ]
    ordered = tuple(text for _, text in sorted(steps, key=lambda step: step[0]))
    return Trace(task=json.dumps(rollout.task, ensure_ascii=False), steps=ordered, score=score)


def call_step(call: Call) -> str:
    """A model call: the messages that no earlier call had, tool results among them, and the completion."""
    lines = [_message(each) for each in (*call.messages, call.completion)]
    if call.finish_reason == "length":
        lines.append("(the completion was cut off: it reached the most tokens that it may have)")
    head = f"model call of agent {call.agent}:" if call.agent else "model call:"
    return "\n".join([head, *lines])


def span_step(span: Span) -> str:
    """A step of the agent outside model calls, with its attributes, and with the error where it ended in one."""
    own = {name: value for name, value in span.attributes.items() if not name.startswith(("resource.", "scope."))}
    text = f"{span.name} {json.dumps(own, ensure_ascii=False, default=str)}" if own else span.name
    failures = [span.status_message or "failed"] if span.status == "error" else []
    for event in span.events:
        attributes = event.get("attributes") or {}
        if event.get("name") == "exception":
            failures.append(f"{attributes.get('exception.type', '')}: {attributes.get('exception.message', '')}")
    return text + "".join(f"\n  error: {one}" for one in dict.fromkeys(failures))


def message_text(message: JSON) -> str:
    """The text of a message, whose content is a text or parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))


def _message(message: JSON) -> str:
    text = message_text(message)
    if tools := message.get("tool_calls"):
        text += f" calls tools {json.dumps(tools, ensure_ascii=False)}"
    return f"[{message.get('role')}] {text}"
