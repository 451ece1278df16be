"""Shadow calls: a canary completes copies of the calls of sessions, and neither the sessions nor whoever reads calls meets
them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from gateway_house import END, House
from scripted_engine import ScriptedEngine

from agentlightning.config.serve import ROUTES_RESOURCE, RoutesConfig
from agentlightning.gateway.limits import read_key_usage
from agentlightning.gateway.policy.shadow_calls import MAX_UNDER_WAY
from agentlightning.gateway.server_settings import ServerSettings
from agentlightning.records import JSON, Resource, Span
from agentlightning.rendering.renderer import Renderer
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.gateway_events import SHADOW_CALL
from agentlightning.trainer.canary.controller import read_figures, read_trial

HI = [{"role": "user", "content": "hi"}]
CANARY = "It rains today, I fear."
DEADLINE_S = 30.0


class ShadowedHouse:
    """A house whose run serves version 40 of `support`, and copies calls to version 50."""

    def __init__(self, house: House, canary: ScriptedEngine) -> None:
        self.house = house
        self.canary = canary
        self.store: LightningStore = house.store
        self.app = house.app

    async def serve(self, shadow: float = 1.0, temperature: float = 1.0, **serve: Any) -> ShadowedHouse:
        config = {"serve": {"model": "support", **serve}, "model": {"temperature": temperature}}
        self.run_id = (await self.store.create_run("serve support", config)).id
        for number, engine in ((40, self.house.engine), (50, self.canary)):
            await self.put_policy(number, engine)
        await self.route(shadow=shadow)
        self.secret = (await self.store.create_token("app", "client", self.run_id)).secret
        return self

    async def put_policy(self, number: int, engine: ScriptedEngine, **changes: Any) -> None:
        folder = str(self.house.folder)
        value = {"model": "support", "endpoints": [engine.url], "tokenizer": folder, "seed": 7, "api": "generate"}
        resource = Resource(run_id=self.run_id, name=f"support-{number}", kind="policy", value={**value, **changes})
        await self.store.put_resources([resource])

    async def route(self, **changes: Any) -> None:
        value = RoutesConfig(stable=40, canary=50, **changes).model_dump(mode="json")
        await self.store.put_resources([Resource(run_id=self.run_id, name=ROUTES_RESOURCE, kind="routes", value=value)])

    def http(self) -> httpx.AsyncClient:
        http = self.house.http(self.app, adds_keys=False)
        http.headers["authorization"] = f"Bearer {self.secret}"
        return http

    async def ask(self, session: str, **changes: Any) -> JSON:
        """The body of a call of a session."""
        body = {"model": "m", "messages": HI, **changes}
        reply = await self.http().post("/v1/chat/completions", json=body, headers={"x-agl-session": session})
        assert reply.status_code == 200, reply.text
        return dict(reply.json()) if not changes.get("stream") else {}

    async def finish(self, session: str) -> None:
        assert (await self.http().post(f"/v1/sessions/{session}/finish", json={})).status_code == 200

    async def copies(self, count: int) -> list[Span]:
        """The spans of copies, once there are so many."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                ids = [one.id for one in await self.store.rollouts(RolloutQuery(run_id=self.run_id))]
                found = [one for one in await self.store.spans(ids) if one.name == SHADOW_CALL]
                if len(found) >= count:
                    return found
                await asyncio.sleep(0)

    async def figures(self) -> Any:
        return (await read_figures(self.store, self.run_id, await read_trial(self.store, self.run_id)))["shadow"]


@pytest.fixture
async def canary(renderer: Renderer) -> AsyncIterator[ScriptedEngine]:
    engine = await ScriptedEngine(lambda _: [*renderer.encode(CANARY), END], version=2).start()
    yield engine
    await engine.close()


@pytest.fixture
async def shadowed(house: House, canary: ScriptedEngine) -> ShadowedHouse:
    return await ShadowedHouse(house, canary).serve(record=True)


async def test_a_copy_has_the_calls_prompt_and_parameters_and_is_compared_with_it(shadowed: ShadowedHouse) -> None:
    answer = await shadowed.ask("anna", max_tokens=20)
    assert answer["choices"][0]["message"]["content"] == "It is sunny."
    [span] = await shadowed.copies(1)
    served, copied = shadowed.house.engine.requests[0], shadowed.canary.requests[0]
    names = ("temperature", "top_p", "max_tokens", "stop", "seed")
    assert copied["token_ids"] == served["token_ids"]
    assert [copied["sampling_params"][name] for name in names] == [served["sampling_params"][name] for name in names]
    about = span.attributes
    assert (about["call_id"], about["version"], about["equal"]) == (answer["id"].removeprefix("chatcmpl-"), 50, False)
    assert about["completion"]["content"] == CANARY
    assert about["served_tokens"] == answer["usage"]["completion_tokens"]
    assert (about["seconds"] > 0, about["served_seconds"] > 0, about["tokens"] > 0) == (True, True, True)


async def test_a_copy_is_no_call_of_its_session_and_none_of_its_keys(shadowed: ShadowedHouse) -> None:
    await shadowed.ask("anna")
    await shadowed.copies(1)
    [rollout] = await shadowed.store.rollouts(RolloutQuery(run_id=shadowed.run_id))
    [call] = await shadowed.store.calls([rollout.id])
    assert call.policy == "support-40"
    used = await read_key_usage(shadowed.store, shadowed.run_id)
    assert [one.calls for one in used] == [1]
    await shadowed.finish("anna")
    [rollout] = await shadowed.store.rollouts(RolloutQuery(run_id=shadowed.run_id))
    assert (rollout.state, rollout.calls, rollout.warning) == ("succeeded", 1, None)
    text = await shadowed.house.metrics()
    assert 'agl_calls_total{protocol="chat",result="recorded"} 1.0' in text
    assert 'agl_shadow_calls_total{result="completed"} 1.0' in text


async def test_the_canary_scores_what_the_session_got(shadowed: ShadowedHouse) -> None:
    await shadowed.ask("anna")
    [span] = await shadowed.copies(1)
    assert (span.attributes["served_logprob"], span.attributes["logprob"]) == (-0.5, -0.5)


async def test_at_another_temperature_nothing_is_scored(house: House, canary: ScriptedEngine) -> None:
    shadowed = await ShadowedHouse(house, canary).serve(temperature=0.5)
    await shadowed.ask("anna")
    [span] = await shadowed.copies(1)
    assert "logprob" not in span.attributes
    assert len(canary.requests) == 1


async def test_streams_are_copied_too(shadowed: ShadowedHouse) -> None:
    await shadowed.ask("anna", stream=True)
    await shadowed.copies(1)
    assert shadowed.canary.requests[0]["stream"] is False


async def test_without_recording_the_numbers_alone_are_kept(house: House, canary: ScriptedEngine) -> None:
    shadowed = await ShadowedHouse(house, canary).serve()
    await shadowed.ask("anna")
    [span] = await shadowed.copies(1)
    assert "completion" not in span.attributes


async def test_the_operators_function_goes_over_copies(house: House, canary: ScriptedEngine) -> None:
    def hides(given: JSON) -> JSON:
        return {**given, "completion": {"role": "assistant", "content": "***"}}

    shadowed = await ShadowedHouse(house, canary).serve(record=True, redact="redact.py:hides")
    shadowed.app = house.gateway(settings=ServerSettings(redactions={"redact.py:hides": hides}))
    await shadowed.ask("anna")
    [span] = await shadowed.copies(1)
    assert span.attributes["completion"]["content"] == "***"


async def test_only_sessions_that_began_under_the_routes_are_copied(shadowed: ShadowedHouse) -> None:
    await shadowed.route()
    await shadowed.ask("before")
    await shadowed.route(shadow=1.0)
    await shadowed.ask("before")
    await shadowed.ask("after")
    [span] = await shadowed.copies(1)
    [_, after] = await shadowed.store.rollouts(RolloutQuery(run_id=shadowed.run_id))
    assert span.rollout_id == after.id


async def test_a_canary_that_fails_costs_the_session_nothing(shadowed: ShadowedHouse) -> None:
    shadowed.canary.refusals = [(500, {"error": {"message": "anna said hi"}})]
    await shadowed.ask("anna")
    [span] = await shadowed.copies(1)
    assert (span.attributes["error"], span.status) == ("engine_failed", "unset")
    assert "said hi" not in str(span)
    assert (await shadowed.figures())["failed"] == {"engine_failed": 1}


async def test_a_canary_with_another_tokenizer_gets_no_copy(shadowed: ShadowedHouse) -> None:
    await shadowed.put_policy(50, shadowed.canary, tokenizer=f"{shadowed.house.folder}/.")
    await shadowed.ask("anna")
    [span] = await shadowed.copies(1)
    assert (span.attributes["error"], shadowed.canary.requests) == ("other_tokenizer", [])


async def test_copies_that_a_slow_canary_falls_behind_with_are_dropped_and_counted(shadowed: ShadowedHouse) -> None:
    shadowed.canary.gate, shadowed.canary.hold_whole = asyncio.Event(), True
    answers = [await shadowed.ask(f"session-{number}") for number in range(MAX_UNDER_WAY + 3)]
    assert {one["choices"][0]["message"]["content"] for one in answers} == {"It is sunny."}
    shadowed.canary.gate.set()
    await shadowed.copies(MAX_UNDER_WAY)
    figures = await shadowed.figures()
    assert (figures["calls"], figures["completed"], figures["dropped"]) == (MAX_UNDER_WAY, MAX_UNDER_WAY, 3)
    assert 'agl_shadow_calls_total{result="dropped"} 3.0' in await shadowed.house.metrics()


async def test_the_figures_put_copies_beside_what_was_served(shadowed: ShadowedHouse, renderer: Renderer) -> None:
    for session in ("anna", "ben"):
        await shadowed.ask(session)
    await shadowed.copies(2)
    figures = await shadowed.figures()
    assert (figures["calls"], figures["failed"], figures["equal"]) == (2, {}, 0.0)
    assert figures["measures"]["log-probability"] == {"served": -0.5, "copy": -0.5}
    tokens = figures["measures"]["tokens, mean"]
    assert tokens == {"served": len(renderer.encode("It is sunny.")) + 1, "copy": len(renderer.encode(CANARY)) + 1}
    assert tokens["served"] != tokens["copy"]


async def test_a_gateway_that_ends_waits_for_no_copy(shadowed: ShadowedHouse) -> None:
    shadowed.canary.gate, shadowed.canary.hold_whole = asyncio.Event(), True
    app, asked, completion = shadowed.house.gateway(), asyncio.Event(), shadowed.canary.answers

    def answers(request: JSON) -> list[int]:
        asked.set()
        return completion(request)

    shadowed.app, shadowed.canary.answers = app, answers
    await shadowed.ask("anna")
    async with asyncio.timeout(DEADLINE_S):
        await asked.wait()
        app.stop()
        await app.finished()
        await app.close()
    [rollout] = await shadowed.store.rollouts(RolloutQuery(run_id=shadowed.run_id))
    assert await shadowed.store.spans([rollout.id]) == []
