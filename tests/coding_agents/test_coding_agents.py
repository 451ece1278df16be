"""Coding agents as shipped: their tools run for real, several turns, and every call continues the ids of the one before."""

from __future__ import annotations

import json

import pytest
from agent_house import AGAIN, DONE, TASK, WELCOME, AgentHouse, node_program

pytestmark = pytest.mark.slow


async def test_claude_code(agent_house: AgentHouse) -> None:
    claude = node_program("claude")
    agent_house.shell_turns("Bash", "command", description="run")
    variables = {
        "ANTHROPIC_BASE_URL": agent_house.place.anthropic_base_url,
        "ANTHROPIC_API_KEY": agent_house.place.key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    options = ("--model", "policy", "--allowedTools", "Bash")
    assert DONE in await agent_house.run(claude, "-p", TASK, *options, **variables)
    assert WELCOME in await agent_house.run(claude, "-p", AGAIN, "--continue", *options, **variables)
    agent_house.check_work()
    assert len(await agent_house.calls()) >= 4
    assert await agent_house.forks() == []


async def test_codex(agent_house: AgentHouse) -> None:
    codex = node_program("codex")
    await agent_house.drop_unsupported()
    agent_house.shell_turns("exec_command", "cmd")
    provider = (
        f'model_providers.agl={{name="agl",base_url="{agent_house.place.base_url}",env_key="OPENAI_API_KEY",'
        'wire_api="responses"}'
    )
    options = ("-c", provider, "-c", "model_provider=agl", "-c", "model=policy")
    start = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *options)
    key = {"OPENAI_API_KEY": agent_house.place.key}
    assert DONE in await agent_house.run(codex, *start, TASK, **key)
    assert WELCOME in await agent_house.run(codex, *start, "resume", "--last", AGAIN, **key)
    agent_house.check_work()
    assert len(await agent_house.calls()) == 4
    assert await agent_house.forks() == []


@pytest.mark.long
async def test_opencode(agent_house: AgentHouse) -> None:
    opencode = node_program("opencode")
    agent_house.shell_turns("bash", "command", description="run")
    model = {"name": "policy", "tool_call": True, "limit": {"context": 200_000, "output": 8_000}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": agent_house.place.base_url, "apiKey": agent_house.place.key},
        "models": {"policy": model},
    }
    settings = {
        "provider": {"agl": provider},
        "model": "agl/policy",
        "permission": {"bash": "allow"},
        "share": "disabled",
    }
    (agent_house.folder / "opencode.json").write_text(json.dumps(settings))
    variables = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    assert DONE in await agent_house.run(opencode, "run", "--title", "a title", TASK, **variables)
    assert WELCOME in await agent_house.run(opencode, "run", "--continue", AGAIN, **variables)
    agent_house.check_work()
    assert await agent_house.forks() == []


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
    assert await agent_house.forks() == []
    assert WELCOME in await agent_house.run(gemini, *options, "--resume", "latest", "-p", AGAIN, **variables)
    agent_house.check_work()
