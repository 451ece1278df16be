"""The sampling client over a gateway that answers as a test scripted: futures, coroutines, tries and refusals."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson
import pytest

import agentlightning as agl
from agentlightning.errors import InputError
from agentlightning.runner.connection_pool import ConnectionPool
from agentlightning.tracing.frameworks import use_agent
from agentlightning.tracing.propagation import ContextPropagator

SAMPLED = {
    "id": "tok-1",
    "choices": [{"index": 0, "token_ids": [8, 2], "logprobs": [-1.0, -2.0], "finish_reason": "stop", "stop": None}],
}


class Gateway:
    """Answers requests from a script, the last answer again and again, and keeps what it was sent."""

    def __init__(self) -> None:
        self.script: list[tuple[int, Any]] = [(200, SAMPLED)]
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.connections = ConnectionPool()
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = orjson.loads(self.rfile.read(int(self.headers["content-length"])))
                gateway.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                status, answer = gateway.script.pop(0) if len(gateway.script) > 1 else gateway.script[0]
                data = orjson.dumps(answer)
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                if status == 402:
                    self.send_header("x-should-retry", "false")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def client(self) -> agl.SamplingClient:
        urls = {"base_url": f"{self.url}/v1", "anthropic_base_url": self.url}
        return agl.SamplingClient(agl.LLM(**urls, api_key="k", model="policy", connections=self.connections))


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    made = Gateway()
    yield made
    made.connections.close()
    made.server.shutdown()
    made.server.server_close()


async def test_samples_have_ids_and_log_probabilities_awaited_or_as_a_future(gateway: Gateway) -> None:
    awaited = await gateway.client.sample_async([5, 6])
    future = gateway.client.sample([5, 6]).result(30)
    assert awaited == future
    [sequence] = awaited.sequences
    assert (sequence.tokens, sequence.logprobs, sequence.stop_reason) == ([8, 2], [-1.0, -2.0], "stop")
    assert (awaited.call_id, awaited.prompt_logprobs) == ("tok-1", None)


async def test_settings_reach_the_gateway_under_its_names(gateway: Gateway) -> None:
    class ModelInput:
        def to_ints(self) -> list[int]:
            return [5, 6]

    params = agl.SamplingParams(max_tokens=9, seed=3, stop=[2, 4], temperature=0.5)
    await gateway.client.sample_async(ModelInput(), 4, params)
    [(path, headers, body)] = gateway.requests
    assert (path, headers["authorization"]) == ("/v1/tokens/generate", "Bearer k")
    assert body == {
        "model": "policy", "prompt_ids": [5, 6], "n": 4, "max_tokens": 9, "seed": 3, "stop_token_ids": [2, 4],
        "temperature": 0.5,
    }  # fmt: skip


async def test_log_probabilities_of_the_prompt_come_with_the_likeliest_tokens(gateway: Gateway) -> None:
    table = {"6": {"logprob": -2.0, "rank": 3}, "9": {"logprob": -0.5, "rank": 1}, "7": {"logprob": -1.0, "rank": 2}}
    gateway.script = [(200, {**SAMPLED, "prompt_logprobs": [None, table]})]
    response = await gateway.client.sample_async([5, 6], topk_prompt_logprobs=2)
    assert gateway.requests[0][2]["prompt_logprobs"] == 2
    assert response.prompt_logprobs == [None, -2.0]
    assert response.topk_prompt_logprobs == [None, [(9, -0.5), (7, -1.0)]]


async def test_log_probabilities_of_given_tokens_are_computed(gateway: Gateway) -> None:
    gateway.script = [(200, {"logprobs": [None, -0.5]})]
    assert await gateway.client.compute_logprobs_async([5, 6]) == [None, -0.5]
    assert gateway.client.compute_logprobs([5, 6]).result(30) == [None, -0.5]
    assert gateway.requests[0][0] == "/v1/tokens/logprobs"


async def test_a_busy_gateway_is_asked_again_as_one_that_may_know_the_call(gateway: Gateway) -> None:
    gateway.script = [(503, {"error": {"message": "busy"}}), (200, SAMPLED)]
    await gateway.client.sample_async([5])
    (_, first, _), (_, second, _) = gateway.requests
    assert first["idempotency-key"] == second["idempotency-key"]
    assert ("x-stainless-retry-count" in first, second["x-stainless-retry-count"]) == (False, "1")


@pytest.mark.parametrize(("status", "error"), [(400, InputError), (402, InputError), (404, InputError)])
def test_a_refusal_is_raised_at_once(gateway: Gateway, status: int, error: type[Exception]) -> None:
    gateway.script = [(status, {"error": {"message": "prompt_ids: expected a list"}})]
    with pytest.raises(error, match="prompt_ids: expected a list"):
        gateway.client.sample([5]).result(30)
    assert len(gateway.requests) == 1


def test_a_thread_of_a_future_knows_whose_call_it_is(gateway: Gateway) -> None:
    context = ContextPropagator(gateway.url)
    context.install()
    try:
        with use_agent("writer"):
            future = gateway.client.sample([5])
        future.result(30)
    finally:
        context.remove()
    assert gateway.requests[0][1]["x-agl-agent"] == "writer"
