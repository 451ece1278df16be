"""Agents and an engine that are scripted: they hold conversations with the graph, and know what the engine saw."""

from __future__ import annotations

from typing import Any

from agentlightning.rendering.conversation import Conversation, PromptPlan, RequestView
from agentlightning.rendering.renderer import Renderer
from agentlightning.types import Call, Sampling

Message = dict[str, Any]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "does it",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer", "description": "how often"}}},
        },
    }
]


class Talk:
    """One agent that only appends, unless a test edits `messages`."""

    def __init__(
        self,
        renderer: Renderer,
        tools: list[dict[str, Any]] | None,
        messages: list[Message],
        conversation: Conversation | None = None,
        name: str = "",
    ) -> None:
        self.renderer = renderer
        self.tools = tools
        self.messages = messages
        self.conversation = conversation or Conversation(renderer)
        self.name = name
        self.plans: list[PromptPlan] = []
        self.sampled: list[list[int]] = []
        self.whole: dict[str, list[int]] = {}
        """Prompt and sampled ids of each call, as the engine saw them."""
        self.calls: list[Call] = []

    def turn(self, text: str | list[int], ended: bool = True) -> PromptPlan:
        """Ask, sample `text` (its ids, or an encoding of it), record, and append the answer as the agent would."""
        plan = self.conversation.plan(RequestView.of(self.messages, self.tools))
        ids = self.renderer.encode(text) if isinstance(text, str) else text
        if ended:
            ids = [*ids, next(iter(self.renderer.end_ids))]
        answer = self.parsed(plan, ids)
        call_id = f"{self.name}{len(self.plans)}"
        self.conversation.record(plan, call_id, ids, answer)
        self.plans.append(plan)
        self.sampled.append(ids)
        self.whole[call_id] = plan.prompt_ids + ids
        self.calls.append(as_call(self.conversation, plan, call_id, ids, answer, self.tools))
        self.messages = [*self.messages, answer]
        return plan

    def parsed(self, plan: PromptPlan, ids: list[int]) -> Message:
        """The answer as a message, as the gateway makes it."""
        renderer = self.renderer
        body, _ = renderer.split_end(ids)
        text = renderer.decode(body, special=renderer.parser.needs_special)
        parsed = renderer.parser.parse(text, plan.prompt_text, self.tools, bool(self.tools))
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.tool_calls:
            number = len(self.plans)
            message["tool_calls"] = [
                {
                    "id": f"c{number}" + "x" * index,
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for index, (name, arguments) in enumerate(parsed.tool_calls)
            ]
        return message


def as_call(
    conversation: Conversation,
    plan: PromptPlan,
    call_id: str,
    ids: list[int],
    answer: Message,
    tools: list[dict[str, Any]] | None = None,
    **fields: Any,
) -> Call:
    """What the gateway stores of a call."""
    given: dict[str, Any] = {
        "id": call_id,
        "run_id": "run",
        "rollout_id": "rollout",
        "attempt": 1,
        "parent_id": plan.parent.call_id if plan.parent else None,
        "suffix_ids": plan.suffix_ids,
        "sampled_ids": ids,
        "logprobs": [0.0] * len(ids),
        "versions": [],
        "prompt_tokens": len(plan.prompt_ids),
        "policy": "default",
        "model": "m",
        "protocol": "chat",
        "sampling": Sampling(),
        "history_hash": conversation.history_hash(plan, answer).hex(),
        "request_hash": plan.request_hash.hex(),
        "messages": plan.messages,
        "completion": answer,
        "tools": tools if plan.parent is None else None,
        "fork_cause": plan.fork_cause,
        "untrained_tokens": plan.untrained_tokens,
    }
    return Call(**(given | fields))
