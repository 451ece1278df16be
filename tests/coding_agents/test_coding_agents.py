"""Coding agents as shipped: their tools run for real, several turns, and every call continues the ids of the one before."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from agent_house import AGAIN, DONE, NAMES, SHELLS, TASK, WELCOME, AgentHouse, node_program, python_program

from agentlightning.adapters.side_calls import side_calls

pytestmark = pytest.mark.slow

YOLO = {"qwen-code": ("--auth-type", "openai", "--yolo"), "gemini-cli": ("-m", "policy", "--yolo")}


def words(agent_house: AgentHouse, name: str, again: bool) -> Sequence[str]:
    """The arguments by which an agent does its first task, or goes on from there, without questions."""
    prompt = AGAIN if again else TASK
    match name:
        case "claude-code":
            return (*(("--continue",) if again else ()), "-p", prompt, "--model", "policy", "--allowedTools", "Bash")
        case "codex":
            return (*agent_house.codex_exec(), *(("resume", "--last") if again else ()), prompt)
        case "opencode":
            return ("run", *(("--continue",) if again else ("--title", "a title")), prompt)
        case "qwen-code":
            return (*YOLO[name], *(("--continue",) if again else ()), "-p", prompt)
    return (*YOLO[name], *(("--resume", "latest") if again else ()), "-p", prompt)


@pytest.mark.parametrize("name", NAMES)
async def test_every_call_of_two_turns_continues_the_one_before(agent_house: AgentHouse, name: str) -> None:
    program, tool, arguments = SHELLS[name]
    agent = node_program(program)
    agent_house.shell_turns(tool, arguments)
    variables = agent_house.variables() | agent_house.configure(name)
    if name in ("codex", "gemini-cli"):
        await agent_house.drop_unsupported()
    assert DONE in await agent_house.run(agent, *words(agent_house, name, again=False), **variables)
    await agent_house.check_capture()
    assert await agent_house.forks() == []
    assert WELCOME in await agent_house.run(agent, *words(agent_house, name, again=True), **variables)
    agent_house.check_work()
    assert len(await agent_house.calls()) >= 4
    if name == "qwen-code":
        assert "history_edited" in await agent_house.forks()  # it sends its history otherwise than it had it
    elif name != "gemini-cli":
        assert await agent_house.forks() == []


@pytest.mark.long
async def test_the_title_that_opencode_asks_for_is_beside_the_task(agent_house: AgentHouse) -> None:
    opencode = node_program("opencode")
    agent_house.shell_turns(*SHELLS["opencode"][1:])
    assert DONE in await agent_house.run(opencode, "run", TASK, **agent_house.configure("opencode"))
    assert list(side_calls(await agent_house.calls()).values()) == ["title"]
    await agent_house.check_capture()


TOOLS = """\
import subprocess


def shell(command: str) -> str:
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout
"""


@pytest.mark.long
async def test_llm(agent_house: AgentHouse) -> None:
    llm = python_program("llm", "llm")
    agent_house.shell_turns("shell", {"command": ""})
    (agent_house.folder / "tools.py").write_text(TOOLS)
    model = {"model_id": "policy", "model_name": "policy", "api_base": agent_house.place.base_url}
    model |= {"api_key_name": "openai", "supports_tools": True}
    (agent_house.home / "extra-openai-models.yaml").write_text(json.dumps([model]))
    variables = {"LLM_USER_PATH": str(agent_house.home), "OPENAI_API_KEY": agent_house.place.key}
    tools = ("--functions", "tools.py")
    assert DONE in await agent_house.run(llm, "-m", "policy", *tools, TASK, **variables)
    assert WELCOME in await agent_house.run(llm, "--continue", *tools, AGAIN, **variables)
    agent_house.check_work()
    assert [call.continuation for call in await agent_house.calls()] == ["first_turn", *["continued"] * 3]
    assert WELCOME in await agent_house.run(llm, "--continue", AGAIN, **variables)
    assert await agent_house.forks() == ["system_or_tools_changed"]  # it forgot the tools


WRONG, RIGHT = "return sum(ages) / 3", "return sum(ages) / len(ages)"


def search_and_replace(search: str, replace: str) -> str:
    """An edit of ages.py in aider's format `diff`."""
    return f"ages.py\n```python\n<<<<<<< SEARCH\n    {search}\n=======\n    {replace}\n>>>>>>> REPLACE\n```\n"


@pytest.mark.long
async def test_aider_edits_a_repository_and_writes_every_prompt_anew(agent_house: AgentHouse) -> None:
    aider = python_program("aider", "aider")
    ages = agent_house.folder / "ages.py"
    ages.write_text(f"def mean(ages):\n    {WRONG}\n")
    await agent_house.run("git", "init", "--quiet")
    agent_house.answers = [
        ("commit message", "fix: the mean"),
        ("Say SECOND", f"ages.py\n```\ndef mean(ages):\n    {RIGHT}  # of any number\n```\n"),
        ("failed to match", search_and_replace(WRONG, RIGHT)),
        ("Say FIRST", search_and_replace("return mean", RIGHT)),
    ]
    (agent_house.home / "model.json").write_text(json.dumps({"openai/policy": {"max_input_tokens": 32_000}}))
    options = (
        *("--model", "openai/policy", "--model-metadata-file", str(agent_house.home / "model.json"), "--yes-always"),
        *("--analytics-disable", "--no-check-update", "--no-show-model-warnings"),
    )
    variables = {"OPENAI_BASE_URL": agent_house.place.base_url, "OPENAI_API_KEY": agent_house.place.key}
    diff = ("--edit-format", "diff", "--no-auto-commits", "--message", "The mean is wrong. Say FIRST.")
    await agent_house.run(aider, *options, *diff, "ages.py", **variables)
    assert ages.read_text() == f"def mean(ages):\n    {RIGHT}\n"
    assert await agent_house.forks() == ["history_cut"]  # the edit did not fit, and was asked for again
    whole = ("--edit-format", "whole", "--restore-chat-history", "--message", "Comment it. Say SECOND.")
    await agent_house.run(aider, *options, *whole, "ages.py", **variables)
    assert ages.read_text() == f"def mean(ages):\n    {RIGHT}  # of any number\n"
    assert "fix: the mean" in await agent_house.run("git", "log", "--oneline")
    assert len(await agent_house.calls()) == 5  # three edits, and messages of two commits
    assert "continued" not in [call.continuation for call in await agent_house.calls()]
