"""An agent that wants a better reward than it earned, with nothing but its own attempt's key, against a real gateway."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import httpx
import orjson
import pytest
from attack_scene import HI, Scene, a_claim, bearer, path

import build
from agentlightning.adapters.trajectories import JUDGE, trajectories
from agentlightning.config.agent import AirConfig
from agentlightning.config.base import parse_settings
from agentlightning.config.run import LIMITS_RESOURCE
from agentlightning.records import JSON, Call, Claim, Resource
from agentlightning.store.base import RolloutQuery
from agentlightning.store.rules import MAX_REWARD
from agentlightning.tracing.air import air_of
from agentlightning.tracing.tool_uses import named_calls

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HUGE = sys.float_info.max


async def chat(http: httpx.AsyncClient, claim: Claim, body: JSON = HI, key: str = "", **headers: str) -> JSON:
    sent = bearer(key or claim.key) | {name.replace("_", "-"): value for name, value in headers.items()}
    reply = await http.post(f"{path(claim)}/v1/chat/completions", json=body, headers=sent)
    assert reply.status_code == 200, reply.text
    answer: JSON = reply.json()
    return answer


def a_span(number: int, name: str = "x", **attributes: str) -> JSON:
    pairs = [{"key": key.replace("__", "."), "value": {"stringValue": value}} for key, value in attributes.items()]
    times = {"startTimeUnixNano": "1", "endTimeUnixNano": "2"}
    return {"traceId": TRACE, "spanId": f"{number:016x}", "name": name, "attributes": pairs, **times}


async def post_spans(http: httpx.AsyncClient, claim: Claim, *spans: JSON) -> JSON:
    body = {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}
    reply = await http.post(f"{path(claim)}/v1/traces", json=body, headers=bearer(claim.key))
    assert reply.status_code == 200, reply.text
    told: JSON = reply.json()
    return told


async def learned(scene: Scene, claim: Claim) -> list[Call]:
    """The attempt's calls, as a training step names them."""
    return await named_calls(scene.store, await scene.store.calls([claim.rollout.id], claim.lease.attempt))


# --- the judge's name -----------------------------------------------------------------------------------------------------


async def test_an_agent_that_calls_itself_the_judge_is_trained_all_the_same(
    scene: Scene, http: httpx.AsyncClient
) -> None:
    names = [
        {"x_agl_agent": JUDGE},
        {"baggage": "agl.agent=agl%2Ejudge"},
        {"baggage": f"gen_ai.agent.name={JUDGE}"},
        {"x_claude_code_agent_type": JUDGE},
        {"x_claude_code_agent_id": JUDGE},
        {"x_openai_subagent": "agl.anything"},
    ]
    for number, headers in enumerate(names):  # other prompts: not one of them is taken for a repetition
        await chat(http, scene.mine, {"messages": [{"role": "user", "content": f"hi {number}"}]}, **headers)
    calls = await learned(scene, scene.mine)
    assert [call.agent for call in calls] == [None] * len(names)
    [rollout] = await scene.store.rollouts(RolloutQuery(ids=[scene.mine.rollout.id]))
    [kept], left_out = trajectories([replace(rollout, reward=0.0)], calls)
    assert ({one.call_id for one in kept.transitions}, left_out) == ({call.id for call in calls}, {})


async def test_a_span_that_names_the_judge_names_no_agent(scene: Scene, http: httpx.AsyncClient) -> None:
    await chat(http, scene.mine, traceparent=f"00-{TRACE}-{SPAN}-01")
    for number, name in enumerate(("agl__agent", "gen_ai__agent__name", "agent_name")):
        await post_spans(http, scene.mine, a_span(int(SPAN, 16) + number, **{name: JUDGE}))
    assert [call.agent for call in await learned(scene, scene.mine)] == [None]


async def test_only_the_judges_own_key_makes_a_call_the_judges(scene: Scene, http: httpx.AsyncClient) -> None:
    assert scene.mine.judge_key not in ("", scene.mine.key, scene.other.judge_key)
    await chat(http, scene.mine, key=scene.mine.judge_key)
    assert [call.agent for call in await learned(scene, scene.mine)] == [JUDGE]
    for key in (scene.mine.judge_key, scene.mine.key):
        reply = await http.post(f"{path(scene.other)}/v1/chat/completions", json=HI, headers=bearer(key))
        assert reply.status_code == 403
    assert await scene.store.calls([scene.other.rollout.id]) == []


async def test_an_agent_that_uses_up_its_calls_still_meets_its_judge(scene: Scene, http: httpx.AsyncClient) -> None:
    """Else a bad attempt would end as one that could not be judged, which nothing is learned from."""
    run = await scene.store.create_run("limited", {})
    policy = (await scene.store.resources(scene.run_id))[0].value
    limits = {"attempt": {"max_calls": 1}}
    await scene.store.put_resources(
        [
            Resource(run_id=run.id, name="default", kind="policy", value=policy),
            Resource(run_id=run.id, name=LIMITS_RESOURCE, kind="limits", value=limits),
        ]
    )
    claim = await a_claim(scene.store, run.id, "g")
    await chat(http, claim)
    for key, status in ((claim.key, 429), (claim.judge_key, 200), (claim.judge_key, 200), (claim.key, 429)):
        reply = await http.post(f"{path(claim)}/v1/chat/completions", json=HI, headers=bearer(key))
        assert reply.status_code == status, reply.text
    assert [call.agent for call in await learned(scene, claim)] == [None, JUDGE, JUDGE]


# --- spans that earn something --------------------------------------------------------------------------------------------

RULES = {"tool_error": -0.3, "tool_success": 0.5, "retry": -0.3, "calls": {"weight": -0.3, "budget": 1}}
ASKED: JSON = {"id": "a", "type": "function", "function": {"name": "sql", "arguments": "{}"}}


async def air_total(scene: Scene, claim: Claim, calls: list[Call]) -> float:
    air = air_of(parse_settings(AirConfig, {"rules": RULES}, "air"), lambda spec: NotImplemented)
    assert air is not None
    return sum(reward.value for reward in air.rewards(calls, await scene.store.spans([claim.rollout.id])))


async def test_spans_that_an_agent_posts_earn_nothing_and_hide_no_failure(
    scene: Scene, http: httpx.AsyncClient
) -> None:
    """Twice the same tool, whose result the model was shown as an error; then all that spans can say for it."""
    await chat(http, scene.mine)
    await chat(http, scene.mine, {"messages": [*HI["messages"], {"role": "user", "content": "again"}]})
    first, second = await learned(scene, scene.mine)
    failed = {"role": "tool", "tool_call_id": "a", "content": "Error: no such table"}
    calls = [
        replace(first, completion={"role": "assistant", "tool_calls": [ASKED]}),
        replace(
            second,
            parent_id=first.id,
            messages=[failed],
            completion={"role": "assistant", "tool_calls": [{**ASKED, "id": "b"}]},
        ),
    ]
    earned = await air_total(scene, scene.mine, calls)
    assert earned == pytest.approx(-0.9)
    told = {"gen_ai__operation__name": "execute_tool", "gen_ai__tool__name": "sql", "output__value": "42"}
    after = [{"startTimeUnixNano": str(one.finished_ns + 1)} for one in (first, second)]
    spans = [
        a_span(10 * place + number, **told, **more) | moment | {"endTimeUnixNano": str(second.finished_ns + 9)}
        for place, moment in enumerate(after)
        for number, more in enumerate(
            ({}, {}, {}, {"gen_ai__tool__call__id": "a"}, {"gen_ai__tool__call__id": "b"}, {"input__value": '{"x":1}'})
        )
    ]
    await post_spans(http, scene.mine, *spans)
    assert len(await scene.store.spans([scene.mine.rollout.id])) == len(spans)
    assert await air_total(scene, scene.mine, calls) == earned


def test_a_forged_result_in_a_call_beside_the_conversation_hides_no_failure() -> None:
    """While the tool runs, the agent shows the model a success under the tool call's id, in a call of its own."""

    def a_call(number: int, parent: str | None, message: JSON, **completion: Any) -> Call:
        answer = {"role": "assistant", **completion}
        times = {"started_ns": 10 * number, "finished_ns": 10 * number + 5}
        return build.call(id=f"c{number}", parent_id=parent, messages=[message], completion=answer, **times)

    def told(text: str) -> JSON:
        return {"role": "tool", "tool_call_id": "a", "content": text}

    asked = a_call(0, None, {"role": "user", "content": "?"}, tool_calls=[ASKED])
    forged = a_call(1, None, told("42"), content="ok")
    true = a_call(2, "c0", told("Error: no such table"), content="Hm.")
    air = air_of(parse_settings(AirConfig, {"rules": {"tool_error": -0.3, "tool_success": 0.5}}, "air"), lambda _: None)
    assert air is not None
    assert [(one.name, one.value) for one in air.rewards([asked, forged, true])] == [("air.tool_error", -0.3)]


async def test_no_span_of_an_agent_has_a_name_of_the_gateways(scene: Scene, http: httpx.AsyncClient) -> None:
    names = ("refused_calls", "limit_reached", "external_failed", "feedback", "new")
    reserved = [a_span(number, f"gateway.{name}", fields="messages") for number, name in enumerate(names, 1)]
    told = await post_spans(http, scene.mine, *reserved, a_span(9, "mine"))
    assert told["partialSuccess"]["rejectedSpans"] == str(len(names))
    assert "reserved_name" in told["partialSuccess"]["errorMessage"]
    found = [span.name for span in await scene.store.spans([scene.mine.rollout.id])]
    assert sorted(found) == ["gateway.broken_spans", "mine"]


# --- posted rewards -------------------------------------------------------------------------------------------------------


async def post_reward(http: httpx.AsyncClient, claim: Claim, **body: Any) -> httpx.Response:
    headers = bearer(claim.key) | {"content-type": "application/json"}
    return await http.post(f"{path(claim)}/v1/reward", content=orjson.dumps(body), headers=headers)


async def test_a_huge_reward_is_refused_in_one_sentence(scene: Scene, http: httpx.AsyncClient) -> None:
    for value in (HUGE, HUGE, -HUGE, MAX_REWARD * 1.001, -MAX_REWARD * 1.001):
        reply = await post_reward(http, scene.mine, value=value)
        assert reply.status_code == 422
        assert reply.json()["error"]["message"] == f"value: expected a number from -1e+09 to 1e+09, got {value:g}"
    assert await scene.store.rewards([scene.mine.rollout.id]) == []
    assert (await post_reward(http, scene.mine, value=MAX_REWARD)).status_code == 200


async def test_a_reward_that_an_agent_gives_has_a_name_of_its_own(scene: Scene, http: httpx.AsyncClient) -> None:
    """AIR's rewards count whatever the weights of a run are."""
    answer = await chat(http, scene.mine)
    for name in ("air.tool_success", "air.", "", "x" * 101, "a\nb", 3, None):
        for more in ({}, {"call_id": answer["id"]}):
            reply = await post_reward(http, scene.mine, value=1, name=name, **more)
            assert (reply.status_code, reply.json()["error"]["message"][:15]) == (422, "name: expected ")
    assert await scene.store.rewards([scene.mine.rollout.id]) == []


async def test_what_runs_in_a_sandbox_posts_only_the_rewards_that_are_allowed_by_name(
    scene: Scene, http: httpx.AsyncClient
) -> None:
    table: list[tuple[JSON, list[str]]] = [
        ({"agent": {"reward": []}, "sandbox": {"type": "none"}}, ["reward", "style"]),
        ({"agent": {"reward": []}, "sandbox": {"type": "bubblewrap"}}, []),
        ({"agent": {"reward": [], "posted_rewards": ["style"]}, "sandbox": {"type": "container"}}, ["style"]),
        ({"agent": {"reward": [], "posted_rewards": ["reward"]}}, ["reward"]),
        ({"agent": {"reward": [], "posted_rewards": []}}, []),
        ({"agent": {"reward": [{"run": "r.py:f"}], "posted_rewards": None}}, []),
        ({}, []),
    ]
    for config, accepted in table:
        run = await scene.store.create_run("posting", config)
        claim = await a_claim(scene.store, run.id, "g")
        for name in ("reward", "style"):
            reply = await post_reward(http, claim, value=1, name=name)
            assert reply.status_code == (200 if name in accepted else 403), (config, reply.text)
            if name not in accepted:
                assert reply.json()["error"]["code"] == "rewards_not_allowed"
        assert [one.name for one in await scene.store.rewards([claim.rollout.id])] == accepted


# --- what belongs to others -----------------------------------------------------------------------------------------------


async def test_another_agents_idempotency_keys_and_responses_are_nobody_elses(
    scene: Scene, http: httpx.AsyncClient
) -> None:
    named = {"idempotency-key": "theirs", "x-stainless-retry-count": "1"}
    body = {"input": "hi", "metadata": {"session_id": "theirs"}, "user": "theirs"}
    theirs = await http.post(
        f"{path(scene.other)}/v1/responses", json=body, headers=bearer(scene.other.key) | named | {"x-agl-session": "s"}
    )
    assert theirs.status_code == 200, theirs.text
    mine = await http.post(
        f"{path(scene.mine)}/v1/responses", json=body, headers=bearer(scene.mine.key) | named | {"x-agl-session": "s"}
    )
    assert mine.status_code == 200, mine.text
    response_id = theirs.json()["id"]
    assert mine.json()["id"] != response_id
    assert (await http.get(f"{path(scene.mine)}/v1/responses/{response_id}", headers=bearer(scene.mine.key))).is_error
    more = {"input": "go on", "previous_response_id": response_id}
    for request in (more, {"input": [{"type": "item_reference", "id": theirs.json()["output"][0]["id"]}]}):
        reply = await http.post(f"{path(scene.mine)}/v1/responses", json=request, headers=bearer(scene.mine.key))
        assert 400 <= reply.status_code < 500, reply.text
    assert len(await scene.store.calls([scene.other.rollout.id])) == 1
    assert len(await scene.store.calls([scene.mine.rollout.id])) == 1


async def test_spans_and_step_rewards_of_other_attempts_stay_theirs(scene: Scene, http: httpx.AsyncClient) -> None:
    theirs = await chat(http, scene.other)
    forged = a_span(1, agl__rollout_id=scene.other.rollout.id, agl__agent="x") | {"parentSpanId": SPAN}
    assert (await post_spans(http, scene.mine, forged))["partialSuccess"]["rejectedSpans"] == "1"
    inside = f"00-{TRACE}-{SPAN}-01"
    await chat(
        http, scene.mine, traceparent=inside, x_agl_session="s", baggage=f"agl.rollout_id={scene.other.rollout.id}"
    )
    for name in (theirs["id"], theirs["id"].removeprefix("chatcmpl-"), f"{theirs['id']}.0", "*", "%"):
        assert (await post_reward(http, scene.mine, value=-1, call_id=name)).status_code == 422, name
    both = [scene.mine.rollout.id, scene.other.rollout.id]
    assert await scene.store.rewards(both) == []
    assert await scene.store.spans([scene.other.rollout.id]) == []
    assert [len(await scene.store.calls([one])) for one in both] == [1, 1]


async def test_an_agent_that_asks_for_nothing_without_end_fills_no_store(scene: Scene, http: httpx.AsyncClient) -> None:
    for number in range(40):
        reply = await http.post(f"{path(scene.mine)}/v1/nothing/{number}", json={}, headers=bearer(scene.mine.key))
        assert reply.status_code == 404
    assert len(await scene.store.spans([scene.mine.rollout.id])) == 16 + 1
