"""The connections of the real cluster's client, over a server that answers nothing."""

import asyncio
import gc
import json
from pathlib import Path

import pytest

from agentlightning.kubernetes.lightkube_cluster import LightkubeCluster

DEADLINE_S = 60.0


async def test_a_request_that_is_cancelled_during_its_handshake_closes_its_socket(tmp_path: Path) -> None:
    asked, closed = asyncio.Event(), asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        asked.set()
        await reader.read()
        closed.set()
        writer.close()

    async with asyncio.timeout(DEADLINE_S), await asyncio.start_server(hold, "127.0.0.1") as server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        cluster = LightkubeCluster("agents", _kubeconfig(tmp_path, url))
        request = asyncio.create_task(cluster.list("Job", {}))
        await asked.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        del request
        gc.collect()  # a socket that was left open warns when it is collected, and a warning fails the test
        await closed.wait()
        await cluster.close()


def _kubeconfig(folder: Path, url: str) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "k", "cluster": {"server": url, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
    }
    path = folder / "kubeconfig.json"
    path.write_text(json.dumps(config))
    return path
