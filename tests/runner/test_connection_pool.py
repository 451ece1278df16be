"""Shared HTTP clients fit the SDK that is installed, whichever HTTP library that stands on."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import httpx
import httpx2
import pytest

from agentlightning.runner.connection_pool import ConnectionPool, http_library, library_of

ROOT = Path(__file__).parents[2]
APART = ROOT / ".venv-frameworks-openai2"
"""An environment with openai 2 and anthropic 0, which stand on httpx, and with httpx2."""

PROGRAM = """
import asyncio, http.server, importlib, json, threading

from agentlightning.runner.connection_pool import ConnectionPool, http_library

CHAT = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices":
    [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "openai"}}]}
MESSAGE = {"id": "1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn", "stop_sequence": None,
    "content": [{"type": "text", "text": "anthropic"}], "usage": {"input_tokens": 1, "output_tokens": 1}}
QUESTION = [{"role": "user", "content": "who?"}]

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps(MESSAGE if self.path.endswith("messages") else CHAT).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_): ...

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_address[1]}"
pool, told = ConnectionPool(), {}

async def ask(sdk, client):
    if sdk == "openai":
        return (await client.chat.completions.create(model="m", messages=QUESTION)).choices[0].message.content
    return (await client.messages.create(model="m", max_tokens=9, messages=QUESTION)).content[0].text

for sdk, plain, coroutines, path in (("openai", "OpenAI", "AsyncOpenAI", "/v1"),
                                     ("anthropic", "Anthropic", "AsyncAnthropic", "")):
    try:
        package = importlib.import_module(sdk)
    except ModuleNotFoundError:
        continue
    given = {"base_url": url + path, "api_key": "k"}

    async def both():
        waiting = getattr(package, coroutines)(**given, http_client=pool.async_client(sdk))
        return await ask(sdk, waiting)

    client = getattr(package, plain)(**given, http_client=pool.sync_client(sdk))
    if sdk == "openai":
        said = client.chat.completions.create(model="m", messages=QUESTION).choices[0].message.content
    else:
        said = client.messages.create(model="m", max_tokens=9, messages=QUESTION).content[0].text
    told[sdk] = [http_library(sdk), said, asyncio.run(both())]
print(json.dumps(told))
"""


@pytest.mark.slow
@pytest.mark.skipif(not (APART / ".installed").exists(), reason=f"needs {APART.name}: `make frameworks` installs it")
def test_calls_over_the_pool_succeed_where_the_sdks_stand_on_httpx_and_httpx2_is_there() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    python = str(APART / "bin" / "python")
    done = subprocess.run([python, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {name: ["httpx", name, name] for name in ("openai", "anthropic")}


@pytest.mark.parametrize(("base", "library"), [(httpx.AsyncClient, "httpx"), (httpx2.AsyncClient, "httpx2")])
def test_the_library_is_the_one_whose_client_the_sdks_own_is(base: type, library: str) -> None:
    class Sdk:
        DefaultAsyncHttpxClient = type("DefaultAsyncHttpxClient", (base,), {})

    assert library_of(Sdk) == library


def test_sdks_of_one_library_share_a_client() -> None:
    pool = ConnectionPool()
    assert http_library("openai") == http_library("anthropic") == http_library() == "httpx2"
    assert pool.sync_client("openai") is pool.sync_client("anthropic") is pool.sync_client()
    pool.close()
