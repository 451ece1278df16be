"""vLLM servers as the engine keeps them: real processes of a scripted server in vLLM's place."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web

from agentlightning.engines.base import make_engine
from agentlightning.engines.folders import seal
from agentlightning.engines.local.parts import PublishedWeights, Workplace
from agentlightning.engines.vllm.servers import VLLM_SIDE, VllmServers, WeightsServer
from agentlightning.engines.vllm.vllm_side.agentlightning_vllm.fetch import fetch
from agentlightning.errors import ConfigError, EngineError
from agentlightning.runtime.watchdog import HangLimits, Watchdog
from build import engine_setup

SCRIPTED = Path(__file__).parent / "scripted_vllm"
Serving = Callable[..., Any]


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of an environment that has the scripted vLLM."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{SCRIPTED}" exec {sys.executable} "$@"\n')
    script.chmod(0o700)
    return script


def workplace(folder: Path, limits: HangLimits, **sampler: Any) -> Workplace:
    setup = replace(engine_setup(folder, folder, dtype="auto", sampler=sampler), watchdog=Watchdog(limits))
    return Workplace(setup=setup, model=folder, weights_folder=folder)


@pytest.fixture
def serving(tmp_path: Path, python: Path) -> Serving:
    """serving(gpus=["", ""], …) is a context in which servers with these settings of [engine.sampler] are kept."""
    (tmp_path / "logs").mkdir()

    @asynccontextmanager
    async def kept(hang_timeout_s: float = 10.0, **settings: Any) -> AsyncIterator[VllmServers]:
        limits = HangLimits(hang_timeout_s=hang_timeout_s, start_timeout_s=60.0)
        servers = VllmServers(workplace(tmp_path, limits, type="vllm", python=str(python), **settings))
        servers.start()
        try:
            await servers.ready()
            watch = asyncio.create_task(servers.watch())
            yield servers
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        finally:
            await servers.close()

    return kept


def weights(folder: Path, version: int) -> PublishedWeights:
    whole = folder / f"v{version}"
    whole.mkdir()
    (whole / "model.safetensors").write_bytes(b"weights")
    seal(whole)
    return PublishedWeights(whole, version)


async def sampled(url: str) -> str:
    """Version of the weights that a token is sampled with."""
    async with aiohttp.ClientSession() as http, http.post(f"{url}/inference/v1/generate", json={}) as answer:
        answer.raise_for_status()
        version: str = (await answer.json())["choices"][0]["weight_versions"][0]["version"]
        return version


async def test_calls_wait_for_the_first_weights_and_all_replicas_get_them(serving: Serving, tmp_path: Path) -> None:
    async with serving(gpus=["", ""]) as servers:
        calls = [asyncio.ensure_future(sampled(url)) for url in servers.endpoints.urls]
        assert not (await asyncio.wait(calls, timeout=0.2))[0]
        await servers.publish(weights(tmp_path, 3))
        assert await asyncio.gather(*calls) == ["3", "3"]
        await servers.publish(weights(tmp_path, 4))
        assert [await sampled(url) for url in servers.endpoints.urls] == ["4", "4"]


async def test_nobody_but_the_engine_changes_weights(serving: Serving) -> None:
    async with serving() as servers, aiohttp.ClientSession() as http:
        (url,) = servers.endpoints.urls
        for path in ("/collective_rpc", "/pause", "/v1/load_lora_adapter", "/v1/completions"):
            for headers in ({}, {"Authorization": "Bearer guessed"}):
                async with http.post(url + path, json={}, headers=headers) as answer:
                    assert answer.status == 401
        async with http.get(f"{url}/health") as answer:
            assert answer.status == 200


@pytest.mark.parametrize(("harm", "hang_timeout_s"), [(signal.SIGKILL, 60.0), (signal.SIGSTOP, 3.0)])
async def test_a_server_that_is_killed_or_hangs_is_back_at_its_url_with_the_published_weights(
    serving: Serving, tmp_path: Path, harm: signal.Signals, hang_timeout_s: float
) -> None:
    async with serving(hang_timeout_s=hang_timeout_s, gpus=["", ""]) as servers:
        await servers.publish(weights(tmp_path, 5))
        before = servers.pids()
        assert before.keys() == {"sampler 0", "sampler 1"}
        os.kill(before["sampler 1"], harm)
        async with asyncio.timeout(600):
            while True:
                with suppress(aiohttp.ClientError):
                    assert await sampled(servers.endpoints.urls[1]) == "5"
                    break
        after = servers.pids()
        assert (after["sampler 0"], after["sampler 1"] != before["sampler 1"]) == (before["sampler 0"], True)


async def test_a_server_that_dies_while_weights_are_published_gets_them_from_its_next_start(
    serving: Serving, tmp_path: Path
) -> None:
    async with serving() as servers:
        os.kill(servers.pids()["sampler 0"], signal.SIGKILL)
        await servers.publish(weights(tmp_path, 6))
        assert await sampled(servers.endpoints.urls[0]) == "6"


STARTED = """
import sys
from agentlightning.runtime.children import listen, start_child
listener = listen("127.0.0.1", 0)
arguments = ["agentlightning_vllm", "--fd", str(listener.fileno())]
env = {"PYTHONPATH": sys.argv[2]}
print(start_child(arguments, python=sys.argv[1], secrets={"weights_key": "k"}, pass_fds=[listener.fileno()], env=env).pid)
sys.stdout.flush()
sys.stdin.read()
"""


async def test_a_server_ends_with_a_process_that_is_killed(python: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", STARTED, str(python), str(VLLM_SIDE)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert parent.stdout is not None
    server = psutil.Process(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()
    await asyncio.to_thread(psutil.wait_procs, [server], timeout=600)
    assert not server.is_running()


async def test_weights_that_are_not_whole_are_not_published(serving: Serving, tmp_path: Path) -> None:
    async with serving() as servers:
        await servers.publish(weights(tmp_path, 1))
        half = weights(tmp_path, 2)
        (half.folder / "model.safetensors").write_bytes(b"weig")
        with pytest.raises(EngineError, match=r"version 2 in .* not whole.*model\.safetensors has 4 bytes"):
            await servers.publish(half)
        assert await sampled(servers.endpoints.urls[0]) == "1"


@pytest.mark.parametrize(
    ("harm", "reason", "hang_timeout_s"), [("--refuse", "out of memory", 30.0), ("--stall", "TimeoutError", 2.0)]
)
async def test_a_server_that_takes_no_weights_is_named_after_three_tries(
    serving: Serving, tmp_path: Path, harm: str, reason: str, hang_timeout_s: float
) -> None:
    async with serving(hang_timeout_s=hang_timeout_s, arguments=[harm, "/pause"]) as servers:
        with pytest.raises(EngineError, match=rf"sampler 0 \(http.*\) did not take weights version 2.*{reason}"):
            await servers.publish(weights(tmp_path, 2))


async def test_a_server_that_cannot_start_ends_the_start_with_its_last_words(serving: Serving) -> None:
    with pytest.raises(EngineError, match=r"sampler 0 .* ended with code 2 .*expected one argument"):
        async with serving(arguments=["--stall"]):
            pass


async def test_running_servers_without_the_routes_that_weights_need_are_refused(tmp_path: Path) -> None:
    async def health(_: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application()
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    servers = VllmServers(workplace(tmp_path, HangLimits(), type="vllm_server", urls=[url]))
    servers.start()
    try:
        with pytest.raises(EngineError, match=rf"{url}.*VLLM_SERVER_DEV_MODE=1"):
            await servers.ready()
    finally:
        await servers.close()
        await runner.cleanup()


async def test_weights_are_given_to_whoever_has_the_key_and_nothing_else_is(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        server = WeightsServer("127.0.0.1")
        await server.start()
        stack.push_async_callback(server.close)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        given = weights(tmp_path, 3)
        server.put(given)
        update = server.update(given)
        assert update["files"].keys() == {"model.safetensors"}

        async def status(path: str, key: str) -> int:
            async with http.get(update["url"] + path, headers={"Authorization": f"Bearer {key}"}) as answer:
                return answer.status

        assert await status("/model.safetensors", update["key"]) == 200
        assert await status("/model.safetensors", "guessed") == 401
        assert await status("/manifest.json", update["key"]) == 404
        assert await status("/..%2f..%2fother.safetensors", update["key"]) == 404
        server.put(weights(tmp_path, 4))
        assert await status("/model.safetensors", update["key"]) == 404


async def test_weights_are_not_loaded_where_they_are_not_what_was_announced(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        server = WeightsServer("127.0.0.1")
        await server.start()
        stack.push_async_callback(server.close)
        given = weights(tmp_path, 2)
        server.put(given)
        update, file = server.update(given), "model.safetensors"
        source = (f"{update['url']}/{file}", tmp_path / "fetched", update["files"][file], update["key"])
        await asyncio.to_thread(fetch, *source)
        assert (tmp_path / "fetched").read_bytes() == b"weights"
        (given.folder / file).write_bytes(b"weightz")
        with pytest.raises(ValueError, match=r"model\.safetensors is not what was announced"):
            await asyncio.to_thread(fetch, *source)


URLS = {"type": "vllm_server", "urls": ["http://a:1"]}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sampler": "vllm"}, r"sampler\.python: is required"),
        ({"sampler": {**URLS, "python": "python"}}, r"sampler\.python: no such setting"),
        ({"sampler": {**URLS, "urls": ["a:1"]}}, "without user, query or fragment, got 'a:1'"),
        ({"sampler": {**URLS, "weights": "/mnt/w"}}, "expected reload, or http://HOST"),
        ({"sampler": {"type": "vllm", "python": "no-such-python"}}, r"engine\.sampler\.python: no-such-python"),
        ({"sampler": URLS, "max_num_seqs": 2}, "for samplers that are started here, not for vllm_server"),
        ({"sampler": URLS, "listen": "a:1"}, "for samplers that are started here, not for vllm_server"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_engine(engine_setup(tmp_path, tmp_path, **settings))


def test_a_vllm_sampler_takes_no_images(tmp_path: Path) -> None:
    assert not make_engine(engine_setup(tmp_path, tmp_path, sampler=URLS)).support.images
