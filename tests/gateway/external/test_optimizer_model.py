"""The model of a prompt search asked through a real gateway: OpenAI-compatible, Anthropic, and the policy itself."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from external_house import serve
from external_server import ExternalServer
from gateway_house import House

from agentlightning.errors import EngineError
from agentlightning.records import Finish, NewRollout, RetryPolicy
from agentlightning.runner.attempt import status_here
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.prompts.optimizer_model import GatewayModel


@pytest.fixture
async def writer(
    make_house: Callable[[LightningStore], Awaitable[House]],
) -> AsyncIterator[tuple[House, ExternalServer]]:
    """A house with an external model `writer` of both protocols."""
    server = await ExternalServer().start()
    async with InMemoryLightningStore() as store:
        house = await make_house(store)
        for protocol in ("openai", "anthropic"):
            await serve(house, protocol, url=server.url, protocol=protocol, models=[f"{protocol}-1"], max_retries=0)
        yield house, server
        await house.close()
    await server.close()


async def opened(house: House, model: str, protocol: str = "openai") -> GatewayModel:
    asked = GatewayModel(house.store, house.run_id, house.http(adds_keys=False), model, protocol)
    asked.first_pause_s = 0.0
    await asked.open(await house.store.resources(house.run_id))
    return asked


def left_behind(model: GatewayModel, prompt: str) -> NewRollout:
    """The request of a process that was killed."""
    return NewRollout(
        run_id=model.run_id,
        task={"prompt": prompt},
        group_id=f"edit:{hashlib.sha256(prompt.encode()).hexdigest()}:1",
        mode="eval",
        retry=RetryPolicy(max_attempts=1, timeout_s=900.0),
    )


@pytest.mark.parametrize(("protocol", "path"), [("openai", "/v1/chat/completions"), ("anthropic", "/v1/messages")])
async def test_an_external_model_answers_in_its_protocol_and_its_usage_is_counted(
    writer: tuple[House, ExternalServer], protocol: str, path: str
) -> None:
    house, server = writer
    model = await opened(house, f"{protocol}-1", protocol)
    text, usage = await model.ask("Write better.", "edit", 1)
    assert (text, usage.tokens) == ("It is sunny.", 18)
    [request] = server.requests
    assert (request.path, request.json["messages"]) == (path, [{"role": "user", "content": "Write better."}])


async def test_the_policy_answers_through_the_gateway(house: House) -> None:
    model = await opened(house, "policy")
    text, usage = await model.ask("hi", "edit", 1)
    assert text == "It is sunny."
    assert usage.sampled_tokens > 0


async def test_what_was_answered_is_not_asked_again_by_another_process(writer: tuple[House, ExternalServer]) -> None:
    house, server = writer
    first = await (await opened(house, "openai-1")).ask("Write better.", "edit", 1)
    assert await (await opened(house, "openai-1")).ask("Write better.", "edit", 1) == first
    assert len(server.requests) == 1
    [rollout] = await house.store.rollouts(RolloutQuery(run_id=f"{house.run_id}-optimizer"))
    assert (rollout.state, rollout.mode, rollout.task) == ("succeeded", "eval", {"prompt": "Write better."})


async def test_a_request_that_was_under_way_when_its_process_was_killed_is_given_up_for_ever(
    writer: tuple[House, ExternalServer],
) -> None:
    house, server = writer
    model = await opened(house, "openai-1")
    prompt = "Write better."
    await house.store.enqueue([left_behind(model, prompt)])
    [claim] = await house.store.claim(status_here("killed", model.run_id, 0), lease_s=900.0)
    first = await model.ask(prompt, "edit", 1)
    states = {one.replica: one.state for one in await house.store.rollouts(RolloutQuery(run_id=model.run_id))}
    assert states == {0: "cancelled", 1: "succeeded"}
    await house.store.finish([Finish(lease=claim.lease, state="succeeded")])  # too late
    assert await (await opened(house, "openai-1")).ask(prompt, "edit", 1) == first
    assert len(server.requests) == 1


async def test_a_model_that_is_away_is_a_sentence(writer: tuple[House, ExternalServer]) -> None:
    house, server = writer
    server.drop = 100
    with pytest.raises(EngineError, match=r"optimize\.model: openai-1 gives no answer: 502 .*external model 'openai'"):
        await (await opened(house, "openai-1")).ask("Write better.", "edit", 1)
