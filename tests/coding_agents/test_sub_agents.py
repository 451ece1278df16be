"""Sub-agents of coding agents as shipped: their calls have their names, and are conversations of their own."""

from __future__ import annotations

import re

import pytest
from agent_house import AgentHouse, node_program, tool_call

pytestmark = [pytest.mark.slow, pytest.mark.long]

TASK = "Use a sub-agent. Say FIRST."
SUB_TASK = "Work as a sub-agent."
SUB_DONE, DONE = "The sub-agent is done.", "All is done."
COMMAND = "echo hello > greeting.txt && echo wrote-it"


async def check(agent_house: AgentHouse, name: str) -> None:
    """The sub-agent worked, and its two calls have its name; the main agent's have another, and nothing forked."""
    agent_house.check_work()
    calls = await agent_house.calls()
    named = [call for call in calls if call.agent == name]
    assert [(call.agent, call.continuation) for call in named] == [(name, "first_turn"), (name, "continued")]
    assert [call.continuation for call in calls if call.agent != name][:2] == ["first_turn", "continued"]
    assert await agent_house.forks() == []


async def test_sub_agents_of_claude_code_have_the_name_of_their_type(agent_house: AgentHouse) -> None:
    claude = node_program("claude")
    begin = {"description": "work", "prompt": SUB_TASK, "subagent_type": "general-purpose"}
    agent_house.answers = [
        ("launched successfully", "I wait."),
        (SUB_DONE, DONE),
        ("wrote-it", SUB_DONE),
        (SUB_TASK, tool_call("Bash", {"command": COMMAND, "description": "run"})),
        ("Say FIRST", tool_call("Agent", begin)),
    ]
    options = ("--model", "policy", "--allowedTools", "Bash", "Agent")
    hints = {"CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1"}
    assert DONE in await agent_house.run(claude, "-p", TASK, *options, **agent_house.claude_variables(), **hints)
    await check(agent_house, "general-purpose")


async def test_sub_agents_of_codex_have_the_name_that_it_sends(agent_house: AgentHouse) -> None:
    codex = node_program("codex")
    await agent_house.drop_unsupported()

    def wait(result: str) -> str:
        """Waits for the sub-agent that the tool's result names."""
        return tool_call("multi_agent_v1__wait_agent", {"targets": re.findall(r'"agent_id":"([0-9a-f-]+)', result)})

    agent_house.answers = [
        (SUB_DONE, DONE),
        ('"agent_id":', wait),
        ("wrote-it", SUB_DONE),
        (SUB_TASK, tool_call("exec_command", {"cmd": COMMAND})),
        ("Say FIRST", tool_call("multi_agent_v1__spawn_agent", {"message": SUB_TASK})),
    ]
    out = await agent_house.run(codex, *agent_house.codex_exec(), TASK, OPENAI_API_KEY=agent_house.place.key)
    assert DONE in out
    await check(agent_house, "collab_spawn")


async def test_sub_agents_of_opencode_have_the_name_that_its_configuration_gives(agent_house: AgentHouse) -> None:
    opencode = node_program("opencode")
    variables = agent_house.configure_opencode(
        {"general": {"id": "policy", "headers": {"x-agl-agent": "general"}}},
        agent={"general": {"model": "agl/general"}},
    )
    agent_house.answers = [
        (SUB_DONE, DONE),
        ("wrote-it", SUB_DONE),
        (SUB_TASK, tool_call("bash", {"command": COMMAND, "description": "run"})),
        ("Say FIRST", tool_call("task", {"description": "work", "prompt": SUB_TASK, "subagent_type": "general"})),
    ]
    assert DONE in await agent_house.run(opencode, "run", "--title", "a title", TASK, **variables)
    await check(agent_house, "general")
