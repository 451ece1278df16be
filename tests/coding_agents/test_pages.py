"""The agents of the pages of docs/agents that run a coding agent, as printed, behind a model that does the task."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from agent_house import DONE, PROGRAMS, AgentHouse, node_program, tool_call

sys.path.append(str(Path(__file__).parents[1] / "frameworks"))  # what reads a page

from pages import page

pytestmark = pytest.mark.slow

SHELLS = {
    "claude-code": ("claude", "Bash", {"command": "", "description": "run"}),
    "codex": ("codex", "exec_command", {"cmd": ""}),
    "opencode": ("opencode", "bash", {"command": "", "description": "run"}),
    "qwen-code": ("qwen", "run_shell_command", {"command": "", "is_background": False}),
    "gemini-cli": ("gemini", "run_shell_command", {"command": ""}),
}
QUICK = ("claude-code", "codex")
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in SHELLS]


@pytest.mark.parametrize("name", NAMES)
async def test_the_agent_of_the_page_does_the_task(agent_house: AgentHouse, name: str) -> None:
    program, tool, arguments = SHELLS[name]
    node_program(program)
    printed = page(name)
    if "agent.unsupported_params=drop" in printed.command:
        await agent_house.drop_unsupported()
    (agent_house.folder / "node_modules").symlink_to(PROGRAMS.parent)
    printed.write(agent_house.folder)
    task = agent_house.folder / "task.json"
    task.write_text(printed.files["tasks.jsonl"].splitlines()[0])
    command = {next(iter(arguments)): "echo hello > greeting.txt && echo wrote-it"}
    agent_house.answers = [
        ("wrote-it", DONE),
        ("greeting.txt", tool_call(tool, {**arguments, **command})),
    ]
    out = await agent_house.run("bash", "agent.sh", AGL_TASK=str(task), **agent_house.variables())
    assert json.loads(out.splitlines()[-1]) == {"reward": 1}
    assert len(await agent_house.calls()) == 2
    assert await agent_house.forks() == []
