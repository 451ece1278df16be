"""Ids and log-probabilities through the gateway are those that the same vLLM server gives to whoever asks it itself."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from vllm_house import VllmHouse

from agentlightning.records import Claim, Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

GREEDY = Sampling(temperature=0.0)
ASKED: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": 8,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}
CHAT: dict[str, Any] = {
    **ASKED,
    "messages": [{"role": "user", "content": "what is the weather?"}],
    "logprobs": True,
    "top_logprobs": 2,
}
TEXT: dict[str, Any] = {**ASKED, "prompt": [17, 45, 300, 12], "logprobs": 2}


async def both(house: VllmHouse, claim: Claim, route: str, asked: dict[str, Any]) -> tuple[str, str]:
    """The server's own response, and the gateway's."""
    async with httpx.AsyncClient(timeout=120) as client:
        own = await client.post(f"{house.server.url}/v1/{route}", json={"model": "tiny", **asked})
    ours = await house.http(claim).post(route, json={"model": "policy", **asked})
    assert (own.status_code, ours.status_code) == (200, 200), f"{own.text}\n{ours.text}"
    return own.text, ours.text


def same_tables(own: list[Any], ours: list[Any]) -> None:
    """The same tokens at every place of the prompt, with the same ranks and texts."""
    assert own[0] is ours[0] is None
    for theirs, mine in zip(own[1:], ours[1:], strict=True):
        assert list(theirs) == list(mine)
        for index, entry in theirs.items():
            assert entry["rank"] == mine[index]["rank"]
            # A part of a character has a text only where vLLM finds the rest of it in the tokens before.
            assert mine[index]["decoded_token"] in ("", entry["decoded_token"])
            assert mine[index]["logprob"] == pytest.approx(entry["logprob"], abs=1e-4)


async def test_chat_has_the_same_ids_names_and_prompt_logprobs(vllm_house: VllmHouse) -> None:
    claim = await vllm_house.claim(sampling=GREEDY)
    answers = await both(vllm_house, claim, "chat/completions", {**CHAT, "prompt_logprobs": 2})
    own, ours = map(json.loads, answers)
    assert ours["prompt_token_ids"] == own["prompt_token_ids"]
    assert ours["choices"][0]["token_ids"] == own["choices"][0]["token_ids"]
    same_tables(own["prompt_logprobs"], ours["prompt_logprobs"])
    listed = [[entry["token"] for entry in body["choices"][0]["logprobs"]["content"]] for body in (own, ours)]
    assert listed[0] == listed[1]
    tops = [
        [{other["token"] for other in entry["top_logprobs"]} for entry in body["choices"][0]["logprobs"]["content"]]
        for body in (own, ours)
    ]
    assert tops[0] == tops[1]


async def test_completions_have_the_same_ids_names_and_prompt_logprobs(vllm_house: VllmHouse) -> None:
    claim = await vllm_house.claim(sampling=GREEDY)
    own, ours = map(json.loads, await both(vllm_house, claim, "completions", {**TEXT, "prompt_logprobs": 0}))
    theirs, mine = own["choices"][0], ours["choices"][0]
    for name in ("prompt_token_ids", "token_ids"):
        assert mine[name] == theirs[name]
    assert mine["logprobs"]["tokens"] == theirs["logprobs"]["tokens"]
    same_tables(theirs["prompt_logprobs"], mine["prompt_logprobs"])


@pytest.mark.parametrize(("route", "asked"), [("chat/completions", CHAT), ("completions", TEXT)])
async def test_streams_have_the_same_ids(vllm_house: VllmHouse, route: str, asked: dict[str, Any]) -> None:
    claim = await vllm_house.claim(sampling=GREEDY)
    own, ours = await both(vllm_house, claim, route, {**asked, "stream": True})
    assert joined(ours) == joined(own)


def joined(events: str) -> tuple[list[int], list[int]]:
    """Ids of the prompt by the first chunk, and of the completion by all of them."""
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    prompt = chunks[0].get("prompt_token_ids") or choices[0]["prompt_token_ids"]
    return prompt, [index for choice in choices for index in choice.get("token_ids") or ()]


async def test_tokens_are_sampled_and_scored_as_the_server_does_it(vllm_house: VllmHouse) -> None:
    claim = await vllm_house.claim(sampling=GREEDY)
    http = vllm_house.http(claim)
    sampled = (await http.post("tokens/generate", json={"prompt_ids": TEXT["prompt"], "max_tokens": 8})).json()
    [choice] = sampled["choices"]
    ids = [*TEXT["prompt"], *choice["token_ids"]]
    scored = (await http.post("tokens/logprobs", json={"token_ids": ids})).json()["logprobs"]
    assert scored[0] is None
    assert scored[len(TEXT["prompt"]) :] == pytest.approx(choice["logprobs"], abs=1e-4)
    (call,) = await vllm_house.calls(claim)
    assert (call.suffix_ids, call.sampled_ids) == (TEXT["prompt"], choice["token_ids"])
