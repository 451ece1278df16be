"""Fixtures of the runner's tests."""

from collections.abc import AsyncIterator, Iterator

import pytest
from runner_bench import KEY, Bench, Server

from agentlightning.store.client import LightningStoreClient


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    started = Server("memory://")
    yield started
    started.close()


@pytest.fixture
async def bench(server: Server) -> AsyncIterator[Bench]:
    async with LightningStoreClient(server.url, KEY) as store:
        run = await store.create_run("runner", {"agent": {"reward": []}})
        bench = Bench(server, store, run.id)
        yield bench
        for process in bench.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
