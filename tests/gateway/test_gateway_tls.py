"""TLS, client certificates, proxies, metrics and web pages: real certificates, sockets and clients."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_house import SERVER_KEY, House, path
from openai import AsyncOpenAI

from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.gateway.server_settings import ServerSettings, Tls, add_options, read_options
from agentlightning.gateway.uvicorn_server import UvicornServer
from agentlightning.runtime.children import listen
from agentlightning.store.client import LightningStoreClient

ADMIN = {"authorization": f"Bearer {SERVER_KEY}"}
HI: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
PAGE = "https://console.example"


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def certificate(folder: Path, name: str, *extensions: str) -> None:
    """NAME.pem and NAME.key, signed by ca.pem."""
    openssl(
        folder, "req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-subj", f"/CN={name}", "-out", "r"
    )
    (folder / "extensions").write_text("\n".join(extensions), encoding="ascii")
    signed_by = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "extensions", "-days", "2")
    openssl(folder, "x509", "-req", "-in", "r", "-out", f"{name}.pem", *signed_by)


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a root, a server's certificate for 127.0.0.1, and one of nobody here."""
    folder = tmp_path_factory.mktemp("pems")
    made = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2")
    ca = ("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign")
    openssl(folder, *made, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=root", *ca)
    certificate(folder, "server", "subjectAltName=IP:127.0.0.1", "extendedKeyUsage=serverAuth")
    certificate(folder, "worker", "extendedKeyUsage=clientAuth")
    openssl(folder, "rsa", "-in", "server.key", "-aes128", "-passout", "pass:secret", "-out", "locked.key")
    return folder


@asynccontextmanager
async def served(house: House, **settings: Any) -> AsyncIterator[str]:
    """Host and port of the house's gateway."""
    listener, started = listen("127.0.0.1", 0), asyncio.Event()
    sockets = [listener]
    if settings.get("metrics_port") == 0:
        sockets.append(listen("127.0.0.1", 0))
        settings["metrics_port"] = sockets[1].getsockname()[1]
    own = ServerSettings(**settings)
    server = UvicornServer(house.gateway(settings=own), started=started.set, settings=own)
    serving = asyncio.create_task(server.serve(sockets=sockets))
    await started.wait()
    try:
        yield ",".join(f"127.0.0.1:{one.getsockname()[1]}" for one in sockets)
    finally:
        server.should_exit = True
        await serving


def tls(pems: Path) -> Tls:
    return Tls(cert=pems / "server.pem", key=pems / "server.key")


def trusting(pems: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=pems / "ca.pem")


# --- TLS --------------------------------------------------------------------------------------------------------------


async def test_agents_and_stores_use_a_server_over_tls_and_verify_it(
    house: House, pems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = await house.claim()
    async with served(house, tls=tls(pems)) as place:
        async with httpx.AsyncClient(verify=trusting(pems), timeout=60) as http:
            client = AsyncOpenAI(
                base_url=f"https://{place}{path(claim)}/v1", api_key=claim.key, http_client=http, max_retries=0
            )
            stream = await client.chat.completions.create(**HI, stream=True)
            assert "".join([part.choices[0].delta.content or "" async for part in stream]) == "It is sunny."
            wrong = await http.get(f"https://{place}{path(claim)}/v1/nothing", headers={"x-api-key": claim.key})
            assert f"is https://{place}/r/" in wrong.text
        async with httpx.AsyncClient(timeout=60) as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get(f"https://{place}/healthz")
            with pytest.raises(httpx.TransportError):
                await stranger.get(f"http://{place}/healthz")


async def test_a_store_client_verifies_the_server_by_the_environment(
    house: House, pems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(pems / "ca.pem"))
    async with served(house, tls=tls(pems)) as place, LightningStoreClient(f"https://{place}", SERVER_KEY) as store:
        assert [run.id for run in await store.runs()] == [house.run_id]


@pytest.mark.parametrize(
    ("scheme", "root", "todo"),
    [
        ("http", "ca.pem", r"is it served as https://\?"),
        ("https", "worker.pem", "name the root that signed its certificate in SSL_CERT_FILE"),
    ],
)
async def test_a_client_whose_tls_is_wrong_is_told_what_to_do(
    house: House, pems: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, root: str, todo: str
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(pems / root))
    async with served(house, tls=tls(pems)) as place:
        with pytest.raises(AgentLightningError, match=todo):
            async with LightningStoreClient(f"{scheme}://{place}", SERVER_KEY, retry_timeout_s=0.1) as store:
                await store.runs()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--tls-cert server.pem", "--tls-cert: has no effect without both"),
        ("--tls-cert server.pem --tls-key worker.key", "--tls-cert, --tls-key: expected a certificate and its key"),
        ("--tls-cert nowhere.pem --tls-key server.key", "--tls-cert: there is no file 'nowhere.pem'"),
        ("--tls-cert server.pem --tls-key locked.key", "--tls-cert, --tls-key: expected .* without a password"),
        ("--trusted-proxy *", "--trusted-proxy: expected an address or a network"),
        ("--trusted-proxy 10.0.0.1/8", "--trusted-proxy: expected an address or a network"),
        ("--cors-origin *", "--cors-origin: expected http"),
        ("--cors-origin https://a.example/", "--cors-origin: expected http"),
        ("--metrics-port 8765", "--metrics-port: expected a port of its own"),
        ("--max-parallel-requests 0", "--max-parallel-requests: expected a number from 1"),
        ("--lease-s 0", "--lease-s: expected seconds above 0, got 0"),
        ("--lease-s nan", "--lease-s: expected seconds above 0, got nan"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    pems: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, sentence: str
) -> None:
    monkeypatch.chdir(pems)
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int)
    parser.add_argument("--port", type=int, default=8765)
    add_options(parser)
    with pytest.raises(ConfigError, match=sentence):
        read_options(parser.parse_args(arguments.split()))


# --- behind a proxy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("proxies", "scheme"), [((), "http"), (("127.0.0.0/8",), "https")])
async def test_a_proxy_is_believed_only_where_it_is_named_and_what_comes_through_is_not_of_this_machine(
    house: House, proxies: tuple[str, ...], scheme: str
) -> None:
    claim = await house.claim()
    forwarded = {"x-forwarded-for": "203.0.113.7", "x-forwarded-proto": "https"}
    key = {"authorization": f"Bearer {claim.key}", "host": "agl.example"}
    async with (
        served(house, trusted_proxies=proxies) as place,
        httpx.AsyncClient(base_url=f"http://{place}", timeout=60) as http,
    ):
        shown = await http.get(f"{path(claim)}/v1/nothing", headers={**forwarded, **key})
        assert f"is {scheme}://agl.example/r/" in shown.text
        for header in (forwarded, {"x-forwarded-for": "127.0.0.1"}, {"forwarded": "for=127.0.0.1"}):
            assert (await http.post(f"{path(claim)}/v1/chat/completions", json=HI, headers=header)).status_code == 401


# --- metrics ----------------------------------------------------------------------------------------------------------


async def test_metrics_want_a_key_that_may_read_every_run(house: House) -> None:
    async with served(house) as place, httpx.AsyncClient(base_url=f"http://{place}", timeout=60) as http:
        assert (await http.get("/metrics")).status_code == 401
        assert "agl_calls_in_flight" in (await http.get("/metrics", headers=ADMIN)).text
        for role, run_id, status in ("reader", None, 200), ("reader", house.run_id, 403), ("worker", house.run_id, 403):
            made = await http.post(
                "/api/create_token", json={"name": "t", "role": role, "run_id": run_id}, headers=ADMIN
            )
            assert made.status_code == 200, made.text
            token = {"authorization": f"Bearer {made.json()['secret']}"}
            answer = await http.get("/metrics", headers=token)
            assert answer.status_code == status
            if role == "reader" and run_id is not None:  # of the same numbers it may read those of its run
                told = (await http.post("/api/statistics", json={}, headers=token)).json()
                assert [one["run_id"] for one in told] == [house.run_id]


async def test_metrics_on_a_port_of_their_own_are_there_only_and_nothing_else_is(house: House) -> None:
    async with served(house, metrics_port=0) as places, httpx.AsyncClient(timeout=60) as http:
        main, own = (f"http://{place}" for place in places.split(","))
        assert "agl_calls_in_flight" in (await http.get(f"{own}/metrics")).text
        assert (await http.get(f"{main}/metrics", headers=ADMIN)).status_code == 404
        assert (await http.get(f"{own}/api/runs", headers=ADMIN)).status_code == 404
        for place in (main, own):
            assert (await http.get(f"{place}/healthz")).status_code == 200


# --- web pages --------------------------------------------------------------------------------------------------------


def browser(place: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{place}", timeout=60)


async def test_pages_of_listed_origins_may_use_the_server_with_a_key(house: House) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    async with served(house, cors_origins=(PAGE,)) as place, browser(place) as http:
        preflight = await http.options("/api/runs", headers={"origin": PAGE, **asks})
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        answer = await http.get("/api/runs", headers={"origin": PAGE, **ADMIN})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "access-control-allow-credentials" not in answer.headers
        assert "x-agl-ignored" in answer.headers["access-control-expose-headers"]
        other = await http.options("/api/runs", headers={"origin": "https://evil.example", **asks})
        assert (other.status_code, "access-control-allow-origin" in other.headers) == (400, False)
        other = await http.get("/api/runs", headers={"origin": "https://evil.example", **ADMIN})
        assert "access-control-allow-origin" not in other.headers


async def test_without_a_list_no_page_of_another_origin_may(house: House) -> None:
    asks = {"origin": PAGE, "access-control-request-method": "GET"}
    async with served(house) as place, browser(place) as http:
        for answer in (await http.options("/api/runs", headers=asks), await http.get("/healthz", headers=asks)):
            assert "access-control-allow-origin" not in answer.headers


TWO_NETWORKS = """
ip link set lo up
for n in 1 2; do
    ip link add n$n type veth peer name m$n && ip addr add 10.91.$n.2/24 dev n$n || exit 77
    ip link set n$n up && ip link set m$n up || exit 77
done
exec "$0" -c '
from agentlightning.gateway.__main__ import metrics_host
for store in ("postgresql://agl:pw@10.91.2.9/agl", "postgresql://127.0.0.1/agl", "sqlite:///agl.db"):
    print(metrics_host(store, "0.0.0.0"), metrics_host(store, "10.91.1.2"))
'
"""


def test_metrics_of_a_server_at_all_addresses_are_on_the_network_of_its_store_alone() -> None:
    """Agents share a network with the server on which the store is not."""
    words = ["unshare", "--net", "sh", "-c", TWO_NETWORKS, sys.executable]
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs unshare and ip")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode == 77 or "Operation not permitted" in done.stderr:
        pytest.skip("networks cannot be made here")
    assert done.stdout.split() == ["10.91.2.2", "10.91.1.2", *["0.0.0.0", "10.91.1.2"] * 2], done.stderr
