"""What the tests of external models ask of a house: external models, calls for them, and what is recorded of those."""

from __future__ import annotations

from typing import Any

import httpx
from gateway_house import House, path
from openai import AsyncOpenAI

from agentlightning.gateway.external_calls import FAILED
from agentlightning.records import Call, Claim, Resource, Span

SECRET = "sk-the-servers-own-secret"
HI: Any = [{"role": "user", "content": "hi"}]


async def serve(house: House, name: str, **settings: Any) -> None:
    await house.store.put_resources([Resource(run_id=house.run_id, name=name, kind="external", value=settings)])


def judge(house: House, claim: Claim) -> AsyncOpenAI:
    return house.openai(claim)


async def recorded(house: House, claim: Claim) -> list[Call]:
    return await house.store.calls([claim.rollout.id])


async def failures(house: House, claim: Claim) -> list[Span]:
    return [span for span in await house.store.spans([claim.rollout.id]) if span.name == FAILED]


async def post(house: House, claim: Claim, **body: Any) -> httpx.Response:
    body = {"model": "gpt-4o-mini", "messages": HI, **body}
    return await house.http().post(f"{path(claim)}/v1/chat/completions", json=body)
