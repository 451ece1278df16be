"""Sub-agents of coding agents are named by the headers that those send of themselves."""

from __future__ import annotations

import pytest
from gateway_house import House, path

HI = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("headers", "agent"),
    [
        ({"x-claude-code-agent-id": "explore-1"}, "explore-1"),
        ({"x-claude-code-agent-type": "Explore", "x-claude-code-agent-id": "explore-1"}, "Explore"),
        ({"x-openai-subagent": "review"}, "review"),
        ({"x-openai-subagent": "review", "x-agl-agent": "mine"}, "mine"),
        ({"x-openai-subagent": "review", "baggage": "agl.agent=theirs"}, "theirs"),
        ({"x-claude-code-agent-id": "a" * 500}, "a" * 200),
        ({"x-claude-code-agent-id": "a\u0085b"}, "ab"),
        ({"x-claude-code-agent-id": "  "}, None),
    ],
)
async def test_a_sub_agent_has_the_name_of_its_header(house: House, headers: dict[str, str], agent: str | None) -> None:
    claim = await house.claim()
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    await house.http().post(f"{path(claim)}/v1/chat/completions", json=HI, headers=encoded)
    (call,) = await house.store.calls([claim.rollout.id])
    assert call.agent == agent
