"""Shared HTTP clients fit the SDK that is installed, whichever HTTP library that stands on."""

from __future__ import annotations

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
import anthropic, asyncio, openai
from agentlightning.runner.connection_pool import ConnectionPool, http_library

async def main():
    pool = ConnectionPool()
    for name, plain, coroutines in (("openai", openai.OpenAI, openai.AsyncOpenAI),
                                    ("anthropic", anthropic.Anthropic, anthropic.AsyncAnthropic)):
        plain(api_key="k", http_client=pool.sync_client(name))  # which refuses clients of another library
        coroutines(api_key="k", http_client=pool.async_client(name))
        print(http_library(name))

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(not (APART / ".installed").exists(), reason=f"needs {APART.name}: `make frameworks` installs it")
def test_the_pools_clients_fit_sdks_that_stand_on_httpx_where_httpx2_is_there_as_well() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    python = str(APART / "bin" / "python")
    done = subprocess.run([python, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["httpx", "httpx"]


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
