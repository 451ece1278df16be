"""The gateway replaces system prompts by the rules of a run, in every protocol, and what continues a call still does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from external_house import serve
from external_server import ExternalServer
from gateway_house import House, path

from agentlightning.adapters.trajectories import JUDGE
from agentlightning.prompts.templates import Template
from agentlightning.protocols.system_prompts import prompt_name
from agentlightning.records import Call, Claim, NewRollout, Resource, WorkerStatus

RULES: Any = [{"template": "system", "agents": ["writer", "sub-*"]}]
TEMPLATE = "Answer about {topic}."
NEW = "Answer about birds."


async def ruled(house: House, rules: Any = RULES, *texts: str, name: str = "system") -> None:
    """Gives the house a run with these rules, and versions of a template."""
    templates = {name: "{topic}"}
    house.run_id = (await house.store.create_run("prompts", {"prompts": {"templates": templates, "rules": rules}})).id
    await house.serve_policy()
    await put(house, *(texts or (TEMPLATE,)), name=name)


async def put(house: House, *texts: str, name: str = "system") -> None:
    values = [Template.of(text).value() for text in texts]
    await house.store.put_resources(
        [Resource(run_id=house.run_id, name=name, kind="prompt_template", value=value) for value in values]
    )


async def claim(house: House, group: str = "g", **fields: Any) -> Claim:
    new = NewRollout(run_id=house.run_id, task={"topic": "birds"}, group_id=group, **fields)
    await house.store.enqueue([new])
    worker = WorkerStatus(id="w", run_id=house.run_id, host="h", pid=1, running=0, seen_ns=0)
    return (await house.store.claim(worker, lease_s=600.0))[0]


async def post(house: House, made: Claim, route: str, body: dict[str, Any], agent: str | None = "writer") -> Any:
    headers = {} if agent is None else {"x-agl-agent": agent}
    reply = await house.http().post(f"{path(made)}/{route}", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def calls(house: House, made: Claim) -> list[Call]:
    return await house.store.calls([made.rollout.id])


def chat(system: str, *texts: str) -> dict[str, Any]:
    roles = ("user", "assistant") * len(texts)
    told = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return {"model": "policy", "messages": [{"role": "system", "content": system}, *told]}


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("v1/chat/completions", chat("Old.", "hi")),
    ("v1/responses", {"model": "policy", "instructions": "Old.", "input": "hi"}),
    (
        "v1/messages",
        {"model": "policy", "max_tokens": 9, "system": "Old.", "messages": [{"role": "user", "content": "hi"}]},
    ),
    (
        "v1beta/models/policy:generateContent",
        {"systemInstruction": {"parts": [{"text": "Old."}]}, "contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
    ),
]


@pytest.mark.parametrize(("route", "body"), CALLS)
async def test_the_system_prompt_of_a_named_agent_is_replaced_in_every_protocol(
    house: House, route: str, body: dict[str, Any]
) -> None:
    await ruled(house)
    house.say("hello")
    made = await claim(house)
    await post(house, made, route, body)
    [call] = await calls(house, made)
    assert call.messages[0]["content"] == NEW
    assert call.request_fields["system_prompt"] == {"template": "system", "version": 1, "replaced": "Old."}
    assert "Old." not in house.renderer.decode(call.suffix_ids)
    assert NEW in house.renderer.decode(call.suffix_ids)


async def test_a_rule_may_name_the_agent_of_a_program_by_its_own_prompt(house: House) -> None:
    agent = prompt_name("You plan the trip.")
    await ruled(house, [{"template": "system", "agents": [agent]}])
    house.say("hello")
    made = await claim(house)
    for text in ("You plan the trip.", "You write the mail."):
        await post(house, made, "v1/chat/completions", chat(text, "hi"), None)
    first, second = await calls(house, made)
    assert (first.messages[0]["content"], first.agent) == (NEW, agent)
    assert second.messages[0]["content"] == "You write the mail."


async def test_agents_that_no_rule_names_and_judges_keep_their_prompts(house: House) -> None:
    await ruled(house)
    house.say("hello")
    made = await claim(house)
    for agent in (None, "reader"):
        await post(house, made, "v1/chat/completions", chat("Old.", f"hi {agent}"), agent)
    assert [(call.messages[0]["content"], call.request_fields) for call in await calls(house, made)] == [
        ("Old.", {})
    ] * 2
    await ruled(house, [{"template": "system", "agents": ["*"]}])
    made = await claim(house)
    for key in (made.judge_key, made.key):  # an agent that takes the judge's name is none
        headers = {"authorization": f"Bearer {key}", "x-agl-agent": JUDGE}
        await house.http().post(f"{path(made)}/v1/chat/completions", json=chat("Old.", key), headers=headers)
    assert [call.messages[0]["content"] for call in await calls(house, made)] == ["Old.", NEW]


async def test_a_rule_whose_template_cannot_be_rendered_refuses_the_call_and_fills_in_nothing_private(
    house: House,
) -> None:
    await ruled(house, RULES, "{schema}")
    made = await claim(house)
    headers, body = {"x-agl-agent": "writer"}, chat("Old.", "hi")
    reply = await house.http().post(f"{path(made)}/v1/chat/completions", json=body, headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "prompts_misconfigured")
    assert "prompt 'system', version 1: placeholder 'schema': expected a field" in reply.json()["error"]["message"]
    config = (await house.store.runs([house.run_id]))[0].config | {"data": {"train": "t.jsonl", "private": ["topic"]}}
    house.run_id = (await house.store.create_run("private", config)).id
    await house.serve_policy()
    await put(house, TEMPLATE)
    made = await claim(house)
    reply = await house.http().post(f"{path(made)}/v1/chat/completions", json=body, headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "prompts_misconfigured")
    assert "birds" not in reply.text


async def test_calls_continue_exactly_even_where_the_agent_changes_its_own_prompt(house: House) -> None:
    await ruled(house, [{"template": "system", "agents": ["*"]}])
    house.say("one", "two", "three")
    made = await claim(house)
    await post(house, made, "v1/chat/completions", chat("It is 9:00.", "a"), None)
    await post(house, made, "v1/chat/completions", chat("It is 9:01.", "a", "one", "b"), None)
    await post(house, made, "v1/chat/completions", chat("It is 9:01.", "a", "one", "b", "two", "c"), "sub-1")
    first, second, third = await calls(house, made)
    assert [call.continuation for call in (first, second, third)] == ["first_turn", "continued", "continued"]
    assert (second.parent_id, third.parent_id) == (first.id, second.id)
    said = [call.request_fields["system_prompt"].get("replaced") for call in (first, second, third)]
    assert said == ["It is 9:00.", "It is 9:01.", None]


async def test_an_attempt_keeps_its_version_and_new_rollouts_have_the_newest(house: House) -> None:
    await ruled(house)
    house.say("hello")
    before = await claim(house)
    await put(house, "Newer: {topic}.")
    after, pinned = await claim(house, "h"), await claim(house, "i", prompts={"system": 1})
    for made in (before, after, pinned):
        await post(house, made, "v1/chat/completions", chat("Old.", "hi"))
    found = [(await calls(house, made))[0] for made in (before, after, pinned)]
    assert [call.messages[0]["content"] for call in found] == [NEW, "Newer: birds.", NEW]
    assert [call.request_fields["system_prompt"]["version"] for call in found] == [1, 2, 1]


async def test_calls_of_external_models_go_out_with_the_replaced_prompt(house: House, external: ExternalServer) -> None:
    await ruled(house)
    await serve(house, "hosted", url=external.url, models=["gpt-*"])
    made = await claim(house)
    await post(house, made, "v1/chat/completions", {**chat("Old.", "hi"), "model": "gpt-5"})
    [call] = await calls(house, made)
    sent = json.loads(external.requests[0].body)
    assert sent["messages"] == [{"role": "system", "content": NEW}, {"role": "user", "content": "hi"}]
    assert (call.policy, call.request_fields["system_prompt"]["replaced"]) == ("", "Old.")
