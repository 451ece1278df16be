"""A rollout as one OpenTelemetry trace: a root span, model calls as GenAI `chat` spans, and what the agent's program sent.

Driven by exporters.py. Pure: the same record makes the same trace, ids and all, so that sending it again adds nothing where
ids are looked at. Names of attributes are those of OpenTelemetry's GenAI semantic conventions, and of OpenInference beside
them (Phoenix reads nothing else); what they have no name for begins with ``agl.``. Each span has

    root    agl.run_id, agl.rollout_id, agl.attempt, agl.mode, agl.step, agl.group_id, agl.outcome, agl.reward,
            agl.rewards.NAME; the task is its input, the last completion its output
    call    gen_ai.request.model, .usage.input_tokens, .usage.output_tokens, .input.messages, .output.messages, .agent.name;
            agl.call_id, agl.policy, agl.policy_version, agl.fork_cause, agl.rewards.NAME (step rewards)
    others  as they were recorded; their own trace is agl.trace_id, a root among them is the root's child
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from agentlightning.records import ABANDONED, JSON, Call, Reward, Rollout, Span
from agentlightning.rendering.call_chain import call_chain, chain_prompt, chain_tools
from agentlightning.tracing.otlp import hex_of


def trace_of(rollout: Rollout, calls: Sequence[Call], spans: Iterable[Span], rewards: Iterable[Reward]) -> list[Span]:
    """The spans of the rollout's latest attempt, its root first. `calls` in the order they finished."""
    told = [reward for reward in rewards if reward.attempt == rollout.attempt]
    own = [span for span in spans if span.attempt == rollout.attempt]
    trace_id = _digest(rollout.id, str(rollout.attempt), size=16)
    root = _root(rollout, calls, told, trace_id)
    known = {span.id: f"{rollout.id}.{rollout.attempt}.{_span_digits(span.id)}" for span in own}
    by_id = {call.id: call for call in calls}
    chats = [
        replace(
            _chat(call, by_id, told, root.started_ns),
            trace_id=trace_id,
            parent_id=known.get(call.span_id or "", root.id),
        )
        for call in calls
    ]
    others = [
        replace(
            span,
            id=known[span.id],
            trace_id=trace_id,
            parent_id=known.get(span.parent_id or "", root.id),
            attributes=span.attributes | ({"agl.trace_id": span.trace_id} if span.trace_id else {}),
        )
        for span in own
    ]
    return [root, *chats, *others]


def resource_of(run_name: str) -> JSON:
    """Attributes of the resource of a run's traces; Phoenix and Langfuse sort by them."""
    return {"service.name": "agentlightning", "openinference.project.name": run_name or "agentlightning"}


def _root(rollout: Rollout, calls: Sequence[Call], rewards: Sequence[Reward], trace_id: str) -> Span:
    ends = [call.finished_ns for call in calls]
    started_ns = rollout.started_ns or rollout.created_ns
    attributes: JSON = {
        "openinference.span.kind": "AGENT",
        "gen_ai.operation.name": "invoke_agent",
        "session.id": rollout.run_id,
        "agl.run_id": rollout.run_id,
        "agl.rollout_id": rollout.id,
        "agl.attempt": rollout.attempt,
        "agl.mode": rollout.mode,
        "agl.step": rollout.step,
        "agl.group_id": rollout.group_id,
        "input.value": _json(rollout.task),
        "input.mime_type": "application/json",
        **_rewards(reward for reward in rewards if reward.call_id is None),
    }
    if calls:
        attributes["output.value"] = _text(calls[-1].completion.get("content"))
    for name, value in (
        ("agl.reward", rollout.reward),
        ("agl.outcome", rollout.outcome),
        ("agl.warning", rollout.warning),
    ):
        if value is not None:
            attributes[name] = value
    return Span(
        id=f"{rollout.id}.{rollout.attempt}.{_digest(rollout.id, str(rollout.attempt), 'root', size=8)}",
        run_id=rollout.run_id,
        rollout_id=rollout.id,
        attempt=rollout.attempt,
        name="rollout",
        attributes=attributes,
        started_ns=started_ns,
        finished_ns=max([started_ns, *ends, rollout.finished_ns or 0]),
        trace_id=trace_id,
        status="ok" if rollout.state == "succeeded" else "error",
        status_message=(rollout.error or rollout.state) if rollout.state != "succeeded" else "",
    )


def _chat(call: Call, by_id: Mapping[str, Call], rewards: Sequence[Reward], default_ns: int) -> Span:
    """default_ns: time of a call that has none, since it was imported from a conversation."""
    chain = call_chain(call, by_id)
    prompt = chain_prompt(chain)
    model = call.model or call.policy
    asked, sampled = call.prompt_tokens, len(call.sampled_ids)
    if not call.policy:
        asked, sampled = int(call.usage.get("prompt_tokens") or 0), int(call.usage.get("sampled_tokens") or 0)
    attributes: JSON = {
        "openinference.span.kind": "LLM",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "agentlightning",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": call.id,
        "gen_ai.response.finish_reasons": [call.finish_reason],
        "gen_ai.request.temperature": call.sampling.temperature,
        "gen_ai.request.top_p": call.sampling.top_p,
        "gen_ai.usage.input_tokens": asked,
        "gen_ai.usage.output_tokens": sampled,
        "gen_ai.input.messages": _json([_parts(message) for message in prompt]),
        "gen_ai.output.messages": _json([_parts(call.completion) | {"finish_reason": call.finish_reason}]),
        "llm.model_name": model,
        "llm.token_count.prompt": asked,
        "llm.token_count.completion": sampled,
        "llm.token_count.total": asked + sampled,
        "output.value": _text(call.completion.get("content")),
        "agl.call_id": call.id,
        "agl.protocol": call.protocol,
        "agl.continuation": call.continuation,
        **_flat("llm.input_messages", prompt),
        **_flat("llm.output_messages", [call.completion]),
        **_rewards(reward for reward in rewards if reward.call_id == call.id),
    }
    if call.sampling.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = call.sampling.max_tokens
    if call.agent:
        attributes["gen_ai.agent.name"] = call.agent
    if call.policy:
        attributes["agl.policy"] = call.policy
    if call.versions:
        attributes["agl.policy_version"] = call.versions[-1].version
    if tools := chain_tools(chain):
        attributes["gen_ai.tool.definitions"] = _json(tools)
    return Span(
        id=f"{call.rollout_id}.{call.attempt}.{_digest(call.id, size=8)}",
        run_id=call.run_id,
        rollout_id=call.rollout_id,
        attempt=call.attempt,
        name=f"chat {model}",
        attributes=attributes,
        started_ns=call.started_ns or default_ns,
        finished_ns=call.finished_ns or default_ns,
        kind="client",
        status="error" if call.finish_reason == ABANDONED else "unset",
    )


def _parts(message: JSON) -> JSON:
    """A message of ours in the form of the GenAI conventions."""
    role = str(message.get("role", ""))
    content = message.get("content")
    if role == "tool":
        reply = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}
        return {"role": role, "parts": [reply]}
    parts: list[JSON] = []
    if message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": message["reasoning_content"]})
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str) and text:
            parts.append({"type": "text", "content": text})
        elif isinstance(part, dict):
            parts.append(part)
    for tool_call in message.get("tool_calls") or ():
        function = tool_call.get("function") or {}
        named = {"id": tool_call.get("id"), "name": function.get("name"), "arguments": function.get("arguments")}
        parts.append({"type": "tool_call", **named})
    return {"role": role, "parts": parts}


def _flat(prefix: str, messages: Sequence[JSON]) -> JSON:
    """Messages as OpenInference flattens them."""
    found: JSON = {}
    for place, message in enumerate(messages):
        at = f"{prefix}.{place}.message"
        found[f"{at}.role"] = str(message.get("role", ""))
        if content := _text(message.get("content")):
            found[f"{at}.content"] = content
        if message.get("tool_call_id"):
            found[f"{at}.tool_call_id"] = str(message["tool_call_id"])
        for number, tool_call in enumerate(message.get("tool_calls") or ()):
            function = tool_call.get("function") or {}
            of = f"{at}.tool_calls.{number}.tool_call"
            found[f"{of}.id"] = str(tool_call.get("id", ""))
            found[f"{of}.function.name"] = str(function.get("name", ""))
            found[f"{of}.function.arguments"] = _text(function.get("arguments"))
    return found


def _rewards(rewards: Iterable[Reward]) -> JSON:
    return {f"agl.rewards.{reward.name}": reward.value for reward in rewards}


def _span_digits(span_id: str) -> str:
    return hex_of(span_id) or _digest(span_id, size=8)


def _digest(*parts: str, size: int) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=size).hexdigest()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else _json(value)


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
