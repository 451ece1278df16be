"""The token path over verl's servers, with a client that answers what it was told to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from agentlightning.engines.verl.sampler_app import create_app

END = 1


def piece(ids: list[int], version: int, stop: str = "completed") -> SimpleNamespace:
    return SimpleNamespace(
        token_ids=ids, log_probs=[-0.5] * len(ids), stop_reason=stop, extra_fields={"global_steps": version}
    )


class ScriptedClient:
    """Gives its pieces one after the other and keeps what it was asked."""

    def __init__(self, *pieces: Any) -> None:
        self.pieces = list(pieces)
        self.asked: list[tuple[str, list[int], dict[str, Any]]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        self.asked.append((request_id, prompt_ids, sampling_params))
        given = self.pieces.pop(0)
        if isinstance(given, Exception):
            raise given
        return given


async def post(client: ScriptedClient, errors: list[Exception], **request: Any) -> tuple[int, Any]:
    app = create_app(client, context=16, end_ids=[END], on_error=errors.append)
    async with TestClient(TestServer(app)) as http:
        body = {"request_id": "call", "token_ids": [4, 5], "sampling_params": {"max_tokens": 4}, **request}
        async with http.post("/inference/v1/generate", json=body) as response:
            return response.status, await response.json()


async def test_with_a_key_for_sampling_nobody_else_samples() -> None:
    client, answered = ScriptedClient(piece([7, END], 1)), []
    app = create_app(client, context=16, end_ids=[END], on_error=lambda _: None, sampling_key="secret")
    async with TestClient(TestServer(app)) as http:
        body = {"request_id": "call", "token_ids": [4, 5], "sampling_params": {"max_tokens": 4}}
        for headers in ({}, {"Authorization": "Bearer guess"}, {"Authorization": "Bearer secret"}):
            async with http.post("/inference/v1/generate", json=body, headers=headers) as response:
                answered.append(response.status)
        assert (await http.get("/health")).status == 200
    assert answered == [401, 401, 200]


async def test_a_call_that_new_weights_stopped_goes_on_from_its_last_token_with_a_version_for_each_part() -> None:
    client = ScriptedClient(piece([7, 8], 1, "aborted"), piece([], 2, "aborted"), piece([9, END], 3))
    status, answer = await post(client, [])
    (choice,) = answer["choices"]
    assert status == 200
    assert choice["token_ids"] == [7, 8, 9, END]
    assert choice["weight_versions"] == [
        {"version": "1", "start": 0, "end": 2},
        {"version": "3", "start": 2, "end": 4},
    ]
    assert choice["finish_reason"] == "stop"
    assert [(session, prompt, params["max_tokens"]) for session, prompt, params in client.asked] == [
        ("call", [4, 5], 4),
        ("call", [4, 5, 7, 8], 2),
        ("call", [4, 5, 7, 8], 2),
    ]


async def test_a_completion_that_fills_the_context_ended_by_its_length() -> None:
    client = ScriptedClient(piece([7] * 14, 0))
    _, answer = await post(client, [], sampling_params={})
    assert client.asked[0][2]["max_tokens"] == 14
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_parameter_that_verl_does_not_get_is_refused_by_name() -> None:
    status, answer = await post(ScriptedClient(), [], sampling_params={"top_k": 5})
    assert status == 400
    assert answer["error"]["message"].startswith("sampling_params.top_k is not known")


async def test_a_server_that_fails_is_told_to_the_driver_and_answered_as_away() -> None:
    errors: list[Exception] = []
    lost = RuntimeError("gone")
    status, _ = await post(ScriptedClient(lost), errors)
    assert status == 503
    assert errors == [lost]
