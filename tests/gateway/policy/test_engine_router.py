"""Engines as the gateway sees them: which one takes a call, how it is spoken to, what it may not do, and holds."""

from __future__ import annotations

import re
from typing import Any

import orjson
import pytest
from aiohttp import web
from gateway_house import END, House, path
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine

from agentlightning.errors import EngineError
from agentlightning.gateway.policy.engine_client import SampledTokens, listed_context, read_answer
from agentlightning.gateway.policy.engine_router import SLACK, Balancer
from agentlightning.records import Sampling

HI: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
A, B = "http://a", "http://b"


class Clock:
    """A time that tests move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# --- which engine ---------------------------------------------------------------------------------------------------------


def test_a_new_attempt_goes_to_the_least_busy_engine_and_stays_there() -> None:
    balancer = Balancer(Clock())
    first = balancer.choose([A, B], "one")
    first.in_flight = 1
    other = balancer.choose([A, B], "two")
    assert other is not first
    other.in_flight = 5
    assert balancer.choose([A, B], "two") is other
    assert balancer.choose([A, B], "one") is first


def test_an_attempt_leaves_an_engine_that_has_far_more_to_do() -> None:
    balancer = Balancer(Clock())
    home = balancer.choose([A, B], "one")
    home.in_flight = SLACK
    assert balancer.choose([A, B], "one") is home
    home.in_flight = SLACK + 1
    assert balancer.choose([A, B], "one") is not home


def test_an_engine_that_fails_rests_for_ever_longer_and_is_tried_again() -> None:
    clock = Clock()
    balancer = Balancer(clock)
    engine = balancer.choose([A, B], "one")
    rests = []
    for _ in range(7):
        balancer.failed(engine)
        rests.append(engine.away_until - clock.now)
        assert balancer.choose([A, B], "one").url != engine.url
    assert rests == sorted(rests)
    assert rests[-1] == 15.0
    clock.now += 15.0
    other = balancer.choose([A, B], "one")
    other.in_flight = 1
    assert balancer.choose([A, B], "new") is engine
    balancer.answered(engine)
    assert engine.backoff.failures == 0


async def test_a_dead_engine_is_left_for_one_that_lives(house: House) -> None:
    second = await ScriptedEngine(house.engine.answers).start()
    gone = await ScriptedEngine(house.engine.answers).start()
    await gone.close()
    await house.serve_policy(endpoints=[gone.url, second.url])
    for replica in range(4):
        claim = await house.claim(replica=replica)
        assert (await house.http().post(f"{path(claim)}/v1/chat/completions", json=HI)).status_code == 200
    assert len(second.requests) == 4
    metrics = await house.metrics()
    assert second.url in metrics
    await second.close()


# --- how it is spoken to --------------------------------------------------------------------------------------------------


class KeyedEngine:
    """An engine that wants a key, and refuses as it is told."""

    def __init__(self, ids: list[int], key: str | None = None, models: Any = None) -> None:
        self.ids = ids
        self.key = key
        self.models = models
        """What it says of its models; None: that it has no such route."""
        self.requests: list[dict[str, Any]] = []
        self.refusals: list[web.Response] = []
        self.url = ""

    async def __aenter__(self) -> KeyedEngine:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        if self.models is not None:
            app.router.add_get("/v1/models", self._list)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _list(self, http: web.Request) -> web.Response:
        return web.json_response(self.models)

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        if self.key is not None and http.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "who are you?"}}, status=401)
        if self.refusals:
            return self.refusals.pop(0)
        self.requests.append(await http.json())
        content = [{"token_id": index, "logprob": -0.25} for index in self.ids]
        choice = {"token_ids": self.ids, "logprobs": {"content": content}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice]})


LISTED = {"data": [{"id": "base", "max_model_len": 64}, {"id": "lora"}]}


@pytest.mark.parametrize("asked", [None, 5, 32_000])
async def test_what_is_asked_for_is_bounded_by_what_the_context_holds(house: House, asked: int | None) -> None:
    async with KeyedEngine([5, END], models=LISTED) as engine:
        await house.serve_policy(endpoints=[engine.url], served_model="lora")
        claim = await house.claim()
        reply = await house.http().post(f"{path(claim)}/v1/chat/completions", json={**HI, "max_tokens": asked})
        assert reply.status_code == 200
        [call] = await house.store.calls([claim.rollout.id])
        [sent] = engine.requests
        assert sent["model"] == "lora"
        assert sent["sampling_params"]["max_tokens"] == min(asked or 64, 64 - call.prompt_tokens)
        assert call.sampling.max_tokens == asked


@pytest.mark.parametrize("models", ["none", {"data": [{"id": 3}]}, {"data": 1}, []])
def test_an_engine_that_lists_no_context_has_none(models: Any) -> None:
    assert listed_context(orjson.dumps(models), "policy") is None


async def test_an_engine_that_was_away_may_have_another_context(house: House) -> None:
    claim, app = await house.claim(), house.gateway()
    url = f"{path(claim)}/v1/chat/completions"
    house.engine.context = 64
    assert (await house.http(app).post(url, json=HI)).status_code == 200
    house.engine.context, house.engine.drop = 1000, 2  # the kept connection and a new one
    assert (await house.http(app).post(url, json={**HI, "max_tokens": 900})).status_code == 200
    assert house.engine.requests[-1]["sampling_params"]["max_tokens"] == 900


async def test_the_key_of_an_engine_comes_from_the_environment(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async with KeyedEngine([5, END], key="secret-key") as engine:
        await house.serve_policy(endpoints=[engine.url], key_env="TEST_ENGINE_KEY")
        claim = await house.claim()
        monkeypatch.delenv("TEST_ENGINE_KEY", raising=False)
        refused = await house.http().post(f"{path(claim)}/v1/chat/completions", json=HI)
        assert refused.status_code == 502
        assert "TEST_ENGINE_KEY" in refused.json()["error"]["message"]
        assert f'agl_engine_calls_in_flight{{url="{engine.url}"}} 1.0' not in (await house.http().get("/metrics")).text
        monkeypatch.setenv("TEST_ENGINE_KEY", "secret-key\n")  # as a file that it was read from ends
        assert (await house.http().post(f"{path(claim)}/v1/chat/completions", json=HI)).status_code == 200


async def test_redirects_are_not_followed(house: House) -> None:
    async with KeyedEngine([5, END]) as engine:
        engine.refusals = [web.Response(status=307, headers={"location": f"{house.engine.url}/inference/v1/generate"})]
        await house.serve_policy(endpoints=[engine.url])
        claim = await house.claim()
        reply = await house.http().post(f"{path(claim)}/v1/chat/completions", json=HI)
        assert reply.status_code == 502
        assert house.engine.requests == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("logprobs", "nonsense"), ("unsupported_params", "nonsense")],
)
async def test_a_policy_with_a_value_that_means_nothing_is_refused(house: House, field: str, value: Any) -> None:
    await house.serve_policy(**{field: value})
    claim = await house.claim()
    reply = await house.http().post(f"{path(claim)}/v1/chat/completions", json=HI)
    assert reply.status_code == 502
    assert field in reply.json()["error"]["message"]


NAMES = ["choices", "logprobs", "content", "token_ids", "logprob", "finish_reason", "weight_versions"]
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)),
    max_leaves=8,
)


@given(data=anything)
def test_whatever_an_engine_says_is_read_or_an_error_of_the_engine(data: Any) -> None:
    sampled = SampledTokens()
    try:
        sampled.add(read_answer(orjson.dumps(data)), 1)
    except EngineError:
        return
    assert len(sampled.ids) == len(sampled.logprobs)


@pytest.mark.parametrize("logprob", [-9999.0, -1e9, -104.5])
def test_a_log_probability_that_no_sampled_token_has_is_an_error_of_the_engine(logprob: float) -> None:
    content = [{"token_id": 1, "logprob": -103.0}, {"token_id": 2, "logprob": logprob}]
    data = {"choices": [{"token_ids": [1, 2], "logprobs": {"content": content}, "finish_reason": "stop"}]}
    with pytest.raises(EngineError, match=re.escape(f"the log-probability {logprob:g}, expected at least -104")):
        SampledTokens().add(read_answer(orjson.dumps(data)), 1)


def test_labels_that_are_no_numbers_are_the_policys_version() -> None:
    sampled = SampledTokens()
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    content = [{"token_id": 1, "logprob": -1.0}, {"token_id": 2, "logprob": -2.0}]
    choice = {"token_ids": [1, 2], "logprobs": {"content": content}, "finish_reason": "stop", "weight_versions": spans}
    sampled.add(read_answer(orjson.dumps({"choices": [choice]})), 3)
    assert [span.version for span in sampled.versions] == [3, 4]


# --- what it may not do ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "policy", "mode", "status"),
    [
        (Sampling(top_p=0.9), {}, "train", 200),
        (Sampling(top_p=0.9), {"structured": "refuse"}, "train", 409),
        (Sampling(top_p=0.9), {"structured": "context_only"}, "train", 409),
        (Sampling(top_p=0.9), {"logprobs": "raw"}, "train", 409),
        (Sampling(top_p=0.9), {}, "eval", 200),
        (Sampling(temperature=0.7), {}, "train", 200),
        (Sampling(temperature=0.7), {"logprobs": "raw"}, "train", 409),
        (Sampling(temperature=0.0), {"logprobs": "raw"}, "eval", 200),
    ],
)
async def test_what_could_not_be_trained_on_is_not_sampled(
    house: House, sampling: Sampling, policy: dict[str, Any], mode: Any, status: int
) -> None:
    await house.serve_policy(**policy)
    claim = await house.claim(sampling=sampling, mode=mode)
    reply = await house.http().post(f"{path(claim)}/v1/chat/completions", json=HI)
    assert reply.status_code == status
    cut = {"logits": {"top_p": 0.9}} if mode == "train" and sampling.top_p < 1 else {}
    assert [call.decoding for call in await house.store.calls([claim.rollout.id])] == [cut] * (status == 200)
