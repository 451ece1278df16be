"""Random agents on one key: they append, edit one thing, or cut; every plan must be exact or name what was done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conversations import TOOLS, Talk
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_templates import HERMES

from agentlightning.rendering.conversation import Conversation
from agentlightning.rendering.graph import RequestView
from agentlightning.rendering.renderer import Renderer

CAUSES = {
    "system": "system_or_tools_changed",
    "user": "history_edited",
    "assistant": "assistant_message_edited",
    "tool": "tool_result_rewritten",
}

steps = st.tuples(
    st.integers(0, 3),
    st.sampled_from(["append", "append", "append", "edit", "cut", "tools"]),
    st.integers(0, 99),
    st.integers(0, 99),
    st.booleans(),
)


@pytest.fixture(scope="module")
def hermes(make_renderer: Callable[..., Renderer]) -> Renderer:
    return make_renderer(HERMES)


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(steps, min_size=4, max_size=24))
def test_every_plan_is_exact_or_names_what_the_agent_did(
    hermes: Renderer, steps: list[tuple[int, str, int, int, bool]]
) -> None:
    renderer = hermes
    conversation = Conversation(renderer)
    whole: dict[str, list[int]] = {}
    agents = [
        Talk(renderer, TOOLS, [_message("system", "s"), _message("user", f"task {name}")], conversation, f"{name}-")
        for name in range(4)
    ]
    for number, (which, act, first, second, calls) in enumerate(steps):
        agent = agents[which]
        expected = _do(agent, act, first, second, number)
        text = f"answer {number}"
        if calls:
            text += f'<tool_call>{{"name":"f",  "arguments": {{"n":{number}}}}}</tool_call>'
        plan = agent.turn([index for letter in text for index in renderer.encode(letter)])
        assert plan.fork_cause == expected
        before = whole[plan.parent.call_id] if plan.parent else []
        assert plan.prompt_ids == before + plan.suffix_ids
        whole.update(agent.whole)
        assert (plan.untrained_tokens > 0) == (expected is not None)  # the last answer always stays
        called = agent.messages[-1].get("tool_calls")
        result = {"role": "tool", "tool_call_id": called[0]["id"]} if called else {"role": "user"}
        agent.messages.append({**result, "content": f"next {number}"})
    rebuilt = Conversation(renderer, [call for agent in agents for call in agent.calls])
    for agent in agents:
        plan, again = (
            conversation.plan(RequestView.of(agent.messages, agent.tools)),
            rebuilt.plan(RequestView.of(agent.messages, agent.tools)),
        )
        assert (plan.prompt_ids, plan.fork_cause, plan.untrained_tokens) == (
            again.prompt_ids,
            again.fork_cause,
            again.untrained_tokens,
        )


def _do(agent: Talk, act: str, first: int, second: int, number: int) -> str | None:
    """Change the agent's history; the cause that the next plan must name."""
    answers = [at for at, message in enumerate(agent.messages) if message["role"] == "assistant"]
    if not answers or act == "append":
        return None
    last = answers[-1]
    if act == "tools":
        agent.tools = None if agent.tools else TOOLS
        return "system_or_tools_changed"
    at = first % (last + 1)
    if act == "edit":
        agent.messages[at] = {**agent.messages[at], "content": f"edited {number}"}
        return CAUSES[agent.messages[at]["role"]]
    start = max(at, 1)
    end = start + 1 + second % 5
    if end > last:
        return None
    del agent.messages[start:end]
    return "history_cut"


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
