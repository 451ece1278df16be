"""`agl serve --policy` as a person uses it: users in sessions with their own SDKs, an alias that moves, and kill -9.

The model is tiny and untrained: what counts is who answers, not what. Its versions are registered by the test.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from command_line import DEADLINE_S, Folder, until
from openai import OpenAI

from agentlightning.config.run import parse_config, run_record
from agentlightning.demo import tiny_model
from agentlightning.records import Rollout
from agentlightning.runtime.children import listen
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.models import ModelVersion
from agentlightning.store.open import open_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RUN = "serve-tiny-production"
SERVE = """
[serve]
alpha = 0.1
[model]
max_tokens = 8
"""


class ServedFolder:
    """A folder with two versions of a model, and the server that serves the one that `production` names."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.store = f"sqlite:///{folder.path}/agl.db"
        with listen("127.0.0.1", 0) as free:
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        folder.write("serve.toml", SERVE)
        asyncio.run(self._register())

    async def _register(self) -> None:
        models = [self.folder.path / f"v{number}" for number in (1, 2)]
        tiny_model.build(models[0], ["where is my parcel", "hello there"], vocabulary=100)
        shutil.copytree(models[0], models[1])
        table: dict[str, Any] = {
            "model": {"path": str(models[0])},
            "agent": {"run": "agent.py:solve"},
            "data": {"train": "train.jsonl"},
            "engine": {"device": "cpu"},
        }
        async with open_store(self.store) as store:
            run = await store.create_run("train", run_record(parse_config(table, "test")))
            for number, model in enumerate(models, 1):
                version = ModelVersion(
                    name="tiny",
                    number=0,
                    run_id=run.id,
                    policy="default",
                    step=number,
                    resource_version=number,
                    parent=None,
                    base_model=str(models[0]),
                    weights={"kind": "full", "url": f"file://{model}", "manifest_hash": None, "bytes": 1},
                )
                await store.register_model(version)
            await store.set_alias("tiny", "production", 1, {})

    def serve(self) -> subprocess.Popen[str]:
        """The server, once it serves."""
        words = ("serve", "--policy", "tiny@production", "--config", "serve.toml", "--store", self.store)
        with (self.folder.path / "serve.log").open("a") as log:
            before = log.tell()
            server = self.folder.start(*words, "--port", self.url.rpartition(":")[2], stdout=log, stderr=log)

        def serving() -> bool:
            text = (self.folder.path / "serve.log").read_text()[before:]
            assert server.poll() is None, text
            return "serving tiny@" in text

        until(serving, "the model is served", 2 * DEADLINE_S)
        return server

    def agl(self, *words: str) -> str:
        done = self.folder.run(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    async def rollouts(self) -> list[Rollout]:
        async with open_store(self.store) as store:
            return await sessions_of(store)


async def sessions_of(store: LightningStore) -> list[Rollout]:
    return await store.rollouts(RolloutQuery(run_id=RUN))


def gone(server: subprocess.Popen[str], path: Path) -> bool:
    """True once no process of the server is left: children end with their parent."""
    return server.poll() is not None and not Folder(path).processes()


def test_sessions_keep_their_version_through_promotion_and_kill_9(folder: Folder) -> None:
    served = ServedFolder(folder)
    server = served.serve()
    key = served.agl("tokens", "create", "--role", "client", "--run", RUN, "--server", served.url).split()[-1]
    posts = httpx.Client(base_url=f"{served.url}/v1", headers={"authorization": f"Bearer {key}"}, timeout=60)
    openai = OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=8)
    hello: Any = [{"role": "user", "content": "hello there"}]

    def ask(session: str) -> Any:
        return openai.chat.completions.create(
            model="tiny", messages=hello, extra_headers={"x-agl-session": session}, seed=1
        )

    first = ask("anna")
    assert first.usage.completion_tokens > 0
    stream = openai.responses.create(model="x", input="hello", user="anna", stream=True)
    assert [event.type for event in stream][-1] in ("response.completed", "response.incomplete")
    claude = Anthropic(base_url=served.url, api_key=key)
    message = claude.messages.create(model="x", max_tokens=4, messages=hello, metadata={"user_id": "anna"})
    assert message.usage.output_tokens > 0
    google = {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}
    reply = posts.post(
        f"{served.url}/v1beta/models/tiny:generateContent",
        json=google,
        headers={"x-goog-api-key": key, "x-agl-session": "anna"},
    )
    assert reply.status_code == 200, reply.text

    served.agl("models", "promote", "tiny@2", "production", "--store", served.url)

    def follows() -> bool:
        session = f"probe-{os.urandom(4).hex()}"
        ask(session)
        return bool(
            posts.post(f"/sessions/{session}/finish").json()["model"] == "tiny@2"
        )  # an open one keeps its version

    until(follows, "new sessions get the version that was promoted")
    assert posts.get("/sessions/anna").json()["model"] == "tiny@1"

    server.send_signal(signal.SIGKILL)
    until(lambda: gone(server, folder.path), "every process of the server has ended")
    server = served.serve()
    assert ask("anna").usage.completion_tokens > 0  # by version 1, which is served again for it
    assert posts.get("/sessions/anna").json() == {
        "object": "session",
        "id": "anna",
        "model": "tiny@1",
        "open": True,
        "reward": None,
    }
    assert posts.post("/sessions/anna/finish").json()["open"] is False
    late = posts.post("/sessions/anna/reward", json={"score": 1, "feedback": "it came"})
    assert late.json()["reward"] == 1.0
    released = "released tiny@1"
    until(lambda: released in (folder.path / "serve.log").read_text(), "the old version is released")
    for client in (posts, openai, claude):
        client.close()
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=DEADLINE_S) == 0

    found = asyncio.run(served.rollouts())
    anna = [one for one in found if one.task["session"] == "anna"]
    assert [(one.state, one.step, one.reward, one.calls) for one in anna] == [("succeeded", 1, 1.0, 5)]
    assert {one.step for one in found} == {1, 2}
