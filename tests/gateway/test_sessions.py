"""Users of a served model: sessions with a serving key, each on one version, and their feedback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import httpx2
import pytest
from anthropic import AsyncAnthropic
from gateway_house import END, House
from openai import AsyncOpenAI
from scripted_engine import ScriptedEngine

from agentlightning.gateway.app import App
from agentlightning.records import JSON, Resource, Rollout
from agentlightning.rendering.renderer import Renderer
from agentlightning.store.base import RolloutQuery

HI = [{"role": "user", "content": "hi"}]


@dataclass
class ServedHouse:
    """A house whose run serves versions 40 and 50 of `support`, each by an engine of its own."""

    house: House
    newer: ScriptedEngine
    run_id: str = ""
    secret: str = ""
    routes: dict[str, Any] = field(default_factory=lambda: {"stable": 40})

    async def serve(self, **serve: Any) -> ServedHouse:
        """A run whose [serve] table has these settings, and a key for it."""
        store = self.house.store
        config = {"serve": {"model": "support", **serve}, "model": {"temperature": 0.5}}
        self.run_id = (await store.create_run("serve support", config)).id
        for number, engine in ((40, self.house.engine), (50, self.newer)):
            value = {
                "model": "support",
                "endpoints": [engine.url],
                "tokenizer": str(self.house.folder),
                "seed": 7,
            }
            named = Resource(run_id=self.run_id, name=f"support-{number}", kind="policy", value=value)
            await store.put_resources([named])
        await self.route(**self.routes)
        self.secret = await self.key()
        return self

    async def key(self) -> str:
        return (await self.house.store.create_token("app", "client", self.run_id)).secret

    async def route(self, **routes: Any) -> None:
        self.routes = routes
        await self.house.store.put_resources([Resource(run_id=self.run_id, name="routes", kind="routes", value=routes)])

    async def post(
        self, path: str, body: Any, session: str | None = None, *, app: App | None = None, **headers: str
    ) -> httpx.Response:
        given = {"authorization": f"Bearer {self.secret}", **headers}
        if session is not None:
            given["x-agl-session"] = session
        return await self.house.http(app, adds_keys=False).post(path, json=body, headers=given)

    async def said(self, session: str | None = None, **others: Any) -> httpx.Response:
        reply = await self.post("/v1/chat/completions", {"model": "gpt-4o", "messages": HI}, session, **others)
        assert reply.status_code == 200, reply.text
        return reply

    async def rollouts(self) -> list[Rollout]:
        return await self.house.store.rollouts(RolloutQuery(run_id=self.run_id))

    def openai(self, session: str, **settings: Any) -> AsyncOpenAI:
        return AsyncOpenAI(
            base_url="http://gateway/v1",
            api_key=self.secret,
            default_headers={"x-agl-session": session},
            http_client=self.house.http(adds_keys=False),
            **{"max_retries": 0, **settings},
        )


@pytest.fixture
async def newer(renderer: Renderer) -> AsyncIterator[ScriptedEngine]:
    engine = await ScriptedEngine(lambda _: [*renderer.encode("It rains."), END], version=2).start()
    yield engine
    await engine.close()


@pytest.fixture
async def served(house: House, newer: ScriptedEngine) -> ServedHouse:
    return await ServedHouse(house, newer).serve()


async def test_the_first_call_of_a_session_opens_it_and_others_continue_it_token_by_token(served: ServedHouse) -> None:
    first = await served.said("anna")
    assert first.json()["choices"][0]["message"]["content"] == "It is sunny."
    assert first.headers["x-agl-session"] == "anna"
    messages = [*HI, {"role": "assistant", "content": "It is sunny."}, {"role": "user", "content": "is it so?"}]
    await served.post("/v1/chat/completions", {"model": "gpt-4o", "messages": messages}, "anna")
    [rollout] = await served.rollouts()
    assert (rollout.task["session"], rollout.task["model"]) == ("anna", "support@40")
    assert (rollout.state, rollout.step, rollout.sampling.temperature) == ("running", 40, 0.5)
    calls = await served.house.store.calls([rollout.id])
    assert [(call.policy, call.model) for call in calls] == [("support-40", "gpt-4o")] * 2
    assert (calls[1].parent_id, calls[1].fork_cause) == (calls[0].id, None)


async def test_a_crowd_of_first_calls_through_two_gateways_is_one_session(served: ServedHouse) -> None:
    other = served.house.gateway()
    await asyncio.gather(*(served.said("anna", app=app) for app in [served.house.app, other] * 10))
    [rollout] = await served.rollouts()
    assert len(await served.house.store.calls([rollout.id])) == 20


async def test_a_session_keeps_its_version_whatever_the_routes_say_later(served: ServedHouse) -> None:
    await served.said("anna")
    await served.route(stable=50)
    other = served.house.gateway()  # as after a restart
    replies = [await served.said("anna"), await served.said("anna", app=other), await served.said("ben")]
    texts = [reply.json()["choices"][0]["message"]["content"] for reply in replies]
    assert texts == ["It is sunny.", "It is sunny.", "It rains."]
    assert [rollout.step for rollout in await served.rollouts()] == [40, 50]


async def test_a_version_that_is_not_served_any_more_is_never_replaced_by_another(served: ServedHouse) -> None:
    await served.said("anna")
    released = Resource(run_id=served.run_id, name="support-40", kind="policy", value={"released": True})
    await served.house.store.put_resources([released])
    await served.route(stable=50)
    reply = await served.post("/v1/chat/completions", {"model": "x", "messages": HI}, "anna")
    assert reply.status_code == 503
    assert "support@40, the version of this session, is not served" in reply.text


async def test_a_canary_that_is_not_loaded_yet_gets_nobody(served: ServedHouse) -> None:
    await served.route(stable=40, canary=60, weight=1.0)
    await served.said("anna")
    assert [rollout.step for rollout in await served.rollouts()] == [40]


@pytest.mark.parametrize(
    "body", [{"user": "anna"}, {"metadata": {"session_id": "anna"}, "user": "app"}], ids=["user", "metadata"]
)
async def test_the_body_may_name_the_session(served: ServedHouse, body: JSON) -> None:
    for _ in range(2):
        reply = await served.post("/v1/chat/completions", {"model": "m", "messages": HI, **body})
        assert reply.headers["x-agl-session"] == "anna"
    assert len(await served.rollouts()) == 1


async def test_calls_that_name_no_session_are_sessions_of_their_own(served: ServedHouse) -> None:
    replies = [await served.said() for _ in range(2)]
    ids = [reply.headers["x-agl-session"] for reply in replies]
    assert [rollout.task["session"] for rollout in await served.rollouts()] == ids
    again = [await served.said(**{"idempotency-key": "k"}) for _ in range(2)]
    assert len({reply.headers["x-agl-session"] for reply in again}) == 1


async def test_two_keys_never_share_a_session(served: ServedHouse) -> None:
    await served.said("anna")
    served.secret = await served.key()
    await served.said("anna")
    assert len(await served.rollouts()) == 2
    reply = await served.post("/v1/sessions/anna/reward", {"score": 1})
    mine = (await served.rollouts())[1]
    assert (reply.status_code, [one.rollout_id for one in await served.house.store.rewards([mine.id])]) == (
        200,
        [mine.id],
    )


async def test_a_finished_session_begins_anew_on_the_version_of_the_day(served: ServedHouse) -> None:
    await served.said("anna")
    reply = await served.post("/v1/sessions/anna/finish", {})
    assert reply.json() == {"object": "session", "id": "anna", "model": "support@40", "open": False, "reward": None}
    assert (await served.post("/v1/sessions/anna/finish", {})).status_code == 200
    await served.route(stable=50)
    await served.said("anna")
    assert [(one.state, one.step, one.replica) for one in await served.rollouts()] == [
        ("succeeded", 40, 0),
        ("running", 50, 1),
    ]


async def test_feedback_is_the_sessions_reward_at_any_time_and_counts_once_under_its_key(served: ServedHouse) -> None:
    await served.said("anna")
    early = await served.post("/v1/sessions/anna/reward", {"score": 0.25, "feedback": "so so"})
    assert (early.status_code, early.json()["open"]) == (200, True)
    await served.post("/v1/sessions/anna/finish", {})
    [rollout], store = await served.rollouts(), served.house.store
    assert rollout.reward == 0.25
    body = {"score": 1, "feedback": "it came"}
    for _ in range(2):
        late = await served.post("/v1/sessions/anna/reward", body, **{"idempotency-key": "k"})
        assert late.json()["reward"] == (await served.rollouts())[0].reward == 1.0
    spans = [one for one in await store.spans([rollout.id]) if one.name == "gateway.feedback"]
    assert [one.attributes for one in spans] == [{"feedback": "so so"}, {"feedback": "it came"}]
    logged = [(one.step, one.value) for one in await store.metrics(served.run_id, "serve/reward")]
    assert logged == [(40, 0.25), (40, 1.0)]
    assert len(await store.rewards([rollout.id])) == 2


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "score: expected"),
        ({"score": "good"}, "score: expected a finite number"),
        ({"score": 1, "stars": 5}, "stars: not known"),
        ({"score": 1, "feedback": 5}, "feedback: expected a text"),
    ],
)
async def test_feedback_that_makes_no_sense_is_refused(served: ServedHouse, body: JSON, said: str) -> None:
    await served.said("anna")
    reply = await served.post("/v1/sessions/anna/reward", body)
    assert reply.status_code == 422
    assert said in reply.text


async def test_who_holds_no_serving_key_is_refused_and_one_opens_nothing_of_the_store(served: ServedHouse) -> None:
    reply = await served.post("/api/runs", {"ids": [served.run_id]})
    assert (reply.status_code, "needs a token of role" in reply.text) == (403, True)
    store = served.house.store
    revoked = await store.create_token("gone", "client", served.run_id)
    await store.revoke_token(revoked.token.id)
    for secret, status, said in (
        ((await store.create_token("w", "worker", served.run_id)).secret, 403, "its role is worker"),
        (revoked.secret, 401, "revoked"),
        ((await store.create_token("c", "client", served.house.run_id)).secret, 404, "serves no users"),
    ):
        served.secret = secret
        reply = await served.post("/v1/chat/completions", {"model": "m", "messages": HI})
        assert (reply.status_code, said in reply.text) == (status, True), reply.text


async def test_limits_hold_for_each_session(served: ServedHouse) -> None:
    limits = Resource(
        run_id=served.run_id, name="limits:run", kind="limits", value={"attempt": {"max_calls": 1}, "run": {}}
    )
    await served.house.store.put_resources([limits])
    await served.said("anna")
    reply = await served.post("/v1/chat/completions", {"model": "m", "messages": HI}, "anna")
    assert (reply.status_code, "limits.attempt.max_calls" in reply.text) == (429, True)
    await served.said("ben")


async def test_streams_and_other_protocols_belong_to_the_session(served: ServedHouse) -> None:
    client = served.openai("anna")
    stream = await client.chat.completions.create(model="m", messages=HI, stream=True)  # type: ignore[call-overload]
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "It is sunny."
    response = await client.responses.create(model="m", input="hi")
    assert response.output_text == "It is sunny."
    transport = httpx2.ASGITransport(served.house.app, client=("127.0.0.1", 1))
    async with httpx2.AsyncClient(transport=transport) as http:
        claude = AsyncAnthropic(base_url="http://gateway", api_key=served.secret, http_client=http, max_retries=0)
        message = await claude.messages.create(
            model="m",
            max_tokens=20,
            messages=HI,
            metadata={"user_id": "anna"},  # type: ignore[arg-type]
        )
    assert message.content[0].text == "It is sunny."  # type: ignore[union-attr]
    google = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
    reply = await served.house.http(adds_keys=False).post(
        "/v1beta/models/m:generateContent",
        json=google,
        headers={"x-goog-api-key": served.secret, "x-agl-session": "anna"},
    )
    assert reply.status_code == 200, reply.text
    [rollout] = await served.rollouts()
    protocols = {call.protocol for call in await served.house.store.calls([rollout.id])}
    assert protocols == {"chat", "responses", "messages", "generate_content"}
