"""The pages of frameworks that stand beside the package: their code, as printed, on a real gateway."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import Folder
from pages import EXAMPLES, FOLDER, Page, page
from stage import Played, open_stage, tool_call

AGENTS = {
    "openai-sdk": None,
    "anthropic-sdk": None,
    "langgraph": "think",
    "openai-agents": "assistant",
    "autogen": "assistant",
}
"""The name of the agent that the calls of a page are recorded with: its framework's."""


def speaker(role: str, text: str) -> str:
    """Looks the city up, then says what it read."""
    if role == "tool":
        return f"{text} people live there."
    return tool_call("population", city="Oslo")


def check_population(played: Played) -> None:
    """Two calls, the second of which read the tool's result and continues the first."""
    played.check("first_turn", "continued")
    assert [call.finish_reason for call in played.calls] == ["tool_calls", "stop"]
    assert ["717710" in message["content"] for message in played.messages if message["role"] == "tool"] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
async def test_the_agent_of_the_page_is_recorded_and_rewarded(folder: Folder, name: str) -> None:
    async with open_stage(folder, speaker) as stage:
        played = await stage.play(page(name))
    check_population(played)
    assert {call.agent for call in played.calls} == {AGENTS[name]}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.md")), ids=lambda path: path.stem)
def test_what_a_page_says_to_change_stands_in_its_files(path: Path) -> None:
    shown = {line.strip() for body in Page(path).files.values() for line in body.splitlines()}
    assert Page(path).changed
    absent = [line for line in Page(path).changed if not any(each.startswith(line) for each in shown)]
    if any(language == "shell" for language, _ in Page(path).blocks):  # commands have more options in the whole agent
        variables = [word for line in absent for word in re.findall(r"AGL_MODEL|OPENAI_\w+", line)]
        absent = [word for word in variables if not any(word in line for line in shown)]
    assert absent == []


def test_the_index_links_to_every_agent() -> None:
    index = FOLDER.with_suffix(".md").read_text(encoding="utf-8")
    assert [path.name for path in FOLDER.glob("*.md") if f"(agents/{path.name})" not in index] == []
    assert [path.name for path in EXAMPLES.iterdir() if f"(../examples/agents/{path.name}/" not in index] == []


@pytest.mark.slow
@pytest.mark.long
async def test_reflection_of_autogen_is_a_fork_as_its_page_says(folder: Folder) -> None:
    printed = page("autogen").files["agent.py"]
    reflecting = printed.replace(
        "reflect_on_tool_use=False,\n        max_tool_iterations=4", "reflect_on_tool_use=True"
    )
    async with open_stage(folder, speaker) as stage:
        played = await stage.play(page("autogen"), {"agent.py": reflecting})
    played.check("first_turn", "system_or_tools_changed")
