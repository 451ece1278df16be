"""OpenEnv's TrainingTrace: a rollout as one JSON object of turns with exact token ids, log-probabilities and loss masks.

The contract is `openenv.core.harness.training` (schema version 1): a turn per model call, each with its whole prompt.
Unknown fields are refused, so what it has no field for stands in a turn's `metadata`. Task rewards are not part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentlightning.adapters.conversations import full_messages
from agentlightning.errors import DataError
from agentlightning.records import JSON, Call, Reward, Rollout
from agentlightning.rendering.call_chain import call_chain, chain_prompt_ids
from agentlightning.traces.episode import (
    OWN,
    Episode,
    ModelCall,
    call_facts,
    call_tokens,
    episode,
    rollout_facts,
    trained_mask,
)


def write_training_trace(rollout: Rollout, calls: Sequence[Call], rewards: Sequence[Reward]) -> JSON:
    """The trace of a rollout's calls that have tokens; the first turn's metadata holds the rollout's own facts."""
    by_id = {call.id: call for call in calls}
    turns: list[JSON] = []
    for call, (messages, tools) in zip(calls, full_messages(calls), strict=True):
        if not call.sampled_ids:
            continue
        prompt = chain_prompt_ids(call_chain(call, by_id))
        facts = call_facts(call) | ({} if turns else {"rollout": rollout_facts(rollout, rewards)})
        turns.append(
            {
                "node_id": call.id,
                "prompt_token_ids": prompt,
                "completion_token_ids": call.sampled_ids,
                "per_token_logps": [min(0.0, one) for one in call.logprobs],
                "loss_mask": [0] * len(prompt) + trained_mask(call),
                "request": {"model": call.model, "messages": messages, "tools": tools},
                "response": {"choices": [{"message": call.completion, "finish_reason": call.finish_reason}]},
                "metadata": {OWN: facts},
            }
        )
    return {"schema_version": 1, "turns": turns}


def is_training_trace(row: JSON) -> bool:
    return "turns" in row and row.get("schema_version", 1) == 1


def read_training_trace(row: JSON) -> list[Episode]:
    """The episode of a trace, of whatever producer. DataError for a turn that is not of the contract."""
    turns = row["turns"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise DataError("turns: expected a list of objects")
    calls = [_call(turn, f"turns[{place}]") for place, turn in enumerate(turns)]
    facts: JSON = next((own["rollout"] for turn in turns if "rollout" in (own := _own(turn))), {})
    return [episode(calls, facts, (calls[0].messages or []) if calls else [])]


def _own(turn: JSON) -> JSON:
    metadata = turn.get("metadata")
    found = metadata.get(OWN) if isinstance(metadata, dict) else None
    return found if isinstance(found, dict) else {}


def _call(turn: JSON, place: str) -> ModelCall:
    prompt, mask, own = turn.get("prompt_token_ids"), turn.get("loss_mask"), _own(turn)
    if not isinstance(prompt, list) or not isinstance(mask, list):
        raise DataError(f"{place}: expected prompt_token_ids and loss_mask as lists")
    metadata: JSON = turn.get("metadata") or {}
    request: JSON = turn.get("request") or {}
    asked = metadata.get("sampling_params") or {}
    facts = {"temperature": asked["temperature"]} if isinstance(asked.get("temperature"), int | float) else {}
    tokens = call_tokens(
        str(turn.get("node_id") or place),
        prompt,
        turn.get("completion_token_ids"),
        turn.get("per_token_logps"),
        facts | own,
        mask[len(prompt) :],
    )
    choice = _choice(turn.get("response"))
    started, finished = own.get("times_ns", (0, 0))
    return ModelCall(
        agent=own.get("agent"),
        model=str(request.get("model") or metadata.get("model") or ""),
        messages=request.get("messages") or [],
        completion=choice.get("message") or {"role": "assistant", "content": ""},
        tools=request.get("tools") or None,
        finish_reason=str(choice.get("finish_reason") or "stop"),
        tokens=tokens,
        started_ns=started,
        finished_ns=finished,
    )


def _choice(response: Any) -> JSON:
    choices = response.get("choices") if isinstance(response, dict) else None
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
