"""External models that are busy, away or broken, and agents that go away while one answers."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web
from anthropic import AsyncAnthropic
from exchange import Exchange
from external_house import HI, failures, judge, post, recorded, serve
from external_server import ExternalServer, sse
from gateway_house import House, path

from agentlightning.records import Claim

# --- when the external model fails --------------------------------------------------------------------------------------


async def test_busy_external_models_are_asked_again(house: House, external: ExternalServer, claim: Claim) -> None:
    external.refusals = [web.Response(status=status, headers={"retry-after": "0"}) for status in (429, 503)]
    assert (await post(house, claim)).status_code == 200
    assert len(external.requests) == 3
    assert await failures(house, claim) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dropped_connection_is_made_again(
    house: House, external: ExternalServer, claim: Claim, stream: bool
) -> None:
    external.drop = 1
    assert (await post(house, claim, stream=stream)).status_code == 200
    assert len(await recorded(house, claim)) == 1


async def test_the_last_refusal_is_handed_to_the_agent_as_it_is(house: House, external: ExternalServer) -> None:
    await serve(house, "judge", url=external.url, models=["gpt-5"], max_retries=1)
    claim = await house.claim()
    body = '{"error": {"message": "slow down", "type": "rate_limit"}}'
    headers = {"retry-after": "0", "x-request-id": "req_7", "x-internal": "no"}
    external.refusals = [
        web.Response(status=429, text=body, content_type="application/json", headers=headers) for _ in range(3)
    ]
    with pytest.raises(openai.RateLimitError) as caught:
        await judge(house, claim).chat.completions.create(model="gpt-5", messages=HI)
    response = caught.value.response
    assert response.text == body
    assert {name: response.headers.get(name) for name in headers} == {**headers, "x-internal": None}
    assert len(external.requests) == 2
    assert await recorded(house, claim) == []
    (span,) = await failures(house, claim)
    assert span.attributes["status"] == 429
    assert (span.attributes["model"], span.attributes["external"]) == ("gpt-5", "judge")


@pytest.mark.parametrize(("status", "headers"), [(400, {}), (401, {}), (404, {}), (429, {"retry-after": "3600"})])
async def test_refusals_that_another_try_does_not_change_are_handed_on_at_once(
    house: House, external: ExternalServer, claim: Claim, status: int, headers: dict[str, str]
) -> None:
    external.refusals = [web.json_response({"error": {"message": "no"}}, status=status, headers=headers)]
    assert (await post(house, claim)).status_code == status
    assert len(external.requests) == 1


async def test_an_external_model_that_is_not_there_is_named(house: House) -> None:
    await serve(house, "judge", url="http://127.0.0.1:9/v1", models=["gpt-5"], max_retries=0)
    claim = await house.claim()
    reply = await post(house, claim, model="gpt-5")
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "external_unreachable")
    assert "external model 'judge' cannot be reached" in reply.json()["error"]["message"]
    (span,) = await failures(house, claim)
    assert span.attributes["status"] is None


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ({"status": 307, "headers": {"location": "http://127.0.0.1:9/elsewhere"}}, "external_redirected"),
        ({"text": "<html>", "content_type": "text/html"}, "external_unreadable"),
    ],
)
async def test_a_redirect_and_an_answer_that_is_no_json_are_errors(
    house: House, external: ExternalServer, claim: Claim, answer: dict[str, Any], code: str
) -> None:
    external.refusals = [web.Response(**answer)]
    reply = await post(house, claim)
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, code)
    assert len(external.requests) == 1


async def test_an_answer_has_a_deadline(house: House, external: ExternalServer) -> None:
    external.gate = asyncio.Event()
    await serve(house, "judge", url=external.url, models=["gpt-5"], timeout_s=0.05)
    claim = await house.claim()
    reply = await post(house, claim, model="gpt-5")
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert await recorded(house, claim) == []
    assert len(await failures(house, claim)) == 1


async def test_a_stream_that_breaks_off_ends_with_an_error(
    house: House, external: ExternalServer, claim: Claim
) -> None:
    external.die_after = 3
    with pytest.raises(openai.APIError, match="external model 'judge'"):
        async for _ in await judge(house, claim).chat.completions.create(model="gpt-5", messages=HI, stream=True):
            pass
    assert await recorded(house, claim) == []
    assert len(await failures(house, claim)) == 1


async def test_an_error_within_a_stream_is_passed_on_and_is_no_call(
    house: House, external: ExternalServer, claim: Claim
) -> None:
    external.events = [*external._chat_events({"model": "gpt-5"})[:2], sse({"error": {"message": "overloaded"}})]
    with pytest.raises(openai.APIError, match="overloaded"):
        async for _ in await judge(house, claim).chat.completions.create(model="gpt-5", messages=HI, stream=True):
            pass
    assert await recorded(house, claim) == []
    (span,) = await failures(house, claim)
    assert "overloaded" in span.attributes["error"]


async def test_a_route_of_another_protocol_is_refused_with_the_routes_that_there_are(
    house: House, external: ExternalServer, claim: Claim, claude: AsyncAnthropic
) -> None:
    with pytest.raises(anthropic.BadRequestError, match="expected a call of chat/completions or completions"):
        await claude.messages.create(model="gpt-5", max_tokens=9, messages=HI)
    with pytest.raises(openai.BadRequestError, match="expected a call of messages, got chat/completions"):
        await judge(house, claim).chat.completions.create(model="claude-x", messages=HI)
    assert external.requests == []


# --- agents that go away ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("grace_s", "ended"), [(60.0, ("stop", "Itissunny.")), (0.01, ("abandoned", "It"))])
async def test_a_call_whose_agent_has_gone_is_finished_within_the_grace_period_or_abandoned(
    house: House, external: ExternalServer, claim: Claim, grace_s: float, ended: tuple[str, str]
) -> None:
    external.gate = asyncio.Event()
    app = house.gateway(grace_s=grace_s)
    body = {"model": "gpt-5", "messages": HI, "stream": True}
    call = Exchange(app, claim.key, f"{path(claim)}/v1/chat/completions", body)
    await call.started.wait()
    assert b'"It"' in call.sent
    call.hang_up()
    if ended[0] == "stop":
        external.gate.set()
    await call.done()
    await app.close()
    (record,) = await recorded(house, claim)
    assert ((record.finish_reason, record.completion["content"]), record.policy) == (ended, "")
