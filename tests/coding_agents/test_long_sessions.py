"""Long sessions of coding agents as shipped: ten turns with tools, a sub-agent and a compaction; no call is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from agent_house import AgentHouse, node_program, tool_call

from agentlightning.store.gateway_events import FAILED_CALLS, REFUSED_CALLS, UNKNOWN_ROUTE

pytestmark = [pytest.mark.slow, pytest.mark.long]

SUB_TASK, SUB_DONE = "Work as a sub-agent.", "The sub-agent is done."
SUMMARY = "The session so far: files were written."


def command(number: int) -> str:
    return f"echo {number} > turn-{number}.txt && echo wrote-turn-{number}-it"


async def check_sub_agent(agent_house: AgentHouse, name: str) -> None:
    """The sub-agent's two calls have its name and are a conversation of their own."""
    named = [call.continuation for call in await agent_house.calls() if call.agent == name]
    assert named == ["first_turn", "continued"]


async def check(agent_house: AgentHouse, turns: Sequence[int], sub_agent: str) -> None:
    """Each turn's tool ran, and every call was answered and recorded."""
    await check_sub_agent(agent_house, sub_agent)
    assert [(agent_house.folder / f"turn-{number}.txt").read_text().strip() for number in turns] == [
        str(number) for number in turns
    ]
    calls = await agent_house.calls()
    assert len(calls) >= 2 * len(turns)
    assert [call.finish_reason for call in calls if call.finish_reason not in ("stop", "tool_calls")] == []
    spans = await agent_house.house.store.spans([agent_house.place.rollout_id])
    assert [span for span in spans if span.name in (REFUSED_CALLS, FAILED_CALLS, UNKNOWN_ROUTE)] == []


def check_compaction(agent_house: AgentHouse) -> None:
    """The last turn's prompt has the summary in place of the first turns."""
    prompt = agent_house.house.renderer.decode(agent_house.house.engine.requests[-1]["token_ids"], special=True)
    assert SUMMARY in prompt
    assert "wrote-turn-3-it" not in prompt


async def test_ten_turns_of_claude_code(agent_house: AgentHouse) -> None:
    claude = node_program("claude")
    begin = {"description": "work", "prompt": SUB_TASK, "subagent_type": "general-purpose"}

    def bash(number: int) -> str:
        return tool_call("Bash", {"command": command(number), "description": "run"})

    agent_house.answers = [
        ("followed by a <summary> block", f"<summary>{SUMMARY}</summary>"),
        ("launched successfully", "I wait."),
        (SUB_DONE, "All is done."),
        ("wrote-turn-2-it", SUB_DONE),
        (SUB_TASK, bash(2)),
        ("Do turn 2.", tool_call("Agent", begin)),
        *((f"wrote-turn-{number}-it", f"Turn {number} is done.") for number in range(1, 11)),
        *((f"Do turn {number}.", bash(number)) for number in range(10, 0, -1)),
    ]
    options = ("--model", "policy", "--allowedTools", "Bash", "Agent")
    variables = agent_house.variables() | agent_house.configure("claude-code")
    for number in range(1, 11):
        prompt = "/compact" if number == 8 else f"Do turn {number}."
        await agent_house.run(claude, "-p", prompt, *options, *(("--continue",) if number > 1 else ()), **variables)
    check_compaction(agent_house)
    await check(agent_house, (*range(1, 8), 9, 10), "general-purpose")


def compaction_limit(agent_house: AgentHouse) -> tuple[str, str]:
    """Makes Codex compact once: halfway between the first prompt, which it cannot go below, and the last one."""
    lengths = [len(request["token_ids"]) for request in agent_house.house.engine.requests]
    return "-c", f"model_auto_compact_token_limit={(lengths[0] + lengths[-1]) // 2}"


async def test_ten_turns_of_codex(agent_house: AgentHouse) -> None:
    codex = node_program("codex")
    await agent_house.drop_unsupported()

    def wait(result: str) -> str:
        return tool_call("multi_agent_v1__wait_agent", {"targets": re.findall(r'"agent_id":"([0-9a-f-]+)', result)})

    turns = {number: tool_call("exec_command", {"cmd": command(number)}) for number in range(1, 11)}
    turns[2] = tool_call("multi_agent_v1__spawn_agent", {"message": SUB_TASK})
    agent_house.answers = [
        ("CONTEXT CHECKPOINT", SUMMARY),
        (SUB_DONE, "All is done."),
        ('"agent_id":', wait),
        ("wrote-turn-2-it", SUB_DONE),
        (SUB_TASK, tool_call("exec_command", {"cmd": command(2)})),
        *((f"wrote-turn-{number}-it", f"Turn {number} is done.") for number in range(1, 11)),
        *((f"Do turn {number}.", turns[number]) for number in reversed(turns)),  # a compacted prompt has the last two
    ]
    start, key = agent_house.codex_exec(), {"OPENAI_API_KEY": agent_house.place.key}
    for number in range(1, 11):
        resume = ("resume", "--last") if number > 1 else ()
        limit = compaction_limit(agent_house) if number == 8 else ()
        await agent_house.run(codex, *start, *limit, *resume, f"Do turn {number}.", **key)
    check_compaction(agent_house)
    await check(agent_house, range(1, 11), "collab_spawn")


async def test_sub_agents_of_opencode_have_the_name_that_its_configuration_gives(agent_house: AgentHouse) -> None:
    opencode = node_program("opencode")
    variables = agent_house.configure(
        "opencode",
        {"general": {"id": "policy", "headers": {"x-agl-agent": "general"}}},
        agent={"general": {"model": "agl/general"}},
    )
    agent_house.answers = [
        (SUB_DONE, "All is done."),
        ("wrote-turn-1-it", SUB_DONE),
        (SUB_TASK, tool_call("bash", {"command": command(1), "description": "run"})),
        ("Say FIRST", tool_call("task", {"description": "work", "prompt": SUB_TASK, "subagent_type": "general"})),
    ]
    out = await agent_house.run(opencode, "run", "--title", "a title", "Use a sub-agent. Say FIRST.", **variables)
    assert "All is done." in out
    assert (agent_house.folder / "turn-1.txt").exists()
    await check_sub_agent(agent_house, "general")
    assert await agent_house.forks() == []
