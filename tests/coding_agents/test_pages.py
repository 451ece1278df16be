"""The agents of the pages of docs/agents that run a coding agent, as printed, behind a model that does the task."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from agent_house import DONE, PROGRAMS, SHELLS, AgentHouse, node_program, python_program, tool_call

sys.path.append(str(Path(__file__).parents[1] / "frameworks"))  # what reads a page

from pages import Page, page

pytestmark = [pytest.mark.slow, pytest.mark.long]

PAGES = SHELLS | {"llm": ("llm", "shell", {"command": ""})}
PYTHON = ("llm", "aider")


@pytest.mark.parametrize("name", PAGES)
async def test_the_agent_of_the_page_does_the_task(agent_house: AgentHouse, name: str) -> None:
    program, tool, arguments = PAGES[name]
    printed = write_page(agent_house, name, program)
    if "agent.unsupported_params=drop" in printed.command:
        await agent_house.drop_unsupported()
    command = {next(iter(arguments)): "echo hello > greeting.txt && echo wrote-it"}
    agent_house.answers = [("wrote-it", DONE), ("greeting.txt", tool_call(tool, {**arguments, **command}))]
    await check_reward(agent_house)
    assert len(await agent_house.calls()) == 2
    assert await agent_house.forks() == []


async def test_aider_of_the_page_mends_its_repository(agent_house: AgentHouse) -> None:
    write_page(agent_house, "aider", "aider")
    edit = "<<<<<<< SEARCH\n    return sum(ages) / 3\n=======\n    return sum(ages) / len(ages)\n>>>>>>> REPLACE"
    agent_house.answers = [("the mean is wrong", f"ages.py\n```python\n{edit}\n```\n")]
    await check_reward(agent_house)
    assert len(await agent_house.calls()) == 1


async def test_what_the_model_gets_wrong_is_no_failure_of_llm(agent_house: AgentHouse) -> None:
    write_page(agent_house, "llm", "llm")
    agent_house.answers = [("greeting.txt", '<tool_call>\n{"name": "shell", "arguments": {"command": \n</tool_call>')]
    await check_reward(agent_house, 0)


def write_page(agent_house: AgentHouse, name: str, program: str) -> Page:
    """The page, with its files, its first task and the program where who follows it has them."""
    folder = agent_house.folder
    if name in PYTHON:
        (folder / "agent-venv").symlink_to(Path(python_program(program, name)).parents[1])
    else:
        node_program(program)
        (folder / "node_modules").symlink_to(PROGRAMS.parent)
    printed = page(name)
    printed.write(folder)
    (folder / "task.json").write_text(printed.files["tasks.jsonl"].splitlines()[0])
    return printed


async def check_reward(agent_house: AgentHouse, reward: int = 1) -> None:
    """The page's program ends with this reward."""
    task = str(agent_house.folder / "task.json")
    out = await agent_house.run("bash", "agent.sh", AGL_TASK=task, **agent_house.variables())
    assert json.loads(out.splitlines()[-1]) == {"reward": reward}
