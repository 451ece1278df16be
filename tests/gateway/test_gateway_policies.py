"""Several policies behind one gateway: each has its engine, its tokens and its conversations; agents give their names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gateway_house import END, House, path
from scripted_engine import ScriptedEngine
from toy_model import TEXTS, write_tokenizer

from agentlightning.records import Call, Resource
from agentlightning.rendering.renderer import Renderer

OTHER_TEXTS = ["a b c d e f g h", *TEXTS[:1]]


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("other") / "tokenizer", texts=OTHER_TEXTS)


@pytest.fixture
async def critic(house: House, other_folder: Path) -> AsyncIterator[ScriptedEngine]:
    """The engine of a second policy with a tokenizer of its own."""
    renderer = Renderer(other_folder)
    engine = await ScriptedEngine(lambda _: [*renderer.encode("No."), END]).start()
    value = {
        "model": "critic",
        "endpoints": [engine.url],
        "tokenizer": str(other_folder),
        "seed": 7,
    }
    await house.store.put_resources([Resource(run_id=house.run_id, name="critic", kind="policy", value=value)])
    yield engine
    await engine.close()


async def said(
    house: House, claim: Any, model: str, *messages: str, agent: str | None = None, **headers: str
) -> dict[str, Any]:
    """Messages alternate between user and assistant."""
    body = {
        "model": model,
        "messages": [
            {"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(messages)
        ],
    }
    named = headers | ({} if agent is None else {"x-agl-agent": agent})
    reply = await house.http().post(f"{path(claim)}/v1/chat/completions", json=body, headers=named)
    assert reply.status_code == 200, reply.text
    message: dict[str, Any] = reply.json()["choices"][0]["message"]
    return message


async def calls_of(house: House, claim: Any) -> list[Call]:
    return await house.store.calls([claim.rollout.id])


async def test_a_call_goes_to_the_policy_that_it_names(house: House, critic: ScriptedEngine) -> None:
    claim = await house.claim()
    assert (await said(house, claim, "policy", "hi"))["content"] == "It is sunny."
    assert (await said(house, claim, "critic", "hi"))["content"] == "No."
    assert [(call.policy, call.model) for call in await calls_of(house, claim)] == [
        ("default", "policy"),
        ("critic", "critic"),
    ]
    assert (len(house.engine.requests), len(critic.requests)) == (1, 1)


async def test_no_policy_continues_the_tokens_of_another(house: House, critic: ScriptedEngine) -> None:
    claim = await house.claim()
    await said(house, claim, "policy", "hi")
    await said(house, claim, "critic", "hi", "It is sunny.", "is it so?")
    first, second = await calls_of(house, claim)
    assert second.parent_id is None
    assert second.fork_cause is None
    renderer = await renderer_of(house, "critic")
    assert renderer.decode(second.suffix_ids, special=True).count("It is sunny.") == 1
    assert second.suffix_ids[: len(first.suffix_ids)] != first.suffix_ids


async def renderer_of(house: House, alias: str) -> Renderer:
    (resource,) = await house.store.resources(house.run_id, alias)
    return Renderer(Path(resource.value["tokenizer"]))


async def test_each_policy_continues_its_own_conversation_while_they_take_turns(
    house: House, critic: ScriptedEngine
) -> None:
    claim = await house.claim()
    await said(house, claim, "policy", "hi")
    await said(house, claim, "critic", "say")
    await said(house, claim, "policy", "hi", "It is sunny.", "more")
    await said(house, claim, "critic", "say", "No.", "more")
    one, two, three, four = await calls_of(house, claim)
    assert (three.parent_id, four.parent_id) == (one.id, two.id)
    assert {call.fork_cause for call in (one, two, three, four)} == {None}


async def test_a_gateway_that_restarts_keeps_the_policies_apart(house: House, critic: ScriptedEngine) -> None:
    claim = await house.claim()
    await said(house, claim, "policy", "hi")
    await said(house, claim, "critic", "hi")
    house.app = house.gateway()
    await said(house, claim, "critic", "hi", "No.", "more")
    *_, second, third = await calls_of(house, claim)
    assert third.parent_id == second.id


async def test_a_retry_is_never_answered_by_another_policy(house: House, critic: ScriptedEngine) -> None:
    claim = await house.claim()
    retry = {"x-stainless-retry-count": "1"}
    await said(house, claim, "policy", "hi", **{"idempotency-key": "k"})
    assert (await said(house, claim, "critic", "hi", **retry, **{"idempotency-key": "k"}))["content"] == "No."
    assert (await said(house, claim, "policy", "hi", **retry))["content"] == "It is sunny."
    assert len(house.engine.requests) == 1


async def test_the_name_that_an_agent_gives_itself_is_recorded_with_its_calls(house: House) -> None:
    claim = await house.claim()
    await said(house, claim, "policy", "hi", agent="writer")
    await said(house, claim, "policy", "hello", agent=" ")
    await said(house, claim, "policy", "there", agent="x" * 300)
    assert [call.agent for call in await calls_of(house, claim)] == ["writer", None, "x" * 200]
