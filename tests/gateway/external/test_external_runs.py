"""Runs whose agents ask an external model: gateway, store and workers, no engine, and no torch in any process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from external_server import ExternalServer

import build
from agentlightning.records import Call, Rollout
from agentlightning.store.base import RolloutQuery
from agentlightning.store.open import open_store

CONFIG = """
[model]
path = "external:hosted"

[external.hosted]
url = "{url}"
protocol = "{protocol}"
models = ["*-5", "small-1"]
key_env = "HOSTED_KEY"

[agent]
run = "agent.py:solve"
workers = 1
concurrency = 2

[data]
train = "tasks.jsonl"
val = "tasks.jsonl"

[prompts.templates]
system = "Be brief."

[[prompts.rules]]
template = "system"
agents = ["*"]
"""
AGENTS = {
    "openai": """
async def solve(task, llm):
    messages = [{"role": "user", "content": task["question"]}]
    reply = await llm.async_openai().chat.completions.create(model=llm.model, messages=messages, temperature=0.3)
    return float("sunny" in reply.choices[0].message.content)
""",
    "anthropic": """
async def solve(task, llm):
    messages = [{"role": "user", "content": task["question"]}]
    reply = await llm.async_anthropic().messages.create(model=llm.model, messages=messages, max_tokens=9)
    return float("sunny" in reply.content[0].text)
""",
}
BLOCKED = """
import os
with open(os.environ["TORCH_IMPORTS"], "a") as told:
    told.write(f"{os.getpid()}\\n")
raise ImportError("no torch here")
"""


@pytest.fixture
async def external() -> AsyncIterator[ExternalServer]:
    server = await ExternalServer().start()
    yield server
    await server.close()


def prepare(folder: Path, url: str, protocol: str = "openai") -> None:
    (folder / "run.toml").write_text(CONFIG.format(url=url, protocol=protocol))
    (folder / "agent.py").write_text(AGENTS[protocol])
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"question": f"q{n}"}) + "\n" for n in range(2)))
    (folder / "blocked" / "torch").mkdir(parents=True)
    (folder / "blocked" / "torch" / "__init__.py").write_text(BLOCKED)


async def agl(folder: Path, *words: str) -> str:
    """Runs a command without torch; returns all that it printed."""
    environment = {
        **os.environ,
        "AGL_STORE": f"sqlite:///{folder}/agl.db",
        "HOSTED_KEY": "sk-secret",
        "PYTHONPATH": str(folder / "blocked"),
        "TORCH_IMPORTS": str(folder / "torch_imports"),
    }
    command = [sys.executable, "-m", "agentlightning", *words]
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, env=environment, **pipes)
    printed = (await asyncio.wait_for(process.communicate(), 300))[0].decode()
    assert process.returncode == 0, printed
    assert not (folder / "torch_imports").exists(), "a process imported torch"
    return printed


async def recorded(folder: Path) -> list[tuple[Rollout, list[Call]]]:
    async with open_store(f"sqlite:///{folder}/agl.db") as store:
        rollouts = [one for run in await store.runs() for one in await store.rollouts(RolloutQuery(run_id=run.id))]
        return [(one, await store.calls([one.id])) for one in rollouts]


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "key"), [("openai", "authorization"), ("anthropic", "x-api-key")])
async def test_an_agent_over_a_hosted_model_is_evaluated_without_torch(
    tmp_path: Path, external: ExternalServer, protocol: str, key: str
) -> None:
    prepare(tmp_path, external.url, protocol)
    printed = await agl(tmp_path, "eval", "run.toml")
    assert json.loads(printed.splitlines()[-1]) == {"target": "run.toml", "as_asked": 1.0}
    found = await recorded(tmp_path)
    assert [(one.state, one.reward, len(calls)) for one, calls in found] == [("succeeded", 1.0, 1)] * 2
    assert {call.model for _, calls in found for call in calls} == {"small-1"}
    assert {seen.headers[key].removeprefix("Bearer ") for seen in external.requests} == {"sk-secret"}
    assert all(b"Be brief." in seen.body for seen in external.requests)
    if protocol == "anthropic":
        return
    assert {seen.json["temperature"] for seen in external.requests} == {0.3}
    run = found[0][0].run_id
    (tmp_path / "better.txt").write_text("Think first.")
    await agl(tmp_path, "prompts", "add", run, "system", "better.txt")
    words = ("prompts", "test", run, "system@1", "system@2", "--json")
    tested: dict[str, Any] = json.loads((await agl(tmp_path, *words)).splitlines()[-1])
    assert [(one["version"], one["calls"]) for one in tested["figures"]] == [("system@1", 2), ("system@2", 2)]
    assert sum(b"Think first." in seen.body for seen in external.requests) == 2


def test_nothing_is_trained_on_an_external_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, "http://127.0.0.1:9/v1")
    monkeypatch.chdir(tmp_path)
    ended = build.agl("train", "run.toml", "--store", f"sqlite:///{tmp_path}/agl.db")
    assert "model.path: expected a model that can be trained, got 'external:hosted'" in str(ended.exception)
