"""The input of a reward function: one finished rollout, whatever framework and language its agent is written in.

``reward(task: dict, result: RolloutResult) -> float | dict``. Built by the worker as an attempt ends, and again from the
store where rollouts are rescored: it holds nothing that is not recorded, so that a function which looks at nothing
else gives the same reward both times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import orjson

from agentlightning.adapters.conversations import conversations, full_messages
from agentlightning.adapters.trajectories import JUDGE, step_rewards
from agentlightning.records import JSON, Call, Reward, Span, with_completion
from agentlightning.store.scan import FEEDBACK
from agentlightning.tracing.tool_uses import CallStep, ToolExecution, call_steps, content_text


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """A finished rollout. Lists are in the order of time."""

    output: object = None
    """Return value of the agent, or the tail of what a program printed on its standard output. Of a rollout that is
    read from the store: what its program printed, else None, for what a function returned is not kept."""
    calls: list[Call]
    """The recorded model calls of the attempt, in the order they finished."""
    spans: list[Span] = field(default_factory=list)
    """The recorded spans of the attempt."""
    rewards: list[Reward] = field(default_factory=list)
    """Rewards that the agent emitted or posted."""

    @property
    def answer(self) -> str:
        """The text of the last call's completion; without a call, the output as text ('' for None)."""
        if self.calls:
            return content_text(self.calls[-1].completion.get("content"))
        return "" if self.output is None else str(self.output)

    @property
    def messages(self) -> list[JSON]:
        """The last call's conversation from its first message to its completion, in the form of Chat Completions."""
        return with_completion(full_messages(self.calls)[-1][0], self.calls[-1].completion) if self.calls else []

    @property
    def conversations(self) -> list[list[JSON]]:
        """Every conversation of the attempt as far as it went: sub-agents and parallel calls have their own."""
        return [row["messages"] for row in conversations(self.calls)]

    @property
    def steps(self) -> list[CallStep]:
        """Each call with what came of it: the tools it asked for, what they gave, whether they failed. What a later
        prompt and a span both tell is told once."""
        return call_steps(self.calls, self.spans)

    @property
    def tool_calls(self) -> list[ToolExecution]:
        """The tools of all steps: ``use.name``, ``use.arguments``, ``use.result`` and ``use.failed`` (None: not
        known)."""
        return [use for step in self.steps for use in step.tool_calls]

    @property
    def step_rewards(self) -> dict[str, dict[str, float]]:
        """Rewards on calls, by call and name; several of one name are summed."""
        return step_rewards(self.rewards)


def result_of(
    calls: Sequence[Call], spans: Sequence[Span], rewards: Sequence[Reward], attempt: int, output: object = None
) -> RolloutResult:
    """The result of one attempt, from records of its rollout. What a judge asked of it, and the feedback on it, are not the
    agent's."""
    return RolloutResult(
        output=output,
        calls=[call for call in calls if call.attempt == attempt and call.agent != JUDGE],
        spans=[span for span in spans if span.attempt == attempt and span.name != FEEDBACK],
        rewards=[one for one in rewards if one.attempt == attempt and one.source in ("emitted", "posted")],
    )


def as_json(task: JSON, result: RolloutResult) -> JSON:
    """Task and result for a program in any language: what ``reward.command`` reads from its standard input."""
    prompts = full_messages(result.calls)
    return {
        "task": task,
        "output": _plain(result.output),
        "answer": result.answer,
        "messages": result.messages,
        "conversations": result.conversations,
        "calls": [
            {
                "id": call.id,
                "agent": call.agent,
                "model": call.model,
                "messages": messages,
                "completion": call.completion,
                "finish_reason": call.finish_reason,
                "rewards": result.step_rewards.get(call.id, {}),
            }
            for call, (messages, _) in zip(result.calls, prompts, strict=True)
        ],
        "tool_calls": [
            {
                "call_id": step.call.id,
                "name": use.name,
                "arguments": use.arguments,
                "result": use.result,
                "failed": use.failed,
            }
            for step in result.steps
            for use in step.tool_calls
        ],
        "rewards": [{"name": one.name, "value": one.value, "call_id": one.call_id} for one in result.rewards],
    }


def _plain(output: object) -> object:
    """Returns what JSON can hold of an agent's return value: the value itself, else its text."""
    try:
        orjson.dumps(output)
    except orjson.JSONEncodeError:
        return str(output)
    return output
