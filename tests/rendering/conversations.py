"""Agents and an engine that are scripted: they hold conversations with the graph, and know what the engine saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentlightning.records import Call, Sampling
from agentlightning.rendering.completion_parser import CompletionParser, Piece
from agentlightning.rendering.conversation import Conversation, PromptPlan
from agentlightning.rendering.graph import RequestView
from agentlightning.rendering.renderer import Renderer

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


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """An answer's parts; tool calls as (name, arguments as they were written)."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[tuple[str, str], ...] = ()


def parsed(
    parser: CompletionParser,
    text: str,
    prompt: str = "",
    tools: list[dict[str, Any]] | None = None,
    parse_tools: bool = True,
) -> ParsedCompletion:
    """The parts of a whole answer after `prompt`."""
    splitter = parser.splitter(prompt, tools, parse_tools)
    return joined([splitter.feed(text), splitter.finish()])


def joined(pieces: list[Piece]) -> ParsedCompletion:
    """What an agent makes of the pieces."""
    calls: dict[int, tuple[str, str]] = {}
    for tool in (tool for piece in pieces for tool in piece.tools):
        name, arguments = calls.get(tool.index, ("", ""))
        assert (tool.name is not None) == (tool.index not in calls)
        calls[tool.index] = (tool.name or name, arguments + tool.arguments)
    reasoning = "".join(piece.reasoning for piece in pieces)
    return ParsedCompletion("".join(piece.content for piece in pieces), reasoning or None, tuple(calls.values()))


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
        answer = parsed(renderer.parser, text, plan.prompt_text, self.tools, bool(self.tools))
        message: Message = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            number = len(self.plans)
            message["tool_calls"] = [
                {
                    "id": f"c{number}" + "x" * index,
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for index, (name, arguments) in enumerate(answer.tool_calls)
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
