"""Rollouts that finish without one recorded model call: each is named, with its likely cause, where a person looks.

Everything is real but the model: a server, `agl worker` as a process, agents as users write them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from chat_double import chat_double
from house import ANSWER, House

from agentlightning.store.gateway_events import NO_CALLS

PROGRAM = """
import json, os, sys, urllib.error, urllib.request

server = os.environ["OPENAI_BASE_URL"].partition("/r/")[0]
request = urllib.request.Request(
    sys.argv[1].format(server=server, base=os.environ["OPENAI_BASE_URL"]) + "/chat/completions",
    data=json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode(),
    headers={"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
try:
    urllib.request.urlopen(request).read()
except urllib.error.HTTPError as error:
    print("no answer:", error.code)
print(json.dumps({"reward": 1.0}))
"""


@pytest.fixture
def proxy() -> Iterator[str]:
    """It answers any chat request, for any host: what a proxy that knows a provider does."""
    with chat_double(lambda _: "from elsewhere") as url:
        yield url


async def test_a_function_agent_that_never_calls_is_named_and_its_sibling_that_does_is_not(house: House) -> None:
    house.folder.write(
        "agent.py",
        "from openai import AsyncOpenAI\n"
        "async def solve(task, llm):\n"
        "    if task['calls']:\n"
        "        client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, http_client=llm.http_client)\n"
        "        messages = [{'role': 'user', 'content': 'hi'}]\n"
        "        reply = await client.chat.completions.create(model=llm.model, messages=messages)\n"
        f"        assert reply.choices[0].message.content == {ANSWER!r}\n"
        "    return 1.0\n",
    )
    silent, talkative = await house.rollouts("agent.py:solve", {"calls": False}, {"calls": True})
    assert silent.warning == f"{NO_CALLS}: the agent did not use the base URL it was given"
    assert (talkative.warning, talkative.calls) == (None, 1)
    assert silent.warning in await house.agl("rollouts", "list", house.run_id)
    assert silent.warning in await house.agl("rollouts", "show", silent.id)


@pytest.mark.parametrize("base", ["{base}/v2", "{server}/v2"])
async def test_a_program_that_asks_for_a_wrong_path_is_named_with_that_path(house: House, base: str) -> None:
    house.folder.write("agent.py", PROGRAM)
    (rollout,) = await house.rollouts(f"{sys.executable} agent.py {base}", {})
    assert rollout.warning is not None
    path = base.format(server="", base=f"/r/{rollout.id}/1/v1") + "/chat/completions"
    assert rollout.warning.startswith(f"{NO_CALLS}: the agent asked for {path}, which is no route")


async def test_a_proxy_variable_that_diverts_a_program_is_named(house: House, proxy: str) -> None:
    house.folder.write("agent.py", PROGRAM)
    (rollout,) = await house.rollouts(f"{sys.executable} agent.py {{base}}", {}, http_proxy=proxy)
    assert rollout.warning is not None
    assert rollout.warning.startswith(f"{NO_CALLS}: http_proxy is set where the worker runs and NO_PROXY does not name")


async def test_a_program_that_ends_because_its_call_was_refused_is_refused_and_named_by_the_field(house: House) -> None:
    program = PROGRAM.replace('"hi"}]}', '"hi"}], "top_a": 0.5}').replace(
        "except urllib.error.HTTPError", "except ZeroDivisionError"
    )
    house.folder.write("agent.py", program)
    (rollout,) = await house.rollouts(f"{sys.executable} agent.py {{base}}", {})
    assert (rollout.state, rollout.refused) == ("failed", True)
    assert rollout.warning == f"{NO_CALLS}: 1 call refused: top_a 1"
    assert "HTTP Error 400" in (rollout.error or "")
    listed = await house.agl("rollouts", "list", house.run_id)
    assert "refused" in listed
    assert "top_a" in listed
