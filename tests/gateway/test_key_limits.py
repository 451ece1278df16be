"""Limits of serving keys: what is refused in which words, what is counted, and what is left after a gateway was killed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from gateway_house import END, House
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine
from test_sessions import HI, ServedHouse

from agentlightning.config.limits import LIMITS_RESOURCE
from agentlightning.gateway.app import App
from agentlightning.gateway.usage import DAY_NS, MINUTE_NS, Usage, read_key_usage
from agentlightning.records import Call, Resource, Sampling
from agentlightning.rendering.renderer import Renderer

PRICES = {"input_cost_per_token": 0.001, "output_cost_per_token": 0.01}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "support", "messages": HI},
    "/v1/responses": {"model": "support", "input": "hi"},
    "/v1/messages": {"model": "support", "messages": HI, "max_tokens": 50},
    "/v1beta/models/support:generateContent": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
}


@pytest.fixture
async def served(house: House, renderer: Renderer) -> AsyncIterator[ServedHouse]:
    newer = await ScriptedEngine(lambda _: [*renderer.encode("It rains."), END], version=2).start()
    yield await ServedHouse(house, newer).serve(record=True)
    await newer.close()


async def limit(served: ServedHouse, prices: dict[str, float] | None = None, **keys: Any) -> None:
    value = {"keys": keys, **(prices or {})}
    resource = Resource(run_id=served.run_id, name=LIMITS_RESOURCE, kind="limits", value=value)
    await served.house.store.put_resources([resource])


async def ask(served: ServedHouse, session: str | None = None, app: App | None = None) -> httpx.Response:
    return await served.post("/v1/chat/completions", BODIES["/v1/chat/completions"], session, app=app)


@pytest.mark.parametrize("route", BODIES)
async def test_a_budget_that_is_used_up_is_refused_in_the_shape_of_each_protocol(
    served: ServedHouse, route: str
) -> None:
    await limit(served, app={"max_tokens": 1})
    assert (await served.post(route, BODIES[route], "anna")).status_code == 200
    refused = await served.post(route, BODIES[route], "anna")
    assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false")
    error = refused.json()["error"]
    assert "this key has used" in error["message"]
    assert "of 1 tokens (limits.keys.app.max_tokens)" in error["message"]
    if "messages" in route:
        assert (refused.json()["type"], error["type"]) == ("error", "rate_limit_error")
    elif "v1beta" in route:
        assert (error["code"], error["status"]) == (429, "RESOURCE_EXHAUSTED")
    else:
        assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")


async def test_calls_of_a_minute_are_limited_and_the_refusal_says_when_to_try_again(served: ServedHouse) -> None:
    await limit(served, app={"max_calls_per_minute": 2})
    assert [(await ask(served, "anna")).status_code for _ in range(2)] == [200, 200]
    refused = await ask(served, "anna")
    assert refused.status_code == 429
    assert 0 < int(refused.headers["retry-after"]) <= 61
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "(limits.keys.app.max_calls_per_minute)" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "bound", [{"max_tokens": 1}, {"max_tokens_per_day": 1}, {"max_budget": 0.001}, {"max_budget_per_day": 0.001}]
)
@pytest.mark.parametrize("record", [True, False])
async def test_what_a_key_used_survives_the_gateway(served: ServedHouse, bound: dict[str, float], record: bool) -> None:
    await served.serve(record=record)
    await limit(served, PRICES, app=bound)
    assert (await ask(served, "anna")).status_code == 200
    assert (await ask(served, "bert", served.house.gateway())).status_code == 429


async def test_a_key_that_used_what_it_may_opens_no_session_and_hinders_no_other_key(served: ServedHouse) -> None:
    await limit(served, app={"max_calls": 1})
    assert [(await ask(served)).status_code for _ in range(3)] == [200, 429, 429]
    assert len(await served.rollouts()) == 1
    served.secret = await served.key()
    assert (await ask(served)).status_code == 200
    served.secret = (await served.house.store.create_token("unbounded", "client", served.run_id)).secret
    assert [(await ask(served)).status_code for _ in range(3)] == [200, 200, 200]


async def test_a_repetition_of_the_last_call_that_a_key_may_make_is_answered_by_another_gateway(
    served: ServedHouse,
) -> None:
    await limit(served, app={"max_calls": 1})
    body, retry = BODIES["/v1/chat/completions"], {"x-stainless-retry-count": "1"}
    first = await served.post("/v1/chat/completions", body, "anna")
    again = await served.post("/v1/chat/completions", body, "anna", app=served.house.gateway(), **retry)
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])


async def test_the_usage_of_keys_is_told_with_their_limits(served: ServedHouse) -> None:
    await limit(served, PRICES, app={"max_tokens": 1000})
    await ask(served, "anna")
    [call] = await served.house.store.calls([(await served.rollouts())[0].id])
    [used] = await read_key_usage(served.house.store, served.run_id, call.finished_ns)
    tokens = call.prompt_tokens + len(call.sampled_ids)
    spend = call.prompt_tokens * 0.001 + len(call.sampled_ids) * 0.01
    assert (used.name, used.calls, used.tokens, used.tokens_today) == ("app", 1, tokens, tokens)
    assert used.spend == used.spend_today == pytest.approx(spend)
    assert used.limits == {"max_tokens": 1000}
    [later] = await read_key_usage(served.house.store, served.run_id, call.finished_ns + DAY_NS)
    assert (later.tokens, later.tokens_today, later.spend_today) == (tokens, 0, 0.0)


# --- totals -----------------------------------------------------------------------------------------------------------

TIMES = st.lists(st.integers(0, 4 * DAY_NS), max_size=30)


def counted(times: list[int], now_ns: int) -> Usage:
    usage = Usage()
    for number, time_ns in enumerate(times):
        usage.add(a_call(f"c{number}", time_ns), lambda _, prompt, sampled: prompt + sampled, now_ns)
    return usage


def a_call(name: str, time_ns: int) -> Call:
    return Call(
        id=name,
        run_id="r",
        rollout_id="o",
        attempt=1,
        protocol="chat",
        model="m",
        policy="default",
        parent_id=None,
        suffix_ids=[1, 2],
        sampled_ids=[3],
        logprobs=[-0.1],
        versions=[1],
        prompt_tokens=2,
        started_ns=time_ns,
        finished_ns=time_ns,
        sampling=Sampling(),
        messages=[],
        completion={},
        request_hash="",
        history_hash="",
    )


@given(TIMES, TIMES, st.integers(0, 4 * DAY_NS))
def test_totals_of_two_parts_are_those_of_the_whole(one: list[int], other: list[int], more_ns: int) -> None:
    now_ns = max([*one, *other, 0]) + more_ns
    whole, sum_of_parts = counted([*one, *other], now_ns), counted(one, now_ns).plus(counted(other, now_ns))
    days = [time_ns // DAY_NS for time_ns in [*one, *other]]
    assert whole.calls == sum_of_parts.calls == len(days)
    assert whole.tokens == sum_of_parts.tokens == whole.spend == 3 * len(days)
    today = 3 * days.count(now_ns // DAY_NS)
    assert whole.on_day(now_ns) == sum_of_parts.on_day(now_ns) == (today, float(today))
    recent = sum(time_ns > now_ns - MINUTE_NS for time_ns in [*one, *other])
    assert len(whole.starts) == len(sum_of_parts.starts) == recent
