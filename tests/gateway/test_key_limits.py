"""Limits of serving keys: what is refused in which words, what is counted, and what is left after a gateway was killed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from gateway_house import END, House
from scripted_engine import ScriptedEngine
from test_sessions import HI, ServedHouse

from agentlightning.config.run import LIMITS_RESOURCE
from agentlightning.gateway.app import App
from agentlightning.gateway.limits import read_key_usage
from agentlightning.records import Resource
from agentlightning.rendering.renderer import Renderer

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "support", "messages": HI},
    "/v1/responses": {"model": "support", "input": "hi"},
    "/v1/messages": {"model": "support", "messages": HI, "max_tokens": 50},
    "/v1beta/models/support:generateContent": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
}


@pytest.fixture
async def served(house: House, renderer: Renderer) -> AsyncIterator[ServedHouse]:
    newer = await ScriptedEngine(lambda _: [*renderer.encode("It rains."), END], version=2).start()
    yield await ServedHouse(house, newer).serve()
    await newer.close()


async def limit(served: ServedHouse, **keys: Any) -> None:
    resource = Resource(run_id=served.run_id, name=LIMITS_RESOURCE, kind="limits", value={"keys": keys})
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


async def test_what_a_key_used_survives_the_gateway(served: ServedHouse) -> None:
    await limit(served, app={"max_tokens": 1})
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


async def test_the_usage_of_keys_is_listed_with_their_limits(served: ServedHouse) -> None:
    await limit(served, app={"max_tokens": 1000})
    await ask(served, "anna")
    [call] = await served.house.store.calls([(await served.rollouts())[0].id])
    [used] = await read_key_usage(served.house.store, served.run_id)
    assert (used.name, used.calls, used.tokens) == ("app", 1, call.prompt_tokens + len(call.sampled_ids))
    assert used.limits == {"max_tokens": 1000}
