"""ATIF, Harbor's Agent Trajectory Interchange Format (v1.7): a rollout as one JSON document of steps.

A document is one conversation. A rollout that has several holds the others as `subagent_trajectories`, in which steps that
an earlier one has already are marked as copied context. Unknown fields are refused; what the format has no field for
stands in its `extra` fields, and a message that its fields do not give back exactly stands there as it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from agentlightning.errors import DataError
from agentlightning.records import JSON, Call, Reward, Rollout, with_completion
from agentlightning.rendering.call_chain import call_chain, chain_prompt_ids, chain_tools
from agentlightning.traces.episode import (
    OWN,
    CallTokens,
    Episode,
    ModelCall,
    call_facts,
    call_tokens,
    episode,
    rollout_facts,
    trained_mask,
)

VERSION = "ATIF-v1.7"
SOURCES = {"system": "system", "developer": "system", "assistant": "agent"}
"""A step's source by the message's role; other roles are the user."""


def write_atif(rollout: Rollout, calls: Sequence[Call], rewards: Sequence[Reward]) -> JSON:
    """The document of a rollout; without steps, which the format does not allow, where it has no call."""
    by_id = {call.id: call for call in calls}
    continued = {call.parent_id for call in calls}
    places = {call.id: place for place, call in enumerate(calls)}
    written: set[str] = set()
    documents: list[JSON] = []
    for last in calls:
        if last.id in continued:
            continue
        chain = call_chain(last, by_id)
        name = f"{rollout.id}-{len(documents)}" if documents else rollout.id
        agent: JSON = {"name": last.agent or "agent", "version": "unknown", "model_name": last.model}
        if tools := chain_tools(chain):
            agent["tool_definitions"] = tools
        steps = _steps(chain, places, written)
        documents.append(
            {"schema_version": VERSION, "session_id": rollout.id, "trajectory_id": name, "agent": agent, "steps": steps}
        )
    document = documents[0] if documents else {"schema_version": VERSION, "session_id": rollout.id, "steps": []}
    totals = {
        "total_prompt_tokens": sum(call.prompt_tokens for call in calls),
        "total_completion_tokens": sum(len(call.sampled_ids) for call in calls),
    }
    document |= {"final_metrics": totals, "extra": {OWN: rollout_facts(rollout, rewards)}}
    return document | ({"subagent_trajectories": documents[1:]} if documents[1:] else {})


def is_atif(row: JSON) -> bool:
    return str(row.get("schema_version", "")).startswith("ATIF-v") and "steps" in row


def read_atif(row: JSON) -> list[Episode]:
    """The episode of a document, of whatever producer. Calls without token ids have text alone."""
    found = [one for document in _documents(row) for one in _calls(document)]
    calls = [call for _, call in sorted(found, key=lambda pair: pair[0])]
    opening = (calls[0].messages or []) if calls else []
    own = (row.get("extra") or {}).get(OWN) or {"reward": (row.get("extra") or {}).get("reward")}
    return [episode(calls, own, opening)]


def _documents(row: JSON) -> Iterator[JSON]:
    yield row
    for one in row.get("subagent_trajectories") or ():
        yield from _documents(one)


# --- writing ----------------------------------------------------------------------------------------------------------


def _steps(chain: Sequence[Call], places: dict[str, int], written: set[str]) -> list[JSON]:
    """Steps of a conversation; calls that are in `written` are copied context, and the others are added to it."""
    by_id = {call.id: call for call in chain}
    steps: list[JSON] = []
    for call in chain:
        copied = call.id in written
        written.add(call.id)
        whole = with_completion(call.messages, call.completion)
        for message in whole[:-1]:
            _add(steps, message, copied)
        step = _step(whole[-1])
        step |= {"llm_call_count": 1, "model_name": call.model, "timestamp": _time(call.finished_ns)}
        facts = call_facts(call) | {"id": call.id, "place": places[call.id], "finish_reason": call.finish_reason}
        if whole[-1] != call.completion:
            facts |= {"prefill": call.messages[-1], "completion": call.completion}
        metrics: JSON = {"prompt_tokens": call.prompt_tokens, "completion_tokens": len(call.sampled_ids)}
        if call.sampled_ids:
            metrics["prompt_token_ids"] = chain_prompt_ids(call_chain(call, by_id))
            metrics |= {"completion_token_ids": call.sampled_ids, "logprobs": call.logprobs}
        step["metrics"] = metrics | {"extra": {OWN: facts, "loss_mask": trained_mask(call)}}
        if copied:
            step["is_copied_context"] = True
        steps.append(step)
    for place, step in enumerate(steps, 1):
        step["step_id"] = place
        if not step["extra"]:
            del step["extra"]
    return steps


def _add(steps: list[JSON], message: JSON, copied: bool) -> None:
    """A tool's result belongs to the step that called it, if that is the last one."""
    asked = {call["tool_call_id"] for call in steps[-1].get("tool_calls", ())} if steps else set[str]()
    if message.get("role") == "tool" and message.get("tool_call_id") in asked:
        result: JSON = {"source_call_id": message["tool_call_id"], "content": _text(message.get("content"))}
        if _result(result) != message:
            result["extra"] = {"message": message}
        steps[-1].setdefault("observation", {"results": []})["results"].append(result)
        return
    step = _step(message)
    if step["source"] == "agent":
        step["llm_call_count"] = 0  # nobody sampled it here
        if step.pop("reasoning_content", None) is not None:
            step["extra"]["message"] = message
    if copied:
        step["is_copied_context"] = True
    steps.append(step)


def _step(message: JSON) -> JSON:
    step: JSON = {
        "source": SOURCES.get(str(message.get("role")), "user"),
        "message": _text(message.get("content")),
        "extra": {},
    }
    if step["source"] == "agent":
        if calls := [_tool_call(one) for one in message.get("tool_calls") or ()]:
            step["tool_calls"] = calls
        if isinstance(reasoning := message.get("reasoning_content"), str):
            step["reasoning_content"] = reasoning
    if _message(step) != message:
        step["extra"]["message"] = message
    return step


def _tool_call(call: JSON) -> JSON:
    function = call.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except ValueError:
        arguments = None
    return {
        "tool_call_id": str(call.get("id") or ""),
        "function_name": str(function.get("name") or ""),
        "arguments": arguments if isinstance(arguments, dict) else {},
    }


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _time(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat()


# --- reading ----------------------------------------------------------------------------------------------------------


def _calls(document: JSON) -> Iterator[tuple[int, ModelCall]]:
    """Calls of a document with their places in the rollout, -1 for a document without them."""
    steps, agent = document.get("steps"), document.get("agent") or {}
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise DataError("steps: expected a list of objects")
    messages: list[JSON] = []
    for number, step in enumerate(steps, 1):
        message = _message(step)
        sampled = step.get("source") == "agent" and step.get("llm_call_count") != 0
        if sampled and not step.get("is_copied_context"):
            own = ((step.get("metrics") or {}).get("extra") or {}).get(OWN) or {}
            started, finished = own.get("times_ns", (0, 0))
            yield (
                own.get("place", -1),
                ModelCall(
                    agent=own.get("agent"),
                    model=str(step.get("model_name") or agent.get("model_name") or ""),
                    messages=[*messages, *([own["prefill"]] if "prefill" in own else [])],
                    completion=own.get("completion") or message,
                    tools=agent.get("tool_definitions") or None,
                    finish_reason=own.get("finish_reason") or ("tool_calls" if step.get("tool_calls") else "stop"),
                    tokens=_tokens(step, own, f"step {number}"),
                    started_ns=started,
                    finished_ns=finished,
                ),
            )
        messages.append(message)
        messages += [_result(one) for one in (step.get("observation") or {}).get("results") or ()]


def _tokens(step: JSON, own: JSON, place: str) -> CallTokens | None:
    metrics: JSON = step.get("metrics") or {}
    if any(metrics.get(name) is None for name in ("prompt_token_ids", "completion_token_ids", "logprobs")):
        return None
    return call_tokens(
        str(own.get("id") or place),
        metrics["prompt_token_ids"],
        metrics["completion_token_ids"],
        metrics["logprobs"],
        own,
        (metrics.get("extra") or {}).get("loss_mask"),
    )


def _message(step: JSON) -> JSON:
    """The message of a step, as it was where its extra fields hold it."""
    if exact := (step.get("extra") or {}).get("message"):
        return dict(exact)
    role = {"agent": "assistant"}.get(step.get("source", ""), step.get("source", "user"))
    calls = [
        {
            "id": call["tool_call_id"],
            "type": "function",
            "function": {"name": call["function_name"], "arguments": json.dumps(call["arguments"])},
        }
        for call in step.get("tool_calls") or ()
    ]
    message: JSON = {"role": role, "content": _text(step.get("message")) or (None if calls else "")}
    if calls:
        message["tool_calls"] = calls
    if step.get("reasoning_content") is not None:
        message["reasoning_content"] = step["reasoning_content"]
    return message


def _result(result: JSON) -> JSON:
    if exact := (result.get("extra") or {}).get("message"):
        return dict(exact)
    content = _text(result.get("content"))
    if result.get("source_call_id") is None:
        return {"role": "user", "content": content}
    return {"role": "tool", "tool_call_id": result["source_call_id"], "content": content}
