"""Rows of files that hold what agents did, to episodes: a task, its model calls and what it earned. Pure.

Driven by `trainer/data/import_traces.py`. Each format is recognised by its keys; `FORMATS` lists them. A row that looks like
one and is broken raises DataError, which names the field: a file that is half understood is not understood. Spans are
another matter (`spans.py`): of these only what is broken is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import orjson

from agentlightning.adapters.any_message import message_of, messages_of, tool_definitions
from agentlightning.adapters.sdk_spans import sdk_span
from agentlightning.adapters.span_tree import SpanTree
from agentlightning.adapters.spans import ModelCall, model_calls
from agentlightning.errors import DataError, RewardError
from agentlightning.protocols import chat, responses
from agentlightning.protocols.base import ApiError
from agentlightning.records import JSON, Mode, Span
from agentlightning.store.base import reward_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One rollout as a file tells it."""

    task: JSON
    """Equal for rollouts that may be compared with each other: what the model was asked, unless the row names a
    task."""
    calls: list[ModelCall]
    spans: list[Span] = field(default_factory=list)
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    """Further final rewards by name."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """Rewards by name for each of `calls`; empty where the file has none."""
    output: str | None = None
    mode: Mode = "train"
    """eval: of held-out tasks, which nothing learns from."""
    error: str | None = None
    """Reason why it failed as a whole; failures are not trained on."""


def episodes_of_row(row: Any, task_fields: Sequence[str] = ()) -> list[Episode] | None:
    """The episodes of one row; None where it is none of `FORMATS`.

    task_fields: fields of the row that belong to the task, such as the right answer, for reward functions to see.
    """
    if not isinstance(row, dict):
        return None
    for recognises, read in FORMATS.values():
        if recognises(row):
            try:
                found = read(row)
            except (ApiError, RewardError) as wrong:
                raise DataError(str(wrong)) from None
            more = {name: row[name] for name in task_fields if name in row}
            return [replace(one, task={**one.task, **more}) for one in found]
    return None


def episode_of_spans(spans: Iterable[Span], output: Any = None) -> Episode:
    """The episode of one trace. A span that never ended lasts until the trace does.

    What `agl rollouts export-traces` wrote says what its rollout was: task, mode, and rewards, also of calls.
    """
    listed = SpanTree(spans).spans
    end = max((max(span.started_ns, span.finished_ns) for span in listed), default=0)
    tree = SpanTree(span if span.finished_ns else replace(span, finished_ns=end) for span in listed)
    calls = model_calls(tree)
    first = next((call.messages for call in calls if call.messages), None)
    trace = next((span.trace_id for span in tree.spans if span.trace_id), "")
    task: JSON = {"messages": _opening(first)} if first else {"trace": trace}
    episode = Episode(task=task, calls=calls, spans=tree.spans, output=output if isinstance(output, str) else None)
    root = next((span for span in tree.spans if {"agl.run_id", "agl.mode"} <= span.attributes.keys()), None)
    return episode if root is None else _as_exported(episode, root, tree)


def _as_exported(episode: Episode, root: Span, tree: SpanTree) -> Episode:
    """With what the root of an exported trace and its calls tell (tracing/rollout_trace.py); what is broken is lost."""
    try:
        task = orjson.loads(str(root.attributes.get("input.value")))
    except orjson.JSONDecodeError:
        task = None
    spans = [tree.get(call.span_id) for call in episode.calls]
    steps = [_rewards_on(span) if span is not None else {} for span in spans]
    named = _rewards_on(root)
    named.pop("reward", None)  # emitted; what counts in the end is agl.reward, and a rollout that failed has none
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
    told = {
        name.removeprefix(prefix): _reward(value) for name, value in span.attributes.items() if name.startswith(prefix)
    }
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
            span_id="",
            model=model,
            messages=plain[:place],
            completion=plain[place],
            tools=tools,
            finish_reason="tool_calls" if plain[place].get("tool_calls") else "stop",
        )
        for place, message in enumerate(messages)
        if message.get("role") == "assistant" and place > 0 and message.get("weight") != 0
    ]


# --- the formats ---------------------------------------------------------------------------------------------------


def _any_agent(row: JSON) -> list[Episode]:
    """``{"spans": […], "final_output"}``, alone or under "trace", or the list of spans there."""
    inner: Any = row.get("trace")
    trace: JSON = inner if isinstance(inner, dict) and isinstance(inner.get("spans"), list) else row
    listed: list[Any] = trace["spans"] if isinstance(trace.get("spans"), list) else inner
    output = trace.get("final_output")
    spans = [span for one in listed if isinstance(one, dict) and (span := sdk_span(one)) is not None]
    return [replace(episode_of_spans(spans, output), **_earned(row))]


def _chat_pair(row: JSON) -> list[Episode]:
    """``{"request", "response"}`` of Chat Completions; each choice is an episode."""
    request = chat.parse(row["request"], trained=False)
    found = []
    for choice in _listed(row["response"], "choices", "response"):
        if not isinstance(choice, dict):
            raise DataError(f"response.choices: expected objects, got {type(choice).__name__}")
        reader = chat.reader()
        reader.whole({**row["response"], "choices": [{**choice, "index": 0}]})
        call = ModelCall(
            span_id="",
            model=request.model,
            messages=request.messages,
            completion=reader.message,
            tools=request.tools,
            finish_reason=reader.finish_reason,
            usage={"prompt_tokens": reader.prompt_tokens, "sampled_tokens": reader.sampled_tokens},
        )
        found.append(Episode(task={"messages": _opening(request.messages)}, calls=[call], **_earned(row)))
    return found


def _responses_pair(row: JSON) -> list[Episode]:
    """``{"responses_create_params", "response", "reward"}`` of NeMo Gym, or ``{"request", "response"}`` of OpenAI
    Responses.

    The response may hold several turns, with the tools' results between them.
    """
    given: JSON = row["responses_create_params"] if "responses_create_params" in row else row["request"]
    before = responses.parse(_without_nulls(given), trained=False)
    said = given.get("input")
    items = [{"type": "message", "role": "user", "content": said}] if isinstance(said, str) else list(said or [])
    output = _listed(row["response"], "output", "response")
    body = _without_nulls({**given, "input": [*items, *output], "tools": given.get("tools")})
    whole = responses.parse(body, trained=False)
    model = str(row["response"].get("model") or before.model)
    calls = conversation(whole.messages, before.tools, model)
    own = [call for call in calls if call.messages is not None and len(call.messages) >= len(before.messages)]
    return [Episode(task={"messages": _opening(before.messages)}, calls=own, **_earned(row))]


def _intercode(row: JSON) -> list[Episode]:
    """``{"query", "turn_history": {"actions", "observations", "rewards"}}`` of InterCode: each action is a call.

    Its episodes earn the best of their turns' rewards, as InterCode scores them.
    """
    history = row["turn_history"]
    actions, observations = (_listed(history, name, "turn_history") for name in ("actions", "observations"))
    messages: list[JSON] = [{"role": "user", "content": str(row["query"])}]
    for place, action in enumerate(actions):
        messages.append({"role": "assistant", "content": str(action)})
        if place < len(observations):
            messages.append({"role": "user", "content": str(observations[place])})
    calls = conversation(messages, model=str(row.get("model") or ""))
    told = history.get("rewards") or []
    if not isinstance(told, list):
        raise DataError(f"turn_history.rewards: expected a list of numbers, got {type(told).__name__}")
    steps = [reward_number(value, f"turn_history.rewards[{place}]") for place, value in enumerate(told)]
    if steps and len(steps) != len(actions):
        raise DataError(f"turn_history.rewards: expected one for each of {len(actions)} actions, got {len(steps)}")
    earned = _earned(row)
    if steps and "reward" not in earned:
        earned["reward"] = max(steps)
    turns = [{"turn": step} for step in steps]
    return [Episode(task={"query": str(row["query"])}, calls=calls, steps=turns, **earned)]


def _messages(row: JSON) -> list[Episode]:
    """``{"messages", "tools"?, "reward"?}``: the format of fine-tuning."""
    messages = _conversation(row["messages"], "messages")
    if all(message.get("role") != "assistant" for message in messages[1:]):
        raise DataError("messages: expected a message of the assistant after the first message")
    calls = conversation(messages, tool_definitions(row.get("tools")), str(row.get("model") or ""))
    return [Episode(task={"messages": _opening(messages)}, calls=calls, **_earned(row))]


def _completion(row: JSON) -> list[Episode]:
    """``{"prompt", "completion", "label"?}``: a text or messages each; a label counts as a reward of 1 or 0."""
    return [_prompted(row, "completion", _earned(row))]


def _preference(row: JSON) -> list[Episode]:
    """``{"prompt"?, "chosen", "rejected"}``: two episodes of one task, of rewards 1 and 0."""
    return [_prompted(row, "chosen", {"reward": 1.0}), _prompted(row, "rejected", {"reward": 0.0})]


def _prompted(row: JSON, name: str, earned: JSON) -> Episode:
    prompt = _conversation(row["prompt"], "prompt") if "prompt" in row else []
    said = row[name]
    answer = [{"role": "assistant", "content": said}] if isinstance(said, str) else _conversation(said, name)
    whole = [*prompt, *answer]
    calls = [
        call
        for call in conversation(whole, tool_definitions(row.get("tools")), str(row.get("model") or ""))
        if len(call.messages or ()) >= len(prompt)
    ]
    if not calls:
        raise DataError(f"{name}: expected a message of the assistant")
    return Episode(task={"messages": prompt or _opening(whole)}, calls=calls, **earned)


FORMATS: Mapping[str, tuple[Callable[[JSON], bool], Callable[[JSON], list[Episode]]]] = MappingProxyType(
    {
        "spans": (
            lambda row: (
                isinstance(row.get("spans", row.get("trace")), list)
                or (isinstance(row.get("trace"), dict) and isinstance(row["trace"].get("spans"), list))
            ),
            _any_agent,
        ),
        "responses": (
            lambda row: (
                isinstance(row.get("response"), dict)
                and "output" in row["response"]
                and isinstance(row.get("responses_create_params", row.get("request")), dict)
            ),
            _responses_pair,
        ),
        "chat": (
            lambda row: isinstance(row.get("request"), dict) and isinstance(row.get("response"), dict),
            _chat_pair,
        ),
        "intercode": (lambda row: isinstance(row.get("turn_history"), dict) and "query" in row, _intercode),
        "messages": (lambda row: "messages" in row, _messages),
        "preference": (lambda row: "chosen" in row and "rejected" in row, _preference),
        "completion": (lambda row: "prompt" in row and "completion" in row, _completion),
    }
)


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
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    weights = [one.get("weight") if isinstance(one, dict) else None for one in value] if isinstance(value, list) else []
    if any(weight is not None for weight in weights):
        read = [message_of(one) for one in value]
        found = [
            message if weight is None else {**message, "weight": weight}
            for entry, weight in zip(read, weights, strict=True)
            for message in entry
        ]
        found = found if all(read) else []  # half of a conversation never counts as whole
    else:
        found = messages_of(value) or []
    if not found:
        raise DataError(f"{name}: expected a list of messages with role and content")
    return found


def _opening(messages: Sequence[JSON]) -> list[JSON]:
    """The messages before the first completion."""
    first = next((place for place, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
    return list(messages[:first])


def _listed(table: JSON, name: str, of: str) -> list[Any]:
    value = table.get(name)
    if not isinstance(value, list) or not value:
        raise DataError(f"{of}.{name}: expected a list of at least one entry")
    return value


def _without_nulls(table: JSON) -> JSON:
    return {name: value for name, value in table.items() if value is not None}
