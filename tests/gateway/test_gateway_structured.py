"""Structured output at the gateway: what the engine is asked, what the agent gets, what is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gateway_house import House, path
from toy_model import TEMPLATE, write_tokenizer

from agentlightning.records import Call, Claim

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "unit": {"type": "string", "enum": ["C", "F"]}},
    "required": ["n", "unit"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}},
]
STRICT = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}]
NAMED = {"type": "function", "function": {"name": "weather"}}


async def answered(house: House, claim: Claim, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    body = {"model": "policy", "messages": [{"role": "user", "content": "what is it like?"}], **fields}
    reply = await house.http().post(f"{path(claim)}/v1/chat/completions", json=body, headers=headers)
    return {"status": reply.status_code, **reply.json()}


async def calls_of(house: House, claim: Claim) -> list[Call]:
    return await house.store.calls([claim.rollout.id], 1)


async def test_a_schema_goes_to_the_engine_as_a_grammar_and_is_recorded(house: House) -> None:
    claim = await house.claim()
    reply = await answered(house, claim, response_format=FORMAT)
    answer = json.loads(reply["choices"][0]["message"]["content"])
    assert answer.keys() == {"n", "unit"}
    [call] = await calls_of(house, claim)
    spec = call.decoding["grammar"]
    assert (spec["kind"], spec["library"], call.overridden_params) == ("json_schema", "llguidance", {})
    assert house.engine.requests[0]["sampling_params"]["structured_outputs"] == {"grammar": spec["lark"]}


async def test_the_tokens_that_a_grammar_forced_are_recorded_whatever_the_engine(house: House) -> None:
    claim = await house.claim()
    house.engine.logprob = 0.0
    await answered(house, claim, guided_regex='[{]"unit": "[CF]"[}]')
    [call] = await calls_of(house, claim)
    chosen = [
        house.renderer.token_text(token) for token, free in zip(call.sampled_ids, mask(call), strict=True) if free
    ]
    assert house.renderer.decode(call.sampled_ids).startswith('{"unit": "')
    assert len(chosen) < len(call.sampled_ids)
    assert any("C" in text or "F" in text for text in chosen)
    house.engine.logprob = -0.5
    await answered(house, claim, guided_choice=["yes"])
    assert "forced" not in (await calls_of(house, claim))[1].decoding


def mask(call: Call) -> list[bool]:
    forced = {at for start, end in call.decoding["forced"] for at in range(start, end)}
    return [at not in forced for at in range(len(call.sampled_ids))]


@pytest.mark.parametrize(
    ("choice", "names"),
    [(NAMED, {"weather"}), ("required", {"weather", "time"})],
)
async def test_a_tool_call_that_is_forced_is_made(house: House, choice: Any, names: set[str]) -> None:
    claim = await house.claim()
    reply = await answered(house, claim, tools=TOOLS, tool_choice=choice)
    [made, *_] = reply["choices"][0]["message"]["tool_calls"]
    assert made["function"]["name"] in names
    assert isinstance(json.loads(made["function"]["arguments"]), dict)
    [call] = await calls_of(house, claim)
    assert call.decoding["grammar"]["kind"] == "tool_call"


async def test_of_tools_that_are_allowed_in_mode_auto_each_may_be_called_and_none_need_be(house: House) -> None:
    claim = await house.claim()
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "weather"}}]}
    called = '<tool_call>\n{"name": "%s", "arguments": {"n": 1, "unit": "C"}}\n</tool_call>'
    house.say("Let me see.\n" + called % "weather", called % "time", "It is sunny.")
    told = []
    for seed in range(3):
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        reply = await answered(house, claim, tools=TOOLS, tool_choice=choice, seed=seed)
        message = reply["choices"][0]["message"]
        told.append(([call["function"]["name"] for call in message.get("tool_calls", ())], message["content"]))
    assert told[0] == (["weather"], "Let me see.")
    assert told[1][0] in ([], ["weather"])  # the engine could not say what was scripted
    assert told[2] == ([], "It is sunny.")
    call = (await calls_of(house, claim))[0]
    assert (call.decoding["grammar"]["kind"], call.overridden_params) == ("tool_call", {})
    assert '\\"name\\": \\"time\\"' not in call.decoding["grammar"]["lark"]


@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_beside_a_form_of_the_answer_tools_may_be_called_as_without(house: House, choice: str) -> None:
    claim = await house.claim()
    house.say(
        '<tool_call>\n{"name": "weather", "arguments": {"n": 1, "unit": "C"}}\n</tool_call>', '{"n": 2, "unit": "F"}'
    )
    replies = [
        await answered(house, claim, tools=TOOLS, tool_choice=choice, response_format=FORMAT, seed=n) for n in (1, 2)
    ]
    first, second = (reply["choices"][0]["message"] for reply in replies)
    assert [call["function"]["name"] for call in first.get("tool_calls", ())] == (
        ["weather"] if choice == "auto" else []
    )
    assert json.loads(second["content"]) == {"n": 2, "unit": "F"}


async def test_a_policy_that_cannot_keep_what_strict_promises_samples_calls_as_without_it(house: House) -> None:
    await house.serve_policy(logprobs="raw")
    claim = await house.claim()
    assert (await answered(house, claim, tools=STRICT))["status"] == 200
    assert [call.decoding for call in await calls_of(house, claim)] == [{}]


@pytest.fixture
def without_calls(tmp_path: Path) -> str:
    """A tokenizer folder whose template writes tool calls in a way that is not known."""
    return str(write_tokenizer(tmp_path / "tokenizer", TEMPLATE.replace("tool_call>", "call>")))


async def test_a_form_of_the_answer_that_would_take_the_tools_away_is_refused_or_left_out(
    house: House, without_calls: str
) -> None:
    await house.serve_policy(tokenizer=without_calls)
    claim = await house.claim()
    for tools in (TOOLS, STRICT):
        reply = await answered(house, claim, tools=tools, response_format=FORMAT)
        assert (reply["status"], reply["error"]["param"]) == (400, "response_format")
        assert reply["error"]["message"].endswith("would forbid them; set tool_choice to none")
    await answered(house, claim, tools=TOOLS, tool_choice="none", response_format=FORMAT)
    await answered(house, claim, tools=STRICT, top_k=3)
    calls = await calls_of(house, claim)
    assert [call.decoding.keys() - {"request", "forced"} for call in calls] == [{"grammar"}, {"logits"}]
    await house.serve_policy(tokenizer=without_calls, unsupported_params="drop")
    house.app = house.gateway()
    dropping = await house.claim("drop")
    for field, given in (
        ("response_format", {"tools": STRICT, "response_format": FORMAT}),
        ("guided_regex", {"guided_regex": "(?=look)ahead"}),
    ):
        assert (await answered(house, dropping, **given))["status"] == 200
        call = (await calls_of(house, dropping))[-1]
        assert (list(call.overridden_params), call.decoding) == ([field], {})


async def test_penalties_go_to_the_engine_by_the_names_of_vllm_and_are_recorded(house: House) -> None:
    claim = await house.claim()
    given = {"presence_penalty": 0.5, "logit_bias": {"5": 10}, "top_k": 3}
    assert (await answered(house, claim, **given))["status"] == 200
    [call] = await calls_of(house, claim)
    assert call.decoding["logits"] == {"presence_penalty": 0.5, "logit_bias": {"5": 10.0}, "top_k": 3}
    params = house.engine.requests[0]["sampling_params"]
    assert (params["presence_penalty"], params["logit_bias"], params["top_k"]) == (0.5, {"5": 10.0}, 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_schema", "json_schema": {"name": "s", "schema": {"not": {}}}}),
        ("guided_regex", "(?=look)ahead"),
        ("guided_grammar", "start: nowhere"),
        ("guided_json", {"enum": ["x" * 1000] * 1000}),
        ("guided_json", '{"items":' * 200 + "{}" + "}" * 200),
        ("guided_json", {"$ref": "#"}),
    ],
)
async def test_a_grammar_that_cannot_be_made_is_refused_by_the_name_of_its_field(
    house: House, field: str, value: Any
) -> None:
    claim = await house.claim()
    reply = await answered(house, claim, **{field: value})
    assert (reply["status"], reply["error"]["param"]) == (400, field)
    assert house.engine.requests == []


async def test_a_retry_after_a_restart_finds_the_answer_of_its_grammar_only(house: House) -> None:
    claim = await house.claim()
    await answered(house, claim, guided_choice=["yes"])
    again = house.gateway()
    body = {"model": "policy", "messages": [{"role": "user", "content": "what is it like?"}]}
    url, retried = f"{path(claim)}/v1/chat/completions", {"x-stainless-retry-count": "1"}
    same = await house.http(again).post(url, json={**body, "guided_choice": ["yes"]}, headers=retried)
    assert (same.status_code, len(house.engine.requests)) == (200, 1)
    other = await house.http(again).post(url, json={**body, "guided_choice": ["no"]}, headers=retried)
    assert (other.status_code, len(house.engine.requests)) == (200, 2)


async def test_a_run_whose_engine_cannot_rebuild_masks_refuses_by_name_or_says_that_nothing_is_learned(
    house: House,
) -> None:
    await house.serve_policy(structured="refuse")
    claim = await house.claim()
    reply = await answered(house, claim, response_format=FORMAT, top_k=3)
    assert (reply["status"], reply["error"]["param"]) == (400, "response_format")
    assert "response_format, top_k" in reply["error"]["message"]
    assert "unsupported_params" in reply["error"]["message"]
    await house.serve_policy(structured="context_only")
    again = house.gateway()
    for form in ({"response_format": FORMAT}, {}):
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], **form}
        await house.http(again).post(f"{path(claim)}/v1/chat/completions", json=body)
    assert [call.decoding.get("untrained") for call in await calls_of(house, claim)] == [True, None]
