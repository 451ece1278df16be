"""A run whose checkpoints are at a URL goes on from another host: with the weights of a run that nobody harmed.

A server, trainers with folders of their own, and an S3 server, all real processes. The runs learn offline, without agents:
what they learn depends on nothing but their tasks and their checkpoints.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from command_line import DEADLINE_S, Folder

from agentlightning.demo import tiny_model
from agentlightning.engines.folders import UrlFolder
from agentlightning.gateway.server import AgentLightningServer
from agentlightning.store.client import LightningStoreClient
from agentlightning.traces.importer import TraceImport
from s3_server import BUCKET, s3_server

pytestmark = [pytest.mark.slow, pytest.mark.long]

KEY = "key-of-the-tests"
STEPS, LAST = 6, Path("checkpoints") / "step-000006" / "model.safetensors"
RIGHT = {"red": "alpha", "green": "beta", "blue": "gamma", "black": "delta"}
CONFIG = f"""
[model]
path = "{{model}}"
[data]
from_run = "traces"
[algorithm]
type = "sft"
[trainer]
steps = {STEPS}
tasks_per_step = 2
learning_rate = 1e-2
checkpoint_every = 2
checkpoint_url = "{BUCKET}/runs"
[engine]
device = "cpu"
"""


class StallingProxy:
    """A way to a server on which nothing is passed on from the first request that names a file."""

    def __init__(self, url: str, file: str) -> None:
        self._target = urlsplit(url)
        self._file = file.encode()
        self.stalled = asyncio.Event()
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[StallingProxy]:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield self
        server.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._target.hostname, self._target.port)
        with suppress(ConnectionError):
            await asyncio.gather(self._pass(reader, back), self._pass(there, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if self._file in data:
                self.stalled.set()
            if not self.stalled.is_set():
                writer.write(data)
                await writer.drain()
        writer.close()


class Hosts:
    """One server, and hosts with a folder each that train its runs."""

    def __init__(self, folder: Folder, server: str, s3: dict[str, str]) -> None:
        self._folder = folder
        self._server = server
        self.s3 = s3

    def start(self, host: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
        """A command on a host, with the server's URL in AGL_STORE."""
        keys = {"AGL_SERVER_KEY": KEY, "AGL_STORE": self._server}
        return self._folder.start(
            *arguments, "--runs", str(self.runs(host)), env=keys | self.s3 | env, stderr=subprocess.STDOUT
        )

    async def agl(self, host: str, *arguments: str) -> str:
        """What it printed until it ended well."""
        code, output = await ended(self.start(host, *arguments))
        assert code == 0, output
        return output

    def runs(self, host: str) -> Path:
        return self._folder.path / host / "runs"

    def run(self, host: str) -> Path:
        (run,) = self.runs(host).iterdir()
        return run


async def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = await asyncio.to_thread(process.communicate, timeout=DEADLINE_S)
    return process.returncode, output


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield environment


@pytest.fixture
async def hosts(folder: Folder, s3: dict[str, str]) -> AsyncIterator[Hosts]:
    def furnish() -> Path:
        rows = [
            {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": answer}]}
            for word, answer in RIGHT.items()
        ]
        tiny_model.build(folder.path / "model", [*RIGHT, *RIGHT.values()], hidden=32, layers=1, context=64)
        folder.write("run.toml", CONFIG.format(model=folder.path / "model"))
        return folder.write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    rows = await asyncio.to_thread(furnish)
    with AgentLightningServer("memory://", server_key=KEY) as server:
        async with LightningStoreClient(server.url, KEY) as store:
            await TraceImport(store=store, run_id="traces").read([rows], "traces", lambda _: None)
        yield Hosts(folder, server.url, s3)


async def test_a_trainer_that_is_killed_in_the_middle_of_an_upload_is_succeeded_on_another_host(hosts: Hosts) -> None:
    await hosts.agl("unharmed", "train", "run.toml")
    s3 = hosts.s3["AWS_ENDPOINT_URL"]
    async with StallingProxy(s3, "step-000004/model.safetensors").serving() as proxy:
        first = hosts.start("one", "train", "run.toml", AWS_ENDPOINT_URL=proxy.url)
        await asyncio.wait_for(proxy.stalled.wait(), DEADLINE_S)
        run = hosts.run("one")
        early = await ended(hosts.start("two", "train", "--resume", run.name))
        assert early[0] == 1, early[1]
        assert f"{run} is training this run; end that first" in early[1]
        first.kill()
        await ended(first)
    half = UrlFolder(f"{BUCKET}/runs/{run.name}/step-000004")
    assert "learner.pt" in await half.names()
    assert "manifest.json" not in await half.names()
    await asyncio.to_thread(run.rename, run.with_name("gone"))

    output = await hosts.agl("two", "train", "--resume", run.name)
    assert "waiting 30 s to see whether it works on" in output
    assert (hosts.run("two") / LAST).read_bytes() == (hosts.run("unharmed") / LAST).read_bytes()
    assert await UrlFolder(f"{BUCKET}/runs/{run.name}").names() == ["step-000004", "step-000006"]
    assert "manifest.json" in await half.names()

    exported = hosts.runs("three").with_name("exported")
    await hosts.agl("three", "models", "export", run.name, "--to", str(exported))
    assert (exported / "model.safetensors").read_bytes() == (hosts.run("unharmed") / LAST).read_bytes()
