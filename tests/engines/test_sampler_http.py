"""The sampler's HTTP face, in process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from agentlightning.config.engine import EngineConfig
from agentlightning.engines.local.sampler import create_app, open_sampler
from agentlightning.engines.sampler_address import asks_for
from agentlightning.runtime.children import listen, start_child, stop_child

Client = TestClient[Any, Any]
KEY = "of-the-engine"
ENGINE = {"Authorization": f"Bearer {KEY}"}


def serving(llama: Path, long_turn_s: float = 1e9, **keys: str) -> Client:
    sampler = open_sampler(llama, EngineConfig(device="cpu", max_num_seqs=4), long_turn_s=long_turn_s)
    return TestClient(TestServer(create_app(sampler, weights_folder=llama.parent, **keys)))


@pytest.fixture
async def client(llama: Path) -> AsyncIterator[Client]:
    async with serving(llama, weights_key=KEY) as client:
        yield client


@pytest.fixture(params=[1e9, -1.0], ids=["turns in the loop", "turns beside it"])
async def either(llama: Path, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    async with serving(llama, request.param, weights_key=KEY) as client:
        yield client


def body(token_ids: Any = (4, 5, 6), stream: bool = False, **sampling: Any) -> dict[str, Any]:
    ids = list(token_ids) if isinstance(token_ids, tuple) else token_ids
    return {"request_id": "c1", "model": "m", "token_ids": ids, "stream": stream, "sampling_params": sampling}


async def generate(client: Client, **given: Any) -> dict[str, Any]:
    async with client.post("/inference/v1/generate", json=body(**given)) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


async def test_an_answer_has_ids_logprobs_versions_and_its_request_s_id(either: Client) -> None:
    answer = await generate(either, max_tokens=5, seed=1, logprobs=0, stop=[], stop_token_ids=[])
    assert answer["request_id"] == "c1"
    (choice,) = answer["choices"]
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    assert all(entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": len(choice["token_ids"])}]
    assert choice["finish_reason"] in ("stop", "length")
    assert choice["stop_reason"] is None


async def test_a_stream_brings_the_tokens_of_the_plain_answer_and_ends_with_done(either: Client) -> None:
    (plain,) = (await generate(either, max_tokens=6, seed=9))["choices"]
    async with either.post("/inference/v1/generate", json=body(stream=True, max_tokens=6, seed=9)) as answer:
        events = (await answer.text()).strip().split("\n\n")
    assert events.pop() == "data: [DONE]"
    choices = [orjson.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert [token for choice in choices for token in choice["token_ids"]] == plain["token_ids"]
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + [plain["finish_reason"]]
    assert choices[-1]["weight_versions"] == plain["weight_versions"]


@pytest.mark.parametrize("stream", [False, True])
async def test_alternatives_come_with_the_tokens_of_those_who_ask(client: Client, stream: bool) -> None:
    asked = body(stream=stream, max_tokens=6, seed=9, logprobs=3, temperature=0.5)
    async with client.post("/inference/v1/generate", json=asked) as answer:
        text = await answer.text()
    bodies = [line.removeprefix("data: ") for line in text.split("\n") if line and line != "data: [DONE]"]
    content = [entry for one in bodies for entry in orjson.loads(one)["choices"][0]["logprobs"]["content"]]
    for entry in content:
        values = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        same = [other["logprob"] for other in entry["top_logprobs"] if other["token_id"] == entry["token_id"]]
        assert same in ([], [pytest.approx(entry["logprob"], abs=1e-6)])
        assert entry["logprob"] <= values[0] + 1e-6


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": [7] * 256}, "the prompt has 256 tokens; the model's context is 256"),
    ({"token_ids": [7, 64]}, "token_ids holds 64; the model's vocabulary has ids 0 to 63"),
    ({"token_ids": [7, -1]}, "token_ids holds -1"),
    ({"token_ids": []}, "token_ids: Expected `array` of length >= 1"),
    ({"token_ids": "abc"}, "token_ids: Expected `array`"),
    ({"token_ids": [1.5]}, "token_ids[0]: Expected `int`"),
    ({"temperature": -1}, "sampling_params.temperature: Expected `float` >= 0.0"),
    ({"temperature": "hot"}, "sampling_params.temperature: Expected `float | null`, got `str`"),
    ({"top_p": 0}, "sampling_params.top_p: Expected `float` > 0.0"),
    ({"top_p": 1.5}, "sampling_params.top_p: Expected `float` <= 1.0"),
    ({"max_tokens": 0}, "sampling_params.max_tokens: Expected `int` >= 1"),
    ({"max_tokens": 1.5}, "sampling_params.max_tokens: Expected `int"),
    ({"seed": "x"}, "sampling_params.seed: Expected `int | null`"),
    ({"stop": [1]}, "sampling_params.stop[0]: Expected `str`"),
    ({"top_k": -5}, "sampling_params.top_k: Expected `int` >= -1"),
    ({"n": 2}, "sampling_params.n: Expected `int` <= 1"),
    ({"beam_width": 2}, "sampling_params: Object contains unknown field `beam_width`"),
]


async def test_bad_input_gets_one_sentence_that_names_the_field(client: Client) -> None:
    for given, message in WRONG:
        async with client.post("/inference/v1/generate", json=body(**given)) as answer:
            assert answer.status == 400
            error = (await answer.json())["error"]
        assert message in error["message"]
        assert error["code"] == 400
    for data in (b"{", b"[]"):
        async with client.post("/inference/v1/generate", data=data) as answer:
            assert answer.status == 400


async def test_weights_that_do_not_load_are_refused_and_the_old_ones_go_on(client: Client, other_llama: Path) -> None:
    before = await generate(client, max_tokens=8, seed=4)
    broken = Path(mkdtemp(dir=other_llama.parent))
    (broken / "model.safetensors").write_bytes(b"not weights")
    for folder in (broken, other_llama.parent / "nowhere"):
        status, answer = await reload(client, folder, "1")
        assert status == 400
        assert str(folder) in answer["error"]["message"]
        assert "expected a folder in" not in answer["error"]["message"]
    assert await generate(client, max_tokens=8, seed=4) == before
    assert (await reload(client, other_llama, "2"))[0] == 200
    after = await generate(client, max_tokens=8, seed=4)
    assert after["choices"][0]["weight_versions"][0]["version"] == "2"
    assert after["choices"][0]["token_ids"] != before["choices"][0]["token_ids"]


async def test_weights_that_change_in_the_middle_of_an_answer_stamp_its_tokens(
    either: Client, other_llama: Path
) -> None:
    request = body(stream=True, max_tokens=200, seed=5)
    # No end token: this answer must be under way when the weights change.
    async with either.post("/inference/v1/generate", json=request) as answer:
        await answer.content.readline()
        assert (await reload(either, other_llama, "1"))[0] == 200
        events = (await answer.text()).strip().split("\n\n")
    last = orjson.loads(events[-2].removeprefix("data: "))["choices"][0]
    versions = last["weight_versions"]
    assert versions[0]["start"] == 0
    assert [v["version"] for v in versions] in (["0", "1"], ["0"])
    assert all(a["end"] == b["start"] for a, b in itertools.pairwise(versions))


async def test_a_client_that_goes_away_frees_its_row(either: Client) -> None:
    waiting = [
        asyncio.create_task(generate(either, token_ids=[4], max_tokens=250, seed=s, stop_token_ids=[]))
        for s in range(6)
    ]
    while (await health(either))["active"] == 0 and not all(task.done() for task in waiting):
        pass
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    async with asyncio.timeout(60):
        while (found := await health(either))["active"] or found["waiting"]:
            pass


async def reload(client: Client, folder: Path, version: str) -> tuple[int, dict[str, Any]]:
    order = {"method": "reload_weights", "kwargs": {"weights_path": str(folder), "weight_version": version}}
    async with client.post("/collective_rpc", json=order, headers=ENGINE) as answer:
        return answer.status, await answer.json()


async def health(client: Client) -> dict[str, Any]:
    async with client.get("/health") as answer:
        assert answer.status == 200
        found: dict[str, Any] = await answer.json()
        return found


async def ordered(client: Client, order: dict[str, Any], authorization: str | None) -> int:
    headers = {} if authorization is None else {"Authorization": authorization}
    async with client.post("/collective_rpc", json=order, headers=headers) as answer:
        return answer.status


async def test_weights_are_taken_from_the_engine_only(client: Client, llama: Path) -> None:
    order = {"method": "reload_weights", "kwargs": {"weights_path": str(llama), "weight_version": "6"}}
    for authorization in (None, "Bearer ", "Bearer of-the-engin", KEY, "Bearer \xff"):
        assert await ordered(client, order, authorization) == 401
    assert (await health(client))["version"] == "0"
    assert await ordered(client, {"method": "sleep", "kwargs": {}}, f"Bearer {KEY}") == 400
    async with serving(llama) as keyless:
        assert await ordered(keyless, order, "Bearer ") == 401


async def test_weights_lie_in_the_folder_for_weights(client: Client, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/")
    above = llama.parent
    for path in (above / ".." / above.name / "..", llama / "v1", Path("/"), tmp_path / "link"):
        status, said = await reload(client, path, "6")
        assert status == 400
        assert "expected a folder in" in said["error"]["message"]


def test_a_folder_that_is_no_model_ends_the_process_with_a_sentence(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as listener:
        fd = listener.fileno()
        arguments = ["agentlightning.engines.local.sampler", "--model", str(tmp_path), "--fd", str(fd)]
        child = start_child(arguments, pass_fds=[fd], log=tmp_path / "log")
        assert child.wait(60) == 2
        stop_child(child)
    sentence = f"model {tmp_path}: not a transformers model folder (it has no config.json)"
    assert (tmp_path / "log").read_text().strip().splitlines()[-1] == sentence


async def test_with_a_key_for_sampling_its_holder_alone_samples_and_everybody_sees_that_it_lives(llama: Path) -> None:
    async with serving(llama, weights_key=KEY, sampling_key="of-the-gateways") as client:
        for headers, status in (({}, 401), (ENGINE, 401), ({"Authorization": "Bearer of-the-gateways"}, 200)):
            async with client.post("/inference/v1/generate", json=body(max_tokens=1), headers=headers) as answer:
                assert answer.status == status
            async with client.get("/v1/models", headers=headers) as answer:
                assert answer.status == status
        assert (await client.get("/health")).status == 200
        given = {"method": "reload_weights", "kwargs": {"weights_path": "/nowhere", "weight_version": "1"}}
        sampling = {"Authorization": "Bearer of-the-gateways"}
        assert (await client.post("/collective_rpc", json=given, headers=sampling)).status == 401


async def test_the_end_token_and_stop_tokens_end_an_answer_and_are_part_of_it(client: Client) -> None:
    (free,) = (await generate(client, max_tokens=12, seed=2))["choices"]
    wanted = free["token_ids"][3]
    (choice,) = (await generate(client, max_tokens=12, seed=2, stop_token_ids=[wanted]))["choices"]
    assert choice["token_ids"] == free["token_ids"][: free["token_ids"].index(wanted) + 1]
    assert choice["finish_reason"] == "stop"


async def test_answers_end_where_the_context_does(client: Client) -> None:
    (choice,) = (await generate(client, token_ids=[7] * 250, max_tokens=1000, seed=3))["choices"]
    assert len(choice["token_ids"]) <= 6


async def test_bytes_of_no_text_are_a_wrong_key() -> None:
    app = web.Application(middlewares=asks_for("of-the-gateways"))
    async with TestServer(app) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: sampler\r\nauthorization: Bearer \xff\r\nconnection: close\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()
