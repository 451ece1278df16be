"""Coding agents as shipped: their tools run for real, several turns, and every call continues the ids of the one before."""

from __future__ import annotations

import json

import pytest
from agent_house import AGAIN, DONE, TASK, WELCOME, AgentHouse, node_program, python_program

from agentlightning.adapters.side_calls import side_calls

pytestmark = pytest.mark.slow


async def test_claude_code(agent_house: AgentHouse) -> None:
    claude = node_program("claude")
    agent_house.shell_turns("Bash", "command", description="run")
    variables = agent_house.claude_variables()
    options = ("--model", "policy", "--allowedTools", "Bash")
    assert DONE in await agent_house.run(claude, "-p", TASK, *options, **variables)
    await agent_house.check_capture()
    assert WELCOME in await agent_house.run(claude, "-p", AGAIN, "--continue", *options, **variables)
    agent_house.check_work()
    assert len(await agent_house.calls()) >= 4
    assert await agent_house.forks() == []


async def test_codex(agent_house: AgentHouse) -> None:
    codex = node_program("codex")
    await agent_house.drop_unsupported()
    agent_house.shell_turns("exec_command", "cmd")
    start = agent_house.codex_exec()
    key = {"OPENAI_API_KEY": agent_house.place.key}
    assert DONE in await agent_house.run(codex, *start, TASK, **key)
    await agent_house.check_capture()
    assert WELCOME in await agent_house.run(codex, *start, "resume", "--last", AGAIN, **key)
    agent_house.check_work()
    assert len(await agent_house.calls()) == 4
    assert await agent_house.forks() == []


@pytest.mark.long
async def test_opencode(agent_house: AgentHouse) -> None:
    opencode = node_program("opencode")
    agent_house.shell_turns("bash", "command", description="run")
    variables = agent_house.configure_opencode()
    assert DONE in await agent_house.run(opencode, "run", "--title", "a title", TASK, **variables)
    await agent_house.check_capture()
    assert WELCOME in await agent_house.run(opencode, "run", "--continue", AGAIN, **variables)
    agent_house.check_work()
    assert await agent_house.forks() == []


@pytest.mark.long
async def test_the_title_that_opencode_asks_for_is_beside_the_task(agent_house: AgentHouse) -> None:
    opencode = node_program("opencode")
    agent_house.shell_turns("bash", "command", description="run")
    assert DONE in await agent_house.run(opencode, "run", TASK, **agent_house.configure_opencode())
    assert list(side_calls(await agent_house.calls()).values()) == ["title"]
    await agent_house.check_capture()


@pytest.mark.long
async def test_qwen_code(agent_house: AgentHouse) -> None:
    qwen = node_program("qwen")
    agent_house.shell_turns("run_shell_command", "command", is_background=False)
    variables = {
        "OPENAI_BASE_URL": agent_house.place.base_url,
        "OPENAI_API_KEY": agent_house.place.key,
        "OPENAI_MODEL": "policy",
    }
    options = ("--auth-type", "openai", "--yolo")
    assert DONE in await agent_house.run(qwen, *options, "-p", TASK, **variables)
    await agent_house.check_capture()
    assert await agent_house.forks() == []
    assert WELCOME in await agent_house.run(qwen, *options, "--continue", "-p", AGAIN, **variables)
    agent_house.check_work()
    assert "history_edited" in await agent_house.forks()  # it sends its history otherwise than it had it


@pytest.mark.long
async def test_gemini_cli(agent_house: AgentHouse) -> None:
    gemini = node_program("gemini")
    await agent_house.drop_unsupported()
    agent_house.shell_turns("run_shell_command", "command")
    variables = {
        "GOOGLE_GEMINI_BASE_URL": agent_house.place.anthropic_base_url,
        "GEMINI_API_KEY": agent_house.place.key,
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
    }
    settings = agent_house.home / ".gemini" / "settings.json"
    settings.parent.mkdir()
    settings.write_text(json.dumps({"security": {"auth": {"selectedType": "gemini-api-key"}}}))
    options = ("-m", "policy", "--yolo")
    assert DONE in await agent_house.run(gemini, *options, "-p", TASK, **variables)
    await agent_house.check_capture()
    assert await agent_house.forks() == []
    assert WELCOME in await agent_house.run(gemini, *options, "--resume", "latest", "-p", AGAIN, **variables)
    agent_house.check_work()


TOOLS = """\
import subprocess


def shell(command: str) -> str:
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout
"""


async def test_llm(agent_house: AgentHouse) -> None:
    llm = python_program("llm", "llm")
    agent_house.shell_turns("shell", "command")
    (agent_house.folder / "tools.py").write_text(TOOLS)
    model = {
        "model_id": "policy",
        "model_name": "policy",
        "api_base": agent_house.place.base_url,
        "api_key_name": "openai",
        "supports_tools": True,
    }
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
