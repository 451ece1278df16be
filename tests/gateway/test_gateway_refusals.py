"""Refused calls: recorded on their attempt before the agent is answered, and bounded whatever an agent sends."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_house import House, path

from agentlightning.gateway.attempts import MAX_SINGLE
from agentlightning.records import Claim, Finish, Rollout, Span
from agentlightning.store.base import RolloutQuery
from agentlightning.store.gateway_events import FAILED_CALLS, NO_CALLS, REFUSED_CALLS

HI = [{"role": "user", "content": "hi"}]


async def post(house: House, claim: Claim, route: str = "chat/completions", **body: Any) -> int:
    answer = await house.http().post(f"{path(claim)}/v1/{route}", json={"model": "policy", "messages": HI, **body})
    return answer.status_code


async def refusals(house: House, claim: Claim) -> list[Span]:
    return [span for span in await house.store.spans([claim.rollout.id]) if span.name == REFUSED_CALLS]


async def ended(house: House, claim: Claim, state: Any = "failed", **more: Any) -> Rollout:
    await house.store.finish([Finish(lease=claim.lease, state=state, error="the agent's own", **more)])
    [rollout] = await house.store.rollouts(RolloutQuery(ids=[claim.rollout.id]))
    return rollout


@pytest.mark.parametrize(
    ("route", "body", "fields"),
    [
        ("chat/completions", {"top_a": 0.5, "tools": [{"type": "a"}, {"type": "b"}]}, "tools + top_a"),
        ("chat/completions", {"n": "many"}, "n"),
        ("chat/completions", {"messages": [{"role": "nobody"}]}, "messages"),
        ("messages", {"max_tokens": 9, "context_management": {"edits": [{"type": "x"}]}}, "context_management"),
        ("responses", {"input": "hi", "background": True}, "background"),
    ],
)
async def test_a_refused_call_is_recorded_with_its_fields(house: House, route: str, body: Any, fields: str) -> None:
    claim = await house.claim()
    assert await post(house, claim, route, **body) in (400, 404)
    [span] = await refusals(house, claim)
    assert sorted(span.attributes["fields"].split(" + ")) == sorted(fields.split(" + "))
    assert span.attributes["count"] == 1
    rollout = await ended(house, claim)
    assert rollout.refused
    assert (rollout.warning or "").startswith(f"{NO_CALLS}: 1 call refused: ")


async def test_an_agent_that_goes_on_after_a_refusal_has_a_warning_and_is_not_refused(house: House) -> None:
    claim = await house.claim()
    assert await post(house, claim, top_a=0.5) == 400
    assert await post(house, claim) == 200
    rollout = await ended(house, claim)
    assert (rollout.refused, rollout.warning) == (False, "1 call refused: top_a 1")


async def test_a_loop_of_refused_calls_leaves_few_records_that_count_them_all(house: House) -> None:
    claim = await house.claim()
    for _ in range(128):
        assert await post(house, claim, top_a=0.5) == 400
    spans = await refusals(house, claim)
    assert sum(span.attributes["count"] for span in spans) == 128
    assert len(spans) <= MAX_SINGLE + 3


async def test_a_refusal_after_an_answered_call_is_recorded_however_many_were_before(house: House) -> None:
    claim = await house.claim()
    for _ in range(MAX_SINGLE):
        assert await post(house, claim, top_a=0.5) == 400
    assert await post(house, claim) == 200
    assert await post(house, claim, top_a=0.5) == 400
    rollout = await ended(house, claim)
    assert (rollout.refused, rollout.warning) == (True, f"{MAX_SINGLE + 1} calls refused: top_a {MAX_SINGLE + 1}")


async def test_a_call_that_is_not_authorised_or_over_is_no_refusal(house: House) -> None:
    claim = await house.claim()
    answer = await house.http().post(
        f"{path(claim)}/v1/chat/completions", json={}, headers={"authorization": "Bearer sk-agl-wrong"}
    )
    assert answer.status_code == 401
    assert await refusals(house, claim) == []


async def test_an_agent_that_ends_for_want_of_a_model_did_not_give_up(house: House) -> None:
    there, away = await house.claim(replica=0), await house.claim(replica=1)
    for claim in (there, away):
        assert await post(house, claim) == 200
    house.engine.refusals = [(500, {"error": {"message": "out of memory"}})] * 100
    assert [await post(house, away) for _ in range(3)] == [502] * 3
    events = [span for span in await house.store.spans([away.rollout.id]) if span.name == FAILED_CALLS]
    assert len(events) == 1
    gave_up = [(await ended(house, claim, exited=True)).gave_up for claim in (there, away)]
    assert gave_up == [True, False]
