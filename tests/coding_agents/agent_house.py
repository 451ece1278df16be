"""Coding agents as shipped, run in a folder of their own against a real gateway whose model says what a test scripted."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "sdk"))  # its gateway with a scripted model
sys.path.append(str(Path(__file__).parents[1] / "clients"))  # OpenEnv's checks

import openenv_capture
from sdk_house import END, Place, SdkHouse, open_house

from agentlightning.records import Call, Resource

PROGRAMS = Path(__file__).parent / "node_modules" / ".bin"
ENVIRONMENTS = Path(__file__).parents[2]

TASK = "Write hello into greeting.txt, then read it. Say FIRST."
AGAIN = "Thank you. Say SECOND."
DONE, WELCOME = "The file says hello.", "You are welcome."
WRITE = "echo hello > greeting.txt && echo wrote-it"
READ = "cat greeting.txt && echo read-it"

SHELLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "claude-code": ("claude", "Bash", {"command": "", "description": "run"}),
    "codex": ("codex", "exec_command", {"cmd": ""}),
    "opencode": ("opencode", "bash", {"command": "", "description": "run"}),
    "qwen-code": ("qwen", "run_shell_command", {"command": "", "is_background": False}),
    "gemini-cli": ("gemini", "run_shell_command", {"command": ""}),
}
"""By page: its program, its tool that runs shell commands, and that tool's arguments, the command first."""
NAMES = [pytest.param(name, marks=() if name in ("claude-code", "codex") else pytest.mark.long) for name in SHELLS]
"""CI has two of them."""

RUN_TIMEOUT_S = 600.0
LEASE_S = 3600.0
"""Nobody renews it: longer than any of these tests."""


def tool_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A tool call as the scripted model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def node_program(name: str) -> str:
    """The path of an agent from the lock of this folder; without it the test is left out."""
    program = PROGRAMS / name
    if shutil.which("node") is None or not program.exists():
        pytest.skip(f"needs {name}: `make test-coding-agents` installs it where npm is there")
    return str(program)


def python_program(name: str, environment: str) -> str:
    """The path of an agent in an environment of its own; without it the test is left out."""
    folder = ENVIRONMENTS / f".venv-frameworks-{environment}"
    if not (folder / ".installed").exists():
        pytest.skip(f"needs {name}: `make test-coding-agents` installs it")
    return str(folder / "bin" / name)


@dataclass
class AgentHouse:
    """A gateway, one attempt, and an empty folder in which an agent works."""

    house: SdkHouse
    place: Place
    folder: Path
    home: Path
    answers: list[tuple[str, str | Callable[[str], str]]] = field(default_factory=list)
    """(what the messages since the last completion contain, what the model then says of them), the first that fits."""

    def shell_turns(self, tool: str, arguments: Mapping[str, Any]) -> None:
        """Script two shell commands and an answer, then an answer to the second turn."""
        argument = next(iter(arguments))
        self.answers = [
            ("Say SECOND", WELCOME),
            ("read-it", DONE),
            ("wrote-it", tool_call(tool, {**arguments, argument: READ})),
            ("Say FIRST", tool_call(tool, {**arguments, argument: WRITE})),
        ]

    def answer(self, request: dict[str, Any]) -> list[int]:
        """The ids of what the model says next."""
        prompt = self.house.renderer.decode(request["token_ids"], special=True)
        last = prompt.rsplit("<|im_start|>assistant", 2)[-2]
        text = next((answer for needle, answer in self.answers if needle in last), "OK.")
        return [*self.house.renderer.encode(text if isinstance(text, str) else text(last)), END]

    async def run(self, *command: str, **variables: str) -> str:
        """The output of a program that was run in the folder as a user would, with a home of its own."""
        environment = {name: os.environ[name] for name in ("PATH", "LANG", "SSL_CERT_FILE") if name in os.environ}
        environment |= {"HOME": str(self.home), "NO_PROXY": "*", "TERM": "dumb", "CI": "1"}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, cwd=self.folder, env=environment | variables, stdin=asyncio.subprocess.DEVNULL, stdout=pipe,
            stderr=pipe,
        )  # fmt: skip
        try:
            out, err = await asyncio.wait_for(process.communicate(), RUN_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            raise
        assert process.returncode == 0, (out + err).decode()[-3000:]
        return out.decode()

    def variables(self) -> dict[str, str]:
        """The variables that a command of a run gets."""
        return {
            "OPENAI_BASE_URL": self.place.base_url, "OPENAI_API_KEY": self.place.key, "AGL_MODEL": "policy",
            "ANTHROPIC_BASE_URL": self.place.anthropic_base_url, "ANTHROPIC_API_KEY": self.place.key,
            "GOOGLE_GEMINI_BASE_URL": self.place.anthropic_base_url, "GEMINI_API_KEY": self.place.key,
        }  # fmt: skip

    def codex_exec(self) -> tuple[str, ...]:
        """Words by which Codex runs without questions and finds the model; the key is in OPENAI_API_KEY."""
        provider = f'{{name="agl",base_url="{self.place.base_url}",env_key="OPENAI_API_KEY",wire_api="responses"}}'
        options = ("-c", f"model_providers.agl={provider}", "-c", "model_provider=agl", "-c", "model=policy")
        return ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *options)

    def configure(self, name: str, models: Mapping[str, Any] | None = None, **others: Any) -> dict[str, str]:
        """Write the configuration of an agent; returns the variables that it needs beside a run's."""
        if name == "claude-code":
            return {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1"}
        if name == "qwen-code":
            return {"OPENAI_MODEL": "policy"}
        if name == "gemini-cli":
            (self.home / ".gemini").mkdir()
            auth = {"security": {"auth": {"selectedType": "gemini-api-key"}}}
            (self.home / ".gemini" / "settings.json").write_text(json.dumps(auth))
            return {"GEMINI_CLI_TRUST_WORKSPACE": "true"}
        if name != "opencode":
            return {}
        model = {"name": "policy", "tool_call": True, "limit": {"context": 200_000, "output": 8_000}}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": self.place.base_url, "apiKey": self.place.key},
            "models": {"policy": model, **{name: {**model, **each} for name, each in (models or {}).items()}},
        }
        settings = {"provider": {"agl": provider}, "model": "agl/policy", "share": "disabled", **others}
        settings["permission"] = {"bash": "allow", "task": "allow"}
        (self.folder / "opencode.json").write_text(json.dumps(settings))
        return {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}

    async def drop_unsupported(self) -> None:
        """Let the run ignore what its policy does not support."""
        (resource,) = await self.house.store.resources(self.house.run_id)
        value = {**resource.value, "unsupported_params": "drop"}
        await self.house.store.put_resources(
            [Resource(run_id=self.house.run_id, name="default", kind="policy", value=value)]
        )

    async def calls(self) -> list[Call]:
        """What was recorded of the attempt."""
        return await self.house.calls(self.place)

    async def check_capture(self) -> None:
        """OpenEnv, where it is installed, finds nothing wrong with the record, and has the same calls for auxiliary."""
        if (openenv_capture.ENVIRONMENT / ".installed").exists():
            await openenv_capture.check_record(await self.calls())

    async def forks(self) -> list[str]:
        """Causes of the calls that continue no earlier one though they could."""
        return [call.fork_cause for call in await self.calls() if call.fork_cause is not None]

    def check_work(self) -> None:
        """The tools really ran."""
        assert (self.folder / "greeting.txt").read_text() == "hello\n"


@asynccontextmanager
async def open_agent_house(folder: Path) -> AsyncIterator[AgentHouse]:
    """Everything started, and ended with the block."""
    async with open_house(folder) as house:
        for name in ("work", "home"):
            (folder / name).mkdir()
        agents = AgentHouse(house, await house.place(LEASE_S), folder / "work", folder / "home")
        house.engine.answers = agents.answer
        house.engine.chunk = 50
        yield agents
