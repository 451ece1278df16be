"""OpenEnv's checks of captured traces find nothing wrong with our record, and its probe calls the endpoint trainable."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import python_drivers
from openenv_capture import ask, check_record, need_openenv
from sdk_house import PARAMETERS, QUESTION, RESULT, THANKS, Place, SdkHouse, open_house

from agentlightning.adapters.side_calls import side_calls

pytestmark = pytest.mark.slow

FUNCTION = {"name": "weather", "parameters": PARAMETERS}


async def post(place: Place, route: str, body: dict[str, Any]) -> Any:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {place.key}"}) as client:
        reply = await client.post(place.anthropic_base_url + route, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()


async def google(place: Place) -> None:
    contents: list[Any] = [{"role": "user", "parts": [{"text": QUESTION}]}]
    for _ in range(3):
        asked = {"contents": contents, "tools": [{"functionDeclarations": [FUNCTION]}]}
        answer = (await post(place, "/v1beta/models/policy:generateContent", asked))["candidates"][0]["content"]
        called = any("functionCall" in part for part in answer["parts"])
        result = {"functionResponse": {"name": "weather", "response": {"output": RESULT}}}
        contents += [answer, {"role": "user", "parts": [result if called else {"text": THANKS}]}]


CLIENTS: dict[str, Callable[[Place], Awaitable[Any]]] = {
    "Chat Completions": lambda place: python_drivers.chat(place, True),
    "Responses": lambda place: python_drivers.responses(place, True),
    "Messages": lambda place: python_drivers.messages(place, True),
    "generateContent": google,
}


@pytest.mark.parametrize(
    "client", [pytest.param(name, marks=() if name == "Messages" else pytest.mark.long) for name in CLIENTS]
)
async def test_openenv_finds_nothing_wrong_with_the_record_of_a_client_and_the_same_side_calls(
    client: str, tmp_path: Path
) -> None:
    need_openenv()
    async with open_house(tmp_path) as house:
        place = await house.place(lease_s=600.0)
        title = [{"role": "system", "content": "You write titles."}, {"role": "user", "content": THANKS}]
        await CLIENTS[client](place)
        await post(place, "/v1/chat/completions", {"model": "policy", "messages": title})
        calls = await house.calls(place)
    assert list(side_calls(calls).values()) == ["title"]
    await check_record(calls)


async def test_the_probe_of_openenv_calls_the_endpoint_trainable(tmp_path: Path) -> None:
    need_openenv()
    async with open_house(tmp_path) as house:
        place = await house.place(lease_s=600.0)
        found = await probe(house, place)
    assert (found["trainable"], found["capture_level"], found["tool_support"]) == (True, "tokens", "ok"), found
    assert not [one for one in found["findings"] if "FATAL" in one]


@pytest.mark.long
async def test_a_run_that_refuses_other_temperatures_is_probed_without_one(tmp_path: Path) -> None:
    need_openenv()
    async with open_house(tmp_path) as house:
        (policy,) = await house.store.resources(house.run_id)
        await house.store.put_resources([replace(policy, value={**policy.value, "unsupported_params": "error"})])
        found = await probe(house, await house.place(lease_s=600.0))
    assert (found["trainable"], found["logprobs_mode"], found["tool_support"]) == (True, "unknown", "ok"), found
    assert [one for one in found["param_fixes"] if "temperature" in one], found


async def probe(house: SdkHouse, place: Place) -> dict[str, Any]:
    return await ask({"url": place.base_url, "model": "policy", "key": place.key})
