import asyncio
import socket

import pytest

from agentlightning import AgentLightningServer, LightningStoreClient
from agentlightning.errors import GatewayError


def port_of(server: AgentLightningServer) -> int:
    return int(server.url.rpartition(":")[2])


def test_a_server_in_this_process_serves_its_store_until_it_is_stopped() -> None:
    async def runs(url: str) -> list[str]:
        async with LightningStoreClient(url) as client:
            await client.create_run("here", {}, "run")
            return [run.id for run in await client.runs()]

    with AgentLightningServer("memory://") as server:
        assert asyncio.run(runs(server.url)) == ["run"]
        port = port_of(server)
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))


def test_the_head_and_the_body_of_a_response_leave_as_one_packet() -> None:
    with (
        AgentLightningServer("memory://") as server,
        socket.create_connection(("127.0.0.1", port_of(server))) as client,
    ):
        for _ in range(2):
            client.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert client.recv(65_536).endswith(b'\r\n\r\n{"status":"ok"}')


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(GatewayError, match=f"port {port} of 127.0.0.1 cannot be used"):
            AgentLightningServer(port=port).start()


def test_beyond_loopback_a_key_is_required() -> None:
    with pytest.raises(GatewayError, match="server_key: is required"):
        AgentLightningServer(host="0.0.0.0")


def test_a_store_that_cannot_be_opened_is_raised_where_it_was_started() -> None:
    with pytest.raises(Exception, match="nowhere"):
        AgentLightningServer("sqlite:////nowhere/agl.db").start()
