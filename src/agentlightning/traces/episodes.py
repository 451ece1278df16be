"""Files of spans and of chat JSON as episodes: a task, its model calls and what it earned.

A file is JSON Lines or one JSON value, also gzipped. OTLP/JSON holds spans of many traces in any order; they are gathered to
the end of the file, and each trace is an episode. Any other value is a row of `FORMATS`. A broken row raises DataError,
which names the line and the field; of spans only what is broken is lost.
"""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson

from agentlightning.adapters.semantics import error_of, json_of, model_of, plain_result, role_of, usage_of, written
from agentlightning.adapters.span_tree import SpanTree
from agentlightning.errors import DataError, RewardError
from agentlightning.records import JSON, Span
from agentlightning.store.rules import reward_number
from agentlightning.traces.atif import is_atif, read_atif
from agentlightning.traces.episode import Episode, ModelCall
from agentlightning.traces.training_trace import is_training_trace, read_training_trace
from agentlightning.tracing.otlp import from_object
from agentlightning.tracing.sanitize import sanitize_request


class TraceFileReader:
    """One file, read once."""

    def __init__(self, path: Path, task_fields: Iterable[str] = ()) -> None:
        """task_fields: fields of rows that belong to the task, such as the right answer, for reward functions to see."""
        self._path = path
        self._task_fields = tuple(task_fields)
        self._traces: dict[str, list[Span]] = {}
        self.broken: Counter[str] = Counter()
        """Faults of OTLP spans, by cause; see `sanitize.py`."""
        self.found_fields: set[str] = set()
        """Those of `task_fields` that some row had."""

    def __iter__(self) -> Iterator[Episode]:
        """Its episodes. DataError, with the line, where the file cannot be read or a row has none of the known formats."""
        try:
            for place, value in self._values():
                yield from self._of_value(place, value)
        except FileNotFoundError:
            raise DataError(f"{self._path}: there is no such file") from None
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as cause:
            raise DataError(f"{self._path}: cannot be read: {cause}") from cause
        for spans in self._traces.values():
            yield episode_of_spans(spans)

    def _of_value(self, place: str, value: Any) -> Iterator[Episode]:
        if isinstance(value, dict) and not value.keys().isdisjoint(("resourceSpans", "scopeSpans")):
            taken = sanitize_request(from_object(value))
            self.broken.update(taken.broken)
            for span in taken.spans:
                self._traces.setdefault(span.trace_id or "", []).append(span)
        elif isinstance(value, list):
            for number, one in enumerate(value, 1):
                yield from self._of_value(f"{place}, entry {number}", one)
        else:
            try:
                yield from self._of_row(value)
            except (DataError, RewardError) as wrong:
                raise DataError(f"{self._path}, {place}: {wrong}") from None

    def _of_row(self, row: Any) -> list[Episode]:
        read = next((read for fits, read in FORMATS.values() if isinstance(row, dict) and fits(row)), None)
        if read is None:
            got = f"an object with {', '.join(list(row)[:8])}" if isinstance(row, dict) else type(row).__name__
            raise DataError(f"expected OTLP/JSON or a row of {', '.join(FORMATS)}; got {got}")
        more = {name: row[name] for name in self._task_fields if name in row}
        self.found_fields |= more.keys()
        return [replace(one, task={**one.task, **more}) for one in read(row)]

    def _values(self) -> Iterator[tuple[str, Any]]:
        """The JSON values of the file and where each stands. Lines are read one by one where each is a value."""
        opener = gzip.open if self._path.suffix.lower() == ".gz" else open
        with opener(self._path, "rb") as file:
            for number, line in enumerate(file, 1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if not line.strip():
                    continue
                try:
                    value = orjson.loads(line)
                except orjson.JSONDecodeError as cause:
                    if number > 1:
                        raise DataError(f"{self._path}, line {number}: is not valid JSON: {cause}") from None
                    yield "line 1", self._whole(line + file.read())
                    return
                yield f"line {number}", value

    def _whole(self, text: bytes) -> Any:
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError as cause:
            raise DataError(f"{self._path}, line {cause.lineno}: is not valid JSON: {cause}") from None


def episode_of_spans(spans: Iterable[Span]) -> Episode:
    """The episode of one trace. A span that never ended lasts until the trace does. The root of a trace that `agl
    runs export --as traces` wrote holds the rollout's task, mode and rewards."""
    listed = SpanTree(spans).spans
    end = max((max(span.started_ns, span.finished_ns) for span in listed), default=0)
    tree = SpanTree(span if span.finished_ns else replace(span, finished_ns=end) for span in listed)
    calls = model_calls(tree)
    first = next((call.messages for call in calls if call.messages), None)
    trace = next((span.trace_id for span in tree.spans if span.trace_id), "")
    task: JSON = {"messages": _opening(first)} if first else {"trace": trace}
    episode = Episode(task=task, calls=calls, spans=tree.spans)
    root = next((span for span in tree.spans if {"agl.run_id", "agl.mode"} <= span.attributes.keys()), None)
    return episode if root is None else _as_exported(episode, root, tree)


def _as_exported(episode: Episode, root: Span, tree: SpanTree) -> Episode:
    """With what the root of an exported trace and its calls record (tracing/rollout_trace.py); what is broken is lost."""
    try:
        task = orjson.loads(str(root.attributes.get("input.value")))
    except orjson.JSONDecodeError:
        task = None
    spans = [tree.get(call.span_id) for call in episode.calls]
    steps = [_rewards_on(span) if span is not None else {} for span in spans]
    named = _rewards_on(root)
    named.pop("reward", None)  # emitted; agl.reward is the one that counts, and a rollout that failed has none
    return replace(
        episode,
        task=task if isinstance(task, dict) else episode.task,
        mode="eval" if root.attributes["agl.mode"] == "eval" else "train",
        reward=_reward(root.attributes.get("agl.reward")),
        rewards=named,
        steps=steps if any(steps) else [],
        error=(root.status_message or "failed") if root.status == "error" else None,
    )


def _rewards_on(span: Span) -> dict[str, float]:
    prefix = "agl.rewards."
    told = {name.removeprefix(prefix): _reward(one) for name, one in span.attributes.items() if name.startswith(prefix)}
    return {name: value for name, value in told.items() if value is not None}


def _reward(value: Any) -> float | None:
    try:
        return reward_number(value)
    except RewardError:
        return None


def conversation(messages: Sequence[JSON], tools: list[JSON] | None = None, model: str = "") -> list[ModelCall]:
    """A call for each completion of a conversation, whose prompt is all before it.

    (system, user, assistant, tool, assistant) are two calls. A completion with ``"weight": 0`` is not learned from.
    """
    plain = [{name: value for name, value in message.items() if name != "weight"} for message in messages]
    return [
        ModelCall(
            model=model,
            messages=plain[:place],
            completion=plain[place],
            tools=tools,
            finish_reason="tool_calls" if plain[place].get("tool_calls") else "stop",
        )
        for place, message in enumerate(messages)
        if message["role"] == "assistant" and place > 0 and message.get("weight") != 0
    ]


# --- rows of chat JSON ----------------------------------------------------------------------------------------------


def _messages(row: JSON) -> list[Episode]:
    """``{"messages", "tools"?, "reward"?}``: the format of fine-tuning."""
    messages = _conversation(row["messages"], "messages")
    calls = conversation(messages, chat_tools(row.get("tools")), str(row.get("model") or ""))
    if all(message["role"] != "assistant" for message in messages[1:]):
        raise DataError("messages: expected a message of the assistant after the first message")
    return [Episode(task={"messages": _opening(messages)}, calls=calls, **_earned(row))]


def _preference(row: JSON) -> list[Episode]:
    """``{"prompt"?, "chosen", "rejected"}``: two episodes of one task, of rewards 1 and 0."""
    return [_prompted(row, "chosen", {"reward": 1.0}), _prompted(row, "rejected", {"reward": 0.0})]


def _completion(row: JSON) -> list[Episode]:
    """``{"prompt", "completion", "label"?}``: a text or messages each; a label counts as a reward of 1 or 0."""
    return [_prompted(row, "completion", _earned(row))]


def _prompted(row: JSON, name: str, earned: JSON) -> Episode:
    prompt = _conversation(row["prompt"], "prompt") if "prompt" in row else []
    said = row[name]
    answer = [{"role": "assistant", "content": said}] if isinstance(said, str) else _conversation(said, name)
    calls = conversation([*prompt, *answer], chat_tools(row.get("tools")), str(row.get("model") or ""))
    calls = [call for call in calls if len(call.messages or ()) >= len(prompt)]
    if not calls:
        raise DataError(f"{name}: expected a message of the assistant")
    return Episode(task={"messages": prompt or _opening(answer)}, calls=calls, **earned)


FORMATS: Mapping[str, tuple[Callable[[JSON], bool], Callable[[JSON], list[Episode]]]] = MappingProxyType(
    {
        "messages": (lambda row: "messages" in row, _messages),
        "preference": (lambda row: "chosen" in row and "rejected" in row, _preference),
        "completion": (lambda row: "prompt" in row and "completion" in row, _completion),
        "training-trace": (is_training_trace, read_training_trace),
        "atif": (is_atif, read_atif),
    }
)
"""By name: recognises a row by its keys, and reads it."""


def _earned(row: JSON) -> dict[str, Any]:
    """reward and rewards of a row, as arguments of Episode."""
    earned: dict[str, Any] = {}
    for name in ("reward", "score", "label"):
        if row.get(name) is not None:
            earned["reward"] = reward_number(row[name], name)
            break
    named = row.get("rewards")
    if isinstance(named, dict):
        earned["rewards"] = {str(name): reward_number(value, f"rewards.{name}") for name, value in named.items()}
    elif named is not None:
        raise DataError("rewards: expected numbers by name")
    return earned


def _conversation(value: Any, name: str) -> list[JSON]:
    found = [{"role": "user", "content": value}] if isinstance(value, str) else chat_messages(value)
    if found is None:
        raise DataError(f"{name}: expected a list of messages with role and content")
    return found


def _opening(messages: Sequence[JSON]) -> list[JSON]:
    """The messages before the first completion."""
    first = next((place for place, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
    return list(messages[:first])


# --- model calls of spans, by OpenTelemetry's GenAI conventions ----------------------------------------------------------


DETAILS = "gen_ai.client.inference.operation.details"
"""The event that holds the messages where the span's own attributes do not."""
FINISHED = {"tool_call": "tool_calls", "tool_calls": "tool_calls", "length": "length", "max_tokens": "length"}
"""Finish reasons of Chat Completions by the recorded one; any other means stop."""


def model_calls(tree: SpanTree) -> list[ModelCall]:
    """The model calls in order of time; a call that several layers of a framework recorded is the innermost span."""
    models = [span for span in tree.spans if role_of(span) == "model"]
    outer = {parent.id for span in models if (parent := tree.parent(span)) is not None}
    calls = [_model_call(span, tree.agent(span)) for span in models if span.id not in outer]
    return sorted(calls, key=lambda one: (one.started_ns, one.span_id))


def _model_call(span: Span, agent: str | None) -> ModelCall:
    events = [event.get("attributes") for event in span.events if event.get("name") == DETAILS]
    tables = [span.attributes, *(table for table in events if isinstance(table, dict))]
    prompt = _first(tables, "gen_ai.input.messages")
    answer = _first(tables, "gen_ai.output.messages")
    messages = chat_messages(prompt)
    system = _first(tables, "gen_ai.system_instructions")
    if messages is not None and isinstance(system, list) and system:
        messages = [*chat_message({"role": "system", "parts": system}), *messages]
    completion = chat_message(answer[0]) if isinstance(answer, list) and answer else []
    said = json_of(span.attributes, "gen_ai.response.finish_reasons")
    return ModelCall(
        span_id=span.id,
        agent=agent,
        model=model_of(span) or "",
        messages=messages,
        completion=completion[0] if len(completion) == 1 and completion[0]["role"] == "assistant" else None,
        tools=chat_tools(_first(tables, "gen_ai.tool.definitions")),
        finish_reason=FINISHED.get(str(said[0] if isinstance(said, list) and said else said), "stop"),
        usage=usage_of(span) or {},
        error=error_of(span),
        started_ns=span.started_ns,
        finished_ns=span.finished_ns,
    )


def _first(tables: Sequence[Mapping[str, Any]], key: str) -> Any:
    return next((found for table in tables if (found := json_of(table, key)) is not None), None)


def chat_messages(value: Any) -> list[JSON] | None:
    """A conversation as Chat Completions; None where any of it is no message: half of one never counts as whole.

    >>> chat_messages([{"role": "user", "parts": [{"type": "text", "content": "hi"}]}])
    [{'role': 'user', 'content': 'hi'}]
    """
    if not isinstance(value, list) or not value:
        return None
    read = [chat_message(one) for one in value]
    return [message for entry in read for message in entry] if all(read) else None


def chat_message(value: Any) -> list[JSON]:
    """The messages of one entry: one, or several with results of several tools; none where it is no message."""
    role = value.get("role") if isinstance(value, dict) else None
    if role not in ("system", "developer", "user", "assistant", "tool"):
        return []
    if not isinstance(value.get("parts"), list):  # a message of Chat Completions already
        return [{name: one for name, one in value.items() if one is not None or name == "content"}]
    texts, reasoning, others = [], [], []
    calls: list[JSON] = []
    results: list[JSON] = []
    for part in value["parts"]:
        match part:
            case str(text) | {"type": "text", "content": str(text)}:
                texts.append(text)
            case {"type": "reasoning", "content": str(text)}:
                reasoning.append(text)
            case {"type": "tool_call", "name": str(name)}:
                function = {"name": name, "arguments": written(part.get("arguments")) or "{}"}
                calls.append({"id": str(part.get("id") or ""), "type": "function", "function": function})
            case {"type": "tool_call_response"}:
                told = plain_result(part.get("response", part.get("result"))) or ""
                results.append({"role": "tool", "content": told, "tool_call_id": str(part.get("id") or "")})
            case dict():
                others.append(part)
    content: Any = "".join(texts)
    if others:
        content = [*([{"type": "text", "text": content}] if content else []), *others]
    if results and not content:
        return results
    message: JSON = {"role": role, "content": content}
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    return [*results, message]


def chat_tools(value: Any) -> list[JSON] | None:
    """Tool definitions in the form of Chat Completions; None where there are none, or one of them is none."""
    if not isinstance(value, list) or not value:
        return None
    found = []
    for one in value:
        inner = one.get("function", one) if isinstance(one, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            return None
        kept = {name: inner[name] for name in ("name", "description", "parameters") if inner.get(name) is not None}
        found.append({"type": "function", "function": {"parameters": {}, **kept}})
    return found
