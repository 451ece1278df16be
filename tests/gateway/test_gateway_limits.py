"""Limits of an attempt and of a run: what is refused, in which words, and what is counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from aiohttp import web
from exchange import Exchange
from external_house import HI, post, serve
from external_server import ExternalServer, sse
from gateway_house import SERVER_KEY, House, path

from agentlightning.config.run import LIMITS_RESOURCE
from agentlightning.gateway.app import App
from agentlightning.gateway.limits import CallLimits, LimitReachedError, ServerLimits
from agentlightning.gateway.server_settings import ServerSettings
from agentlightning.records import Claim, Finish, Resource, Span
from agentlightning.store import wire
from agentlightning.store.gateway_events import LIMIT_REACHED

BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "policy", "messages": HI},
    "completions": {"model": "policy", "prompt": "hi"},
    "responses": {"model": "policy", "input": "hi"},
    "messages": {"model": "policy", "messages": HI, "max_tokens": 50},
}
ADMIN = {"authorization": f"Bearer {SERVER_KEY}"}
CHAT = BODIES["chat/completions"]


async def limit(house: House, **tables: Any) -> None:
    value = {"attempt": {}, "run": {}, **tables}
    resource = Resource(run_id=house.run_id, name=LIMITS_RESOURCE, kind="limits", value=value)
    await house.store.put_resources([resource])


async def ask(
    house: House, claim: Claim, app: App | None = None, route: str = "chat/completions", **headers: str
) -> httpx.Response:
    return await house.http(app).post(f"{path(claim)}/v1/{route}", json=BODIES[route], headers=headers)


async def statuses(house: House, claim: Claim, count: int, app: App | None = None) -> list[int]:
    return [(await ask(house, claim, app)).status_code for _ in range(count)]


async def told(house: House, claim: Claim) -> list[Span]:
    return [span for span in await house.store.spans([claim.rollout.id]) if span.name == LIMIT_REACHED]


# --- totals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", BODIES)
async def test_a_call_too_many_is_refused_for_good_in_the_shape_of_the_protocol(house: House, route: str) -> None:
    await limit(house, attempt={"max_calls": 1})
    claim = await house.claim()
    assert (await ask(house, claim, route=route)).status_code == 200
    refused = await ask(house, claim, route=route)
    assert refused.status_code == 429
    assert refused.headers["x-should-retry"] == "false"
    assert "retry-after" not in refused.headers
    error = refused.json()["error"]
    assert "this attempt has made the 1 model calls that it may make (limits.attempt.max_calls)" in error["message"]
    if route == "messages":
        assert (refused.json()["type"], error["type"]) == ("error", "rate_limit_error")
    else:
        assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")


SCORED: dict[str, dict[str, Any]] = {
    "tokens/logprobs": {"model": "policy", "token_ids": [5] * 20},
    "completions": {"model": "policy", "prompt": [5] * 20, "echo": True, "logprobs": 1, "max_tokens": 0},
}


@pytest.mark.parametrize("route", SCORED)
@pytest.mark.parametrize("bound", [{"max_calls": 1}, {"max_tokens": 20}])
async def test_prompts_that_are_only_read_count_like_calls(house: House, route: str, bound: dict[str, int]) -> None:
    await limit(house, attempt=bound)
    claim = await house.claim()
    replies = [await house.http().post(f"{path(claim)}/v1/{route}", json=SCORED[route]) for _ in range(2)]
    assert [reply.status_code for reply in replies] == [200, 429]
    assert len(house.engine.requests) == 1


async def test_an_sdk_does_not_try_again_and_the_rollout_says_why(house: House) -> None:
    await limit(house, attempt={"max_calls": 1})
    claim = await house.claim()
    key = {"idempotency-key": "k"}
    first, again = [(await ask(house, claim, **key)).json() for _ in range(2)]
    assert first["id"] == again["id"]  # the retry of the last call gets its completion
    client = house.openai(claim, max_retries=5)
    for _ in range(2):
        with pytest.raises(openai.RateLimitError, match=r"limits\.attempt\.max_calls"):
            await client.chat.completions.create(**CHAT)
    assert 'agl_calls_total{protocol="chat",result="refused"} 2.0' in await house.metrics()
    (span,) = await told(house, claim)  # one, however often
    assert (span.attributes["setting"], span.status) == ("limits.attempt.max_calls", "error")


async def test_attempts_have_limits_of_their_own_and_runs_one_for_all(house: House) -> None:
    await limit(house, attempt={"max_calls": 2}, run={"max_calls": 3})
    one, other = await house.claim("a"), await house.claim("b")
    assert await statuses(house, one, 3) == [200, 200, 429]
    assert await statuses(house, other, 2) == [200, 429]
    (span,) = await told(house, other)
    assert span.attributes["setting"] == "limits.run.max_calls"


async def test_totals_survive_the_gateway(house: House) -> None:
    await limit(house, attempt={"max_calls": 2}, run={"max_calls": 5})
    one, other = await house.claim("a"), await house.claim("b")
    assert await statuses(house, one, 2) == [200, 200]
    assert await statuses(house, other, 1) == [200]
    await house.store.finish([Finish(lease=one.lease, state="failed", error="no")])
    second = house.gateway()
    assert await statuses(house, other, 2, second) == [200, 429]
    third = await house.claim("c")
    assert await statuses(house, third, 2, house.gateway()) == [200, 429]


async def test_what_other_gateways_record_through_this_server_counts(house: House) -> None:
    await limit(house, attempt={"max_calls": 2})
    claim, http = await house.claim(), house.http()
    assert await statuses(house, claim, 1) == [200]
    assert await statuses(house, claim, 1, house.gateway()) == [200]
    (_, theirs) = await house.store.calls([claim.rollout.id])
    reply = await http.post("/api/calls", json={"rollout_ids": [claim.rollout.id]}, headers=ADMIN)
    sent = next(call for call in reply.json() if call["id"] == theirs.id)
    again = await http.post("/api/append_calls", json={"calls": [sent]}, headers=ADMIN)
    assert again.status_code == 200, again.text
    assert await statuses(house, claim, 1) == [429]


async def test_concurrent_calls_do_not_pass_the_limit_together(house: House) -> None:
    await limit(house, attempt={"max_calls": 3})
    claim = await house.claim()
    answers = await asyncio.gather(*(ask(house, claim) for _ in range(10)))
    assert sorted(one.status_code for one in answers) == [200] * 3 + [429] * 7


@pytest.mark.parametrize("table", ["attempt", "run"])
@pytest.mark.parametrize("model", ["policy", "gpt-4o-mini"])
async def test_what_is_asked_for_is_reserved_so_that_calls_at_once_do_not_pass_a_limit_of_tokens_together(
    house: House, external: ExternalServer, spender: Claim, table: str, model: str
) -> None:
    await limit(house, **{table: {"max_tokens": 1}})
    asked = {} if table == "attempt" and model == "policy" else {"max_tokens": 100}
    answers = await asyncio.gather(*(post(house, spender, model=model, **asked) for _ in range(20)))
    assert sorted(one.status_code for one in answers) == [200] + [429] * 19
    assert {one.headers["x-should-retry"] for one in answers if one.status_code == 429} == {"false"}
    assert len(house.engine.requests) + len(external.requests) == 1


async def test_a_call_that_may_not_fit_waits_for_those_under_way_and_then_fits(house: House) -> None:
    await limit(house, attempt={"max_tokens": 400})
    claim = await house.claim()
    house.engine.gate, house.engine.hold_whole = asyncio.Event(), True
    url, http = f"{path(claim)}/v1/chat/completions", house.http()
    calls = [asyncio.create_task(http.post(url, json={**CHAT, "max_tokens": 250})) for _ in range(4)]
    while len(house.engine.requests) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await http.get(f"{path(claim)}/v1/models")
    assert len(house.engine.requests) == 2  # these two may use more than there is
    house.engine.gate.set()
    assert [one.status_code for one in await asyncio.gather(*calls)] == [200] * 4


@pytest.mark.parametrize("model", ["policy", "gpt-4o-mini"])
async def test_a_call_that_waits_ends_when_its_agent_goes_away(
    house: House, external: ExternalServer, spender: Claim, model: str
) -> None:
    await limit(house, attempt={"max_tokens": 400})
    gate = house.engine.gate = external.gate = asyncio.Event()
    house.engine.hold_whole = True
    url, body = f"{path(spender)}/v1/chat/completions", {"model": model, "messages": HI, "max_tokens": 390}
    first, second, third = (Exchange(house.app, spender.key, url, body) for _ in range(3))
    for waiting in (second, third):
        await waiting.watched.wait()
    third.hang_up()
    assert (await third.done(), third.status) == (b"", 499)
    gate.set()
    await asyncio.gather(first.done(), second.done())
    assert (first.status, second.status) == (200, 200)
    assert len(house.engine.requests) + len(external.requests) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("bound", [{"max_calls": 1}, {"max_tokens": 25}])
async def test_log_probabilities_of_a_prompt_are_no_refusal_of_the_call_that_they_belong_to(
    house: House, bound: dict[str, int], stream: bool
) -> None:
    await limit(house, attempt=bound)
    claim = await house.claim()
    body = {"model": "policy", "prompt": [5] * 20, "echo": True, "logprobs": 1, "n": 2, "stream": stream}
    replies = [await house.http().post(f"{path(claim)}/v1/completions", json=body) for _ in range(2)]
    assert [one.status_code for one in replies] == [200, 429]
    assert len(await house.store.calls([claim.rollout.id])) == 2


async def test_a_call_that_failed_does_not_count(house: House) -> None:
    await limit(house, attempt={"max_calls": 1})
    claim = await house.claim()
    house.engine.raw = "nonsense"
    assert await statuses(house, claim, 2) == [502, 502]
    house.engine.raw = None
    assert await statuses(house, claim, 2) == [200, 429]


async def test_a_limit_that_is_raised_lets_the_attempt_go_on(house: House) -> None:
    await limit(house, run={"max_calls": 1})
    claim = await house.claim()
    assert await statuses(house, claim, 2) == [200, 429]
    await limit(house, run={"max_calls": 2})
    assert await statuses(house, claim, 2, house.gateway()) == [200, 429]


# --- tokens of external models ----------------------------------------------------------------------------------------


@pytest.fixture
async def spender(house: House, external: ExternalServer) -> Claim:
    """An attempt of a run with an external model, whose calls have 11 and 7 tokens."""
    await serve(house, "judge", url=external.url, models=["gpt-4o-mini"], key_env="JUDGE_KEY")
    return await house.claim()


@pytest.mark.parametrize("table", ["attempt", "run"])
async def test_reported_tokens_count(house: House, spender: Claim, table: str) -> None:
    await limit(house, **{table: {"max_tokens": 20}})
    assert [(await post(house, spender)).status_code for _ in range(3)] == [200, 200, 429]
    assert await statuses(house, spender, 1) == [429]  # what is over is over, for the policy too
    (span,) = await told(house, spender)
    assert f"has used 36 of 20 tokens (limits.{table}.max_tokens)" in str(span.attributes)
    assert (await statuses(house, spender, 1, house.gateway())) == [429]


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
async def test_every_choice_of_a_stream_without_a_report_is_estimated(
    house: House, external: ExternalServer, spender: Claim, route: str
) -> None:
    await limit(house, attempt={"max_tokens": 100_000})
    said = "word " * 1000
    part = {"text": said} if route == "completions" else {"delta": {"content": said}}
    texts = [sse({"choices": [{"index": index, **part}]}) for index in range(5)]
    ends = [sse({"choices": [{"index": index, "delta": {}, "finish_reason": "stop"}]}) for index in range(5)]
    external.events = [*texts, *ends, b"data: [DONE]\n\n"]
    body = {"model": "gpt-4o-mini", "stream": True, "n": 5}
    body |= {"prompt": "hi"} if route == "completions" else {"messages": HI}
    assert (await house.http().post(f"{path(spender)}/v1/{route}", json=body)).status_code == 200
    (call,) = await house.store.calls([spender.rollout.id])
    assert 6250 <= call.usage["sampled_tokens"] < 6400


async def test_a_response_in_the_background_is_refused_where_tokens_count(
    house: House, external: ExternalServer, spender: Claim
) -> None:
    body = {"model": "gpt-4o-mini", "input": "hi", "background": True}
    url = f"{path(spender)}/v1/responses"
    assert (await house.http().post(url, json=body)).status_code == 200
    await limit(house, run={"max_tokens": 1000})
    http = house.http(house.gateway())
    refused = await http.post(url, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")
    assert "this run limits tokens" in refused.json()["error"]["message"]
    assert len(external.requests) == 1
    assert (await http.post(url, json={**body, "background": False})).status_code == 200


async def test_a_call_whose_agent_has_gone_is_counted_to_its_end(
    house: House, external: ExternalServer, spender: Claim
) -> None:
    await limit(house, attempt={"max_tokens": 18})
    external.gate = asyncio.Event()
    app = house.gateway(grace_s=0.0)
    body = {"model": "gpt-4o-mini", "messages": HI, "max_tokens": 100_000}
    call = Exchange(app, spender.key, f"{path(spender)}/v1/chat/completions", body)
    await call.watched.wait()
    call.hang_up()
    assert (await house.http(app).get(f"{path(spender)}/v1/models")).status_code == 200  # the gateway knows by now
    external.gate.set()
    await call.done()
    (record,) = await house.store.calls([spender.rollout.id])
    assert (record.usage, record.delivered) == ({"prompt_tokens": 11, "sampled_tokens": 7}, False)
    assert await statuses(house, spender, 1, app) == [429]
    await app.close()


async def test_a_stream_that_breaks_off_counts_with_what_came(
    house: House, external: ExternalServer, spender: Claim
) -> None:
    await limit(house, attempt={"max_tokens": 100})
    external.text, external.die_after = "word " * 100, 80
    await post(house, spender, stream=True, max_tokens=10_000)
    (record,) = await house.store.calls([spender.rollout.id])
    assert record.finish_reason == "abandoned"
    assert 50 < record.usage["sampled_tokens"] < 200


@pytest.mark.parametrize("bound", [{"max_tokens": 900}, {"max_calls": 1}])
async def test_a_call_that_was_sent_and_timed_out_costs_what_it_asked_for(
    house: House, external: ExternalServer, bound: dict[str, int]
) -> None:
    await serve(house, "judge", url=external.url, models=["gpt-4o-mini"], key_env="JUDGE_KEY", timeout_s=0.05)
    claim = await house.claim()
    await limit(house, attempt=bound)
    external.gate = asyncio.Event()
    assert (await post(house, claim, max_tokens=500, n=2)).status_code == 504
    (record,) = await house.store.calls([claim.rollout.id])
    assert record.finish_reason == "abandoned"
    if "max_tokens" in bound:
        prompt = -(-len(external.requests[0].body) // 4)
        assert record.usage == {"prompt_tokens": prompt, "sampled_tokens": 1000, "estimated": True}
    assert (await post(house, claim)).status_code == 429
    assert len(external.requests) == 1


async def test_each_try_that_may_have_been_executed_costs(
    house: House, external: ExternalServer, spender: Claim
) -> None:
    await serve(house, "judge", url=external.url, models=["gpt-4o-mini"], key_env="JUDGE_KEY", max_retries=2)
    await limit(house, attempt={"max_tokens": 10_000})
    external.drop, external.refusals = 1, [web.json_response({}, status=503, headers={"retry-after": "0"})]
    assert (await post(house, spender, max_tokens=500)).status_code == 200
    (record,) = await house.store.calls([spender.rollout.id])
    prompt = -(-len(external.requests[0].body) // 4)
    assert record.usage == {"prompt_tokens": 11 + prompt, "sampled_tokens": 507, "estimated": True}


async def test_a_call_that_no_server_took_or_that_was_refused_costs_nothing(
    house: House, external: ExternalServer, spender: Claim
) -> None:
    await serve(house, "away", url="http://127.0.0.1:1/v1", models=["gpt-away"], max_retries=0)
    await limit(house, attempt={"max_tokens": 18})
    external.refusals = [web.json_response({"error": {"message": "no"}}, status=400)]
    assert (await post(house, spender, max_tokens=10_000)).status_code == 400
    assert (await post(house, spender, model="gpt-away", max_tokens=500)).status_code == 502
    assert await house.store.calls([spender.rollout.id]) == []


# --- what is under way ------------------------------------------------------------------------------------------------


async def test_a_request_too_many_may_come_again(house: House) -> None:
    claim = await house.claim()
    app = house.gateway(settings=ServerSettings(limits=ServerLimits(max_parallel_requests=1)))
    house.engine.gate = asyncio.Event()
    first = Exchange(app, claim.key, f"{path(claim)}/v1/chat/completions", {**CHAT, "stream": True})
    await first.started.wait()
    refused = await ask(house, claim, app)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "x-should-retry" not in refused.headers
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "(--max-parallel-requests of the server)" in refused.json()["error"]["message"]
    house.engine.gate.set()
    await first.done()
    assert await statuses(house, claim, 1, app) == [200]


async def test_what_is_under_way_is_counted_in_more_attempts_and_runs_than_are_remembered(house: House) -> None:
    limits = CallLimits(house.store, ServerLimits(max_parallel_requests=1), max_attempts=1, max_runs=1)
    rollouts = [(await house.claim(replica=replica)).rollout for replica in range(3)]
    admissions = await asyncio.gather(*(limits.enter(rollout, 1, resources=[]) for rollout in rollouts))
    for rollout in rollouts:
        with pytest.raises(LimitReachedError, match="1 requests are under way"):
            await limits.enter(rollout, 1, resources=[])
    for admission in admissions:
        admission.leave()
    (await limits.enter(rollouts[0], 1, resources=[])).leave()


async def test_bytes_under_way_are_counted_and_given_back(house: House) -> None:
    claim, app = (
        await house.claim(),
        house.gateway(settings=ServerSettings(limits=ServerLimits(max_request_bytes=4000))),
    )
    house.engine.gate = asyncio.Event()
    url = f"{path(claim)}/v1/chat/completions"
    long = {**CHAT, "messages": [{"role": "user", "content": "x " * 1500}]}
    first = Exchange(app, claim.key, url, {**long, "stream": True})
    await first.started.wait()
    reply = await house.http(app).post(url, json=long)
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "--max-request-bytes of the server" in reply.json()["error"]["message"]
    assert (await house.http(app).post(url, json=CHAT)).status_code == 200
    house.engine.gate.set()
    await first.done()
    assert (await house.http(app).post(url, json=long)).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_no_limit_lets_pass_is_too_large(house: House, chunked: bool) -> None:
    claim, app = (
        await house.claim(),
        house.gateway(settings=ServerSettings(limits=ServerLimits(max_request_bytes=4000))),
    )
    body = json.dumps({**CHAT, "messages": [{"role": "user", "content": "x " * 5000}]}).encode()

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    reply = await house.http(app).post(f"{path(claim)}/v1/chat/completions", content=parts() if chunked else body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
    assert await statuses(house, claim, 1, app) == [200]


async def test_spans_that_an_agent_sends_have_the_servers_limits(house: House) -> None:
    claim = await house.claim()
    app = house.gateway(settings=ServerSettings(limits=ServerLimits(max_request_bytes=100)))
    reply = await house.http(app).post(f"{path(claim)}/v1/traces", json={"resourceSpans": [{}] * 100})
    assert reply.status_code == 413


@pytest.mark.parametrize(
    ("kind", "value", "setting"),
    [
        ("limits", {"run": {"max_tokens": -1}}, "limits.run.max_tokens"),
        ("limits", {"attempt": {"max_calls": 0}}, "limits.attempt.max_calls"),
        ("limits", {"attempt": {"max_call": 1}}, "limits.attempt.max_call"),
        ("external", {"url": "https://h/v1", "models": ["m"], "timeout_s": float("nan")}, "external.n.timeout_s"),
    ],
)
async def test_settings_that_would_limit_nothing_are_not_stored(
    house: House, kind: Any, value: dict[str, Any], setting: str
) -> None:
    resource = Resource(run_id=house.run_id, name="n", kind=kind, value=value)
    body = wire.encode({"resources": [resource]}, "resources")
    headers = {**ADMIN, "content-type": wire.CONTENT_TYPE}
    reply = await house.http().post("/api/put_resources", content=body, headers=headers)
    assert reply.status_code == 422, reply.text
    assert setting in reply.json()["error"]["message"]
    assert "n" not in {one.name for one in await house.store.resources(house.run_id)}


async def test_limits_that_cannot_be_read_let_nothing_pass(house: House) -> None:
    claim = await house.claim()
    await limit(house, attempt={"max_call": 1})
    reply = await ask(house, claim)
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "limits_misconfigured")
    assert "did you mean 'max_calls'?" in reply.json()["error"]["message"]
