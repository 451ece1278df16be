"""/tokenize and /detokenize answer as vLLM's do, with the ids that calls read."""

from __future__ import annotations

from typing import Any

from gateway_house import House, path

from agentlightning.records import Claim

QUESTION: Any = {"role": "user", "content": "hi"}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


async def ask(house: House, claim: Claim, route: str, **body: Any) -> dict[str, Any]:
    answer = await house.http().post(f"{path(claim)}/{route}", json={"model": "policy", **body})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def test_messages_have_the_ids_that_a_call_reads(house: House) -> None:
    claim = await house.claim()
    asked: list[Any] = [QUESTION]
    for route in ("tokenize", "v1/tokenize"):
        told = await ask(house, claim, route, messages=asked, tools=[TOOL], return_token_strs=True)
        await ask(house, claim, "v1/chat/completions", messages=asked, tools=[TOOL])
        read = house.engine.requests[-1]["token_ids"]
        assert (told["tokens"], told["count"], told["max_model_len"]) == (read, len(read), 4096)
        assert told["token_strs"][0] == "<|im_start|>"
        asked = [QUESTION, {"role": "assistant", "content": "It is sunny."}, {"role": "user", "content": "Sure?"}]
    calls = await house.store.calls([claim.rollout.id])
    assert [call.parent_id for call in calls] == [None, calls[0].id]  # what was counted took no place in the graph


async def test_prompts_and_ids_go_there_and_back(house: House) -> None:
    claim = await house.claim()
    text = "<|im_start|>user\nIt is"
    told = await ask(house, claim, "tokenize", prompt=text)
    assert (told["tokens"], told["token_strs"]) == (house.renderer.encode(text), None)
    assert await ask(house, claim, "detokenize", tokens=told["tokens"]) == {"prompt": text}
    assert await ask(house, claim, "v1/detokenize", tokens=[]) == {"prompt": ""}
    assert (await ask(house, claim, "tokenize", prompt=""))["count"] == 0
    assert await house.store.calls([claim.rollout.id]) == house.engine.requests == []


async def test_a_conversation_is_left_open_where_the_request_says_so(house: House) -> None:
    claim = await house.claim()
    closed = await ask(house, claim, "tokenize", messages=[QUESTION], add_generation_prompt=False)
    assert house.renderer.decode(closed["tokens"], special=True) == "<|im_start|>user\nhi<|im_end|>\n"
    begun = [QUESTION, {"role": "assistant", "content": "It"}]
    told = await ask(house, claim, "tokenize", messages=begun, continue_final_message=True)
    assert house.renderer.decode(told["tokens"], special=True).endswith("assistant\nIt")


async def test_what_has_no_ids_of_a_call_is_refused_by_name(house: House, claim: Claim) -> None:
    variables = {"messages": []}
    for route, body, param in (
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": [QUESTION]}, "prompt"),
        ("tokenize", {"prompt": "a", "add_special_tokens": True}, "add_special_tokens"),
        ("tokenize", {"messages": [QUESTION], "chat_template": "x"}, "chat_template"),
        ("tokenize", {"messages": [QUESTION], "chat_template_kwargs": variables}, "chat_template_kwargs.messages"),
        ("tokenize", {"prompt": "a", "model": "gpt-4o-mini"}, "model"),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": [1 << 30]}, "tokens"),
    ):
        answer = await house.http().post(f"{path(claim)}/v1/{route}", json={"model": "policy", **body})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_who_has_no_key_gets_no_tokens(house: House) -> None:
    where = path(await house.claim())
    answer = await house.http(adds_keys=False).post(f"{where}/tokenize", json={"prompt": "hi"})
    assert answer.status_code == 401
