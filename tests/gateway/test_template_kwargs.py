"""`chat_template_kwargs`: the template's own settings are part of the prompt, and of what a later prompt continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_house import House, path
from toy_model import TEMPLATE, write_tokenizer

from agentlightning.records import Claim

THOUGHTLESS = "<think>\n\n</think>\n\n"
SWITCHED = TEMPLATE.removesuffix("{% endif %}") + (
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '" + THOUGHTLESS + "' }}{% endif %}{% endif %}"
)
"""A template with Qwen's switch."""
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "responses": {"input": "hi"},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}


@pytest.fixture
async def switched(house: House, tmp_path: Path) -> House:
    await house.serve_policy(tokenizer=str(write_tokenizer(tmp_path / "switched", SWITCHED)))
    return house


async def post(house: House, claim: Claim, route: str, **body: Any) -> httpx.Response:
    return await house.http().post(f"{path(claim)}/v1/{route}", json={"model": "policy", **body})


def prompt(house: House) -> str:
    return house.renderer.decode(house.engine.requests[-1]["token_ids"], special=True)


@pytest.mark.parametrize("route", BODIES)
async def test_the_template_gets_them_and_the_root_records_them(switched: House, route: str) -> None:
    claim = await switched.claim()
    given = {"enable_thinking": False, "made_up": 1}
    answer = await post(switched, claim, route, chat_template_kwargs=given, **BODIES[route])
    assert answer.status_code == 200
    assert prompt(switched).endswith(f"<|im_start|>assistant\n{THOUGHTLESS}")
    [call] = await switched.store.calls([claim.rollout.id])
    assert call.request_fields["chat_template_kwargs"] == {"enable_thinking": False}
    assert call.overridden_params == {"chat_template_kwargs": {"made_up": 1}}


async def test_equal_ones_continue_exactly_also_at_another_gateway_and_others_fork(switched: House) -> None:
    claim = await switched.claim()
    switched.say("Sunny.")
    messages: list[dict[str, Any]] = []

    async def turn(thinks: bool | None) -> None:
        kwargs = {} if thinks is None else {"chat_template_kwargs": {"enable_thinking": thinks}}
        messages.append({"role": "user", "content": f"turn {len(messages)}"})
        answer = await post(switched, claim, "chat/completions", messages=messages, **kwargs)
        messages.append(answer.json()["choices"][0]["message"])

    await turn(True)
    await turn(True)
    switched.app = switched.gateway()
    await turn(True)
    await turn(False)
    await turn(None)
    calls = await switched.store.calls([claim.rollout.id])
    assert [call.continuation for call in calls] == [
        "first_turn",
        "continued",
        "continued",
        "system_or_tools_changed",
        "system_or_tools_changed",
    ]
    assert [call.request_fields for call in calls] == [
        {"chat_template_kwargs": {"enable_thinking": True}},
        {},
        {},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {},
    ]


async def test_a_field_of_the_request_may_stand_for_the_variable(switched: House) -> None:
    claim = await switched.claim()
    await post(switched, claim, "chat/completions", enable_thinking=False, **BODIES["chat/completions"])
    assert prompt(switched).endswith(THOUGHTLESS)
