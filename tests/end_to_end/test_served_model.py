"""`agl serve --policy` as a person uses it: users in sessions with their own SDKs, an alias that moves, and kill -9.

The model is tiny and untrained: what counts is who answers, not what. Its versions are registered by the test.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from command_line import DEADLINE_S, Folder, until
from openai import OpenAI

from agentlightning.config.run import parse_config, run_record
from agentlightning.demo import tiny_model
from agentlightning.records import Resource, Rollout
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
            await store.set_alias("tiny", "production", 1)

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

    async def resources(self, name: str) -> list[Resource]:
        """Every version of a resource of the run that serves."""
        async with open_store(self.store) as store:
            return await store.resources(RUN, name, latest=False)


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


class Users:
    """Threads that hold conversations of two calls, and score them by the version that answered: 1 for the stable one."""

    def __init__(self, served: ServedFolder, key: str, count: int = 4) -> None:
        self.models: dict[str, set[str]] = {}
        """By session, the versions that its calls were answered by."""
        self.failed: list[str] = []
        self._base = f"{served.url}/v1"
        self._key = key
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._talk, args=(number,)) for number in range(count)]

    def __enter__(self) -> Users:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _talk(self, user: int) -> None:
        with OpenAI(base_url=self._base, api_key=self._key, max_retries=60, timeout=60) as openai:
            count = 0
            while not self._done.is_set():
                try:
                    self._one_session(openai, f"user-{user}-{count}")
                except Exception as cause:
                    self.failed.append(f"{type(cause).__name__}: {cause}")
                    return
                count += 1

    def _one_session(self, openai: OpenAI, session: str) -> None:
        hello: Any = [{"role": "user", "content": "hello there"}]
        self.models[session] = set()
        for _ in range(2):
            reply = openai.chat.completions.create(
                model="tiny", messages=hello, max_tokens=2, extra_headers={"x-agl-session": session}
            )
            assert reply.usage is not None
            known: Any = openai.get(f"/sessions/{session}", cast_to=object)
            self.models[session].add(known["model"])
        score = float(known["model"] == "tiny@1")
        openai.post(
            f"/sessions/{session}/reward",
            cast_to=object,
            body={"score": score},
            options={"headers": {"idempotency-key": session}},
        )


@pytest.mark.long
def test_a_canary_is_decided_once_while_its_server_and_its_engines_are_killed(folder: Folder) -> None:
    served = ServedFolder(folder)
    server = served.serve()
    key = served.agl("tokens", "create", "--role", "client", "--run", RUN, "--server", served.url).split()[-1]
    served.agl("models", "promote", "tiny@2", "--share", "0.5", "--store", served.url)
    with Users(served, key) as users:

        def answered(count: int) -> bool:
            assert not users.failed, users.failed
            return sum(map(bool, users.models.values())) >= count

        until(lambda: answered(4), "sessions are answered")
        samplers = [process for process, words in folder.commands() if any("sampler" in word for word in words)]
        assert len(samplers) == 2
        samplers[-1].kill()  # the canary's
        until(lambda: answered(8), "sessions are answered after the engine was killed", 2 * DEADLINE_S)
        server.send_signal(signal.SIGKILL)
        until(lambda: gone(server, folder.path), "every process of the server has ended")
        server = served.serve()

        def decided() -> bool:
            assert not users.failed, users.failed
            shown = json.loads(served.agl("models", "show", "tiny@2", "--json", "--store", served.url))
            return not shown["canary_of"]

        until(decided, "the canary is rolled back", 3 * DEADLINE_S)
        after = len(users.models)
        until(lambda: answered(after + 4), "sessions are answered after the decision")
    assert not users.failed, users.failed
    assert {len(models) for models in users.models.values() if models} == {1}  # none saw two versions
    usage = served.agl("tokens", "list", "--usage", "--run", RUN, "--store", served.url, "--json")
    assert json.loads(usage)[0]["calls"] >= 2 * sum(map(bool, users.models.values())) - 4
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=DEADLINE_S) == 0
    decisions = [one.value["reason"] for one in asyncio.run(served.resources("routes")) if one.value["reason"]]
    assert [(one["decision"], one["worse"]) for one in decisions] == [("rollback", "reward")]
