"""Episodes: rollouts as files of traces tell them, and what the forms that carry tokens say of a call and of a rollout.

Read by `episodes.py`, `training_trace.py` and `atif.py`, written into a store by `importer.py`. Other projects' forms have
free fields; under the key `OWN` these hold what the forms have no field for, so that nothing is lost there and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.adapters.trajectories import counts, final_rewards, step_rewards
from agentlightning.errors import DataError
from agentlightning.records import JSON, Call, Mode, Reward, Rollout, Span, VersionSpan
from agentlightning.store.rules import reward_number

OWN = "agentlightning"
"""Key of a free field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTokens:
    """The tokens of one call, as they were sampled."""

    id: str
    """Within the file."""
    prompt_ids: list[int]
    """The whole prompt."""
    sampled_ids: list[int]
    logprobs: list[float]
    temperature: float = 1.0
    policy: str = "default"
    versions: list[VersionSpan] = field(default_factory=list)
    decoding: JSON = field(default_factory=dict)
    delivered: bool = True
    parent: str | None = None
    """Id of the call that it continues, if the file has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One model call, as far as somebody recorded it."""

    span_id: str = ""
    agent: str | None = None
    model: str = ""
    messages: list[JSON] | None = None
    """The whole prompt in the form of Chat Completions."""
    completion: JSON | None = None
    """The assistant message."""
    tools: list[JSON] | None = None
    finish_reason: str = "stop"
    tokens: CallTokens | None = None
    """None: the record has text alone."""
    usage: JSON = field(default_factory=dict)
    """prompt_tokens and sampled_tokens, those that are known."""
    error: str | None = None
    started_ns: int = 0
    finished_ns: int = 0

    @property
    def missing(self) -> str | None:
        """The reason why it cannot be trained on; None where it can."""
        if self.error is not None:
            return "the call failed"
        if self.tokens is not None:
            return None
        if not self.messages:
            return "its prompt was not recorded"
        if self.completion is None or not (self.completion.get("content") or self.completion.get("tool_calls")):
            return "its answer was not recorded"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One rollout as a file tells it."""

    task: JSON
    """Equal for rollouts that may be compared: what the model was asked, unless the row names a task."""
    calls: list[ModelCall]
    spans: list[Span] = field(default_factory=list)
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    """Further final rewards by name."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """Rewards by name for each of `calls`; empty where the file has none."""
    mode: Mode = "train"
    """eval: of held-out tasks, which nothing learns from."""
    error: str | None = None
    """Reason why it failed as a whole; failures are not trained on."""


def call_facts(call: Call) -> JSON:
    """Facts of a call that other forms have no field for; `call_tokens` reads them."""
    facts: JSON = {
        "parent": call.parent_id,
        "policy": call.policy,
        "temperature": call.sampling.temperature,
        "versions": [[span.version, span.start, span.end] for span in call.versions],
        "times_ns": [call.started_ns, call.finished_ns],
    }
    if call.agent is not None:
        facts["agent"] = call.agent
    if call.decoding:
        facts["decoding"] = call.decoding
    return facts if call.delivered else facts | {"delivered": False}


def call_tokens(
    name: str, prompt_ids: Any, sampled_ids: Any, logprobs: Any, facts: JSON, mask: Sequence[int] | None = None
) -> CallTokens:
    """mask: of the sampled ids, 1 where one may be trained. DataError where the columns do not fit each other."""
    columns = {"prompt ids": prompt_ids, "completion ids": sampled_ids, "log-probabilities": logprobs}
    for what, column in columns.items():
        kinds = (int,) if what.endswith("ids") else (int, float)
        if not isinstance(column, list) or any(isinstance(one, bool) or not isinstance(one, kinds) for one in column):
            raise DataError(f"{name}: expected {what} as a list of numbers")
    if not prompt_ids or len(sampled_ids) != len(logprobs) or len(mask or sampled_ids) != len(sampled_ids):
        raise DataError(
            f"{name}: expected a prompt, and as many log-probabilities and masks as completion ids; got {len(prompt_ids)} "
            f"prompt ids, {len(sampled_ids)} completion ids, {len(logprobs)} log-probabilities"
        )
    decoding = facts.get("decoding") or {}
    sampled_here = facts.get("policy", "default") != "" and facts.get("delivered", True) is not False
    # Our own facts say all that a mask does but of a call that repeats another rollout's: nothing of it is trained.
    if mask is not None and sampled_here and ("policy" not in facts or not any(mask)):
        decoding = {**decoding, **({"forced": forced} if (forced := _stretches([not one for one in mask])) else {})}
    return CallTokens(
        id=name,
        prompt_ids=prompt_ids,
        sampled_ids=sampled_ids,
        logprobs=[float(one) for one in logprobs],
        temperature=float(facts.get("temperature", 1.0)),
        policy=str(facts.get("policy", "default")),
        versions=[
            VersionSpan(version=version, start=start, end=end) for version, start, end in facts.get("versions", ())
        ],
        decoding=decoding,
        delivered=facts.get("delivered", True) is not False,
        parent=facts.get("parent"),
    )


def trained_mask(call: Call) -> list[int]:
    """1 for each sampled id that may be trained, else 0."""
    mask = [int(call.learnable and bool(call.policy))] * len(call.sampled_ids)
    for start, end in call.decoding.get("forced", ()):
        mask[start:end] = [0] * len(mask[start:end])
    return mask


def _stretches(flags: Sequence[bool]) -> list[list[int]]:
    """[start, end) of each stretch of True.

    >>> _stretches([True, False, True, True])
    [[0, 1], [2, 4]]
    """
    edges = [at for at in range(len(flags) + 1) if (at > 0 and flags[at - 1]) != (at < len(flags) and flags[at])]
    return [list(pair) for pair in zip(edges[::2], edges[1::2], strict=True)]


def rollout_facts(rollout: Rollout, rewards: Iterable[Reward]) -> JSON:
    """Facts of a rollout that other forms have no field for; `episode` reads them."""
    counted = [one for one in rewards if one.attempt == rollout.attempt and counts(one, rollout)]
    facts: JSON = {"id": rollout.id, "task": rollout.task, "mode": rollout.mode, "reward": rollout.reward}
    named = {name: value for name, value in final_rewards(counted).items() if name != "reward"}
    error = (rollout.error or "failed") if rollout.state == "failed" else None
    more = {"rewards": named, "step_rewards": step_rewards(counted), "error": error}
    return facts | {name: value for name, value in more.items() if value}


def episode(calls: list[ModelCall], facts: JSON, opening: Sequence[JSON]) -> Episode:
    """The episode of these calls. opening: what the model was asked, which is the task where the facts name none."""
    task, steps = facts.get("task"), facts.get("step_rewards") or {}
    reward = facts.get("reward")
    of_calls = [steps.get(call.tokens.id, {}) if call.tokens is not None else {} for call in calls]
    return Episode(
        task=task if isinstance(task, dict) else {"messages": list(opening)},
        calls=calls,
        mode="eval" if facts.get("mode") == "eval" else "train",
        reward=None if reward is None else reward_number(reward),
        rewards={name: reward_number(value, name) for name, value in (facts.get("rewards") or {}).items()},
        steps=of_calls if any(of_calls) else [],
        error=facts.get("error"),
    )
