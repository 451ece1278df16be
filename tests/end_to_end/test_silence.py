"""Rollouts that finish without one recorded model call: each is named, with its likely cause, where a person looks.

Everything is real but the model: a server, `agl worker` as a process, agents as users write them.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from command_line import Folder
from scripted_engine import ScriptedEngine
from toy_model import write_tokenizer

from agentlightning.gateway.server import AgentLightningServer
from agentlightning.rendering.renderer import Renderer
from agentlightning.store.base import NO_CALLS
from agentlightning.store.client import LightningStoreClient
from agentlightning.types import JSON, NewRollout, Resource, Rollout

KEY = "key-of-the-tests"
END = 2

PROGRAM = """
import json, os, sys, urllib.error, urllib.request

server = os.environ["OPENAI_BASE_URL"].partition("/r/")[0]
request = urllib.request.Request(
    sys.argv[1].format(server=server, base=os.environ["OPENAI_BASE_URL"]) + "/chat/completions",
    data=json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode(),
    headers={"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
try:
    urllib.request.urlopen(request).read()
except urllib.error.HTTPError as error:
    print("no answer:", error.code)
print(json.dumps({"reward": 1.0}))
"""


class House:
    """A server with one run, and what its agents made of their tasks."""

    def __init__(self, server: str, store: LightningStoreClient, run_id: str, folder: Folder) -> None:
        self.server = server
        self.store = store
        self.run_id = run_id
        self.folder = folder

    async def rollouts(self, agent: str, *tasks: JSON, **env: str) -> list[Rollout]:
        """What a worker process with this agent and environment makes of these tasks."""
        new = [NewRollout(run_id=self.run_id, task=task, group_id=str(place)) for place, task in enumerate(tasks)]
        queued = await self.store.enqueue(new)
        worker = self.folder.start(
            "worker", agent, "--server", self.server, "--run", self.run_id, env={"AGL_SERVER_KEY": KEY, **env}
        )
        finished = await self.store.wait(self.run_id, at_least=len(tasks), timeout_s=30.0)
        worker.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(worker.wait, 30) == 0
        assert {rollout.state for rollout in finished} == {"succeeded"}, [rollout.error for rollout in finished]
        by_id = {rollout.id: rollout for rollout in finished}
        return [by_id[rollout.id] for rollout in queued]


@pytest.fixture
async def house(folder: Folder, tmp_path: Path) -> AsyncIterator[House]:
    tokenizer = await asyncio.to_thread(write_tokenizer, tmp_path / "tokenizer")
    engine = await ScriptedEngine(lambda _: [*Renderer(tokenizer).encode("It is sunny."), END]).start()
    value = {"model": "policy", "endpoints": [engine.url], "tokenizer": str(tokenizer), "seed": 7}
    # Not "127.0.0.1": an address of this machine that no rule about loopback exempts from a proxy.
    with AgentLightningServer("memory://", host="0.0.0.0", server_key=KEY) as server:
        async with LightningStoreClient(server.url, KEY) as store:
            run = await store.create_run("silence", {})
            await store.put_resources([Resource(run_id=run.id, name="default", kind="policy", value=value)])
            yield House(server.url, store, run.id, folder)
    await engine.close()


class Provider(BaseHTTPRequestHandler):
    """Answers any chat request, for any host: what a proxy that knows a provider does."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": "from elsewhere"}}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def proxy() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Provider) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


async def test_a_function_agent_that_never_calls_is_named_and_its_sibling_that_does_is_not(house: House) -> None:
    house.folder.write(
        "agent.py",
        "from openai import AsyncOpenAI\n"
        "async def solve(task, llm):\n"
        "    if task['calls']:\n"
        "        client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, http_client=llm.http_client)\n"
        "        messages = [{'role': 'user', 'content': 'hi'}]\n"
        "        reply = await client.chat.completions.create(model=llm.model, messages=messages)\n"
        "        assert reply.choices[0].message.content == 'It is sunny.'\n"
        "    return 1.0\n",
    )
    silent, talkative = await house.rollouts("agent.py:solve", {"calls": False}, {"calls": True})
    assert silent.warning == f"{NO_CALLS}: the agent did not use the base URL it was given"
    assert (talkative.warning, talkative.calls) == (None, 1)


@pytest.mark.parametrize("base", ["{base}/v1", "{server}/v1/v1", "{server}"])
async def test_a_program_that_asks_for_a_wrong_path_is_named_with_that_path(house: House, base: str) -> None:
    house.folder.write("agent.py", PROGRAM)
    (rollout,) = await house.rollouts(f"{sys.executable} agent.py {base}", {})
    assert rollout.warning is not None
    path = base.format(server="", base=f"/r/{rollout.id}/1/v1") + "/chat/completions"
    assert rollout.warning.startswith(f"{NO_CALLS}: the agent asked for {path}, which is no route")


async def test_a_proxy_variable_that_diverts_a_function_agent_is_named(house: House, proxy: str) -> None:
    house.folder.write(
        "agent.py",
        "import httpx\n"
        "def solve(task, llm):\n"
        "    body = {'model': 'm', 'messages': [{'role': 'user', 'content': 'hi'}]}\n"
        "    reply = httpx.post(f'{llm.base_url}/chat/completions', json=body).json()\n"
        "    return float(reply['choices'][0]['message']['content'] == 'from elsewhere')\n",
    )
    (rollout,) = await house.rollouts("agent.py:solve", {}, http_proxy=proxy)
    assert rollout.reward == 1.0, "the proxy answered"
    assert rollout.warning is not None
    assert rollout.warning.startswith(f"{NO_CALLS}: http_proxy is set where the worker runs and NO_PROXY does not name")


async def test_a_proxy_variable_that_diverts_a_program_is_named(house: House, proxy: str) -> None:
    house.folder.write("agent.py", PROGRAM)
    (rollout,) = await house.rollouts(f"{sys.executable} agent.py {{base}}", {}, http_proxy=proxy)
    assert rollout.warning is not None
    assert rollout.warning.startswith(f"{NO_CALLS}: http_proxy is set where the worker runs and NO_PROXY does not name")


async def test_the_command_line_shows_the_warning(house: House) -> None:
    house.folder.write("agent.py", "def solve(task, llm):\n    return 1.0\n")
    (rollout,) = await house.rollouts("agent.py:solve", {})
    env = {"AGL_SERVER_KEY": KEY, "AGL_STORE": house.server}
    listed = await asyncio.to_thread(house.folder.run, "rollouts", "list", house.run_id, env=env)
    assert listed.returncode == 0, listed.stderr
    assert NO_CALLS in listed.stdout
    shown = await asyncio.to_thread(house.folder.run, "rollouts", "show", rollout.id, env=env)
    assert f"{NO_CALLS}: the agent did not use the base URL it was given" in shown.stdout
