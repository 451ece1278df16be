"""AIR over whole attempts: agents of every protocol and any language, real processes, and what the command line says.

Everything is real but the model, which asks for the weather in Paris until a tool has told it, and then says so.
"""

from __future__ import annotations

import sys

import pytest
from command_line import Folder
from house import House, open_house

from agentlightning.records import JSON

ASKS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
RULES: JSON = {
    "tool_error": -0.5,
    "tool_success": 0.25,
    "valid_arguments": 0.125,
    "retry": {"weight": -0.0625},
    "calls": {"weight": -1.0, "budget": 2},
}
EXPECTED = {
    ("air.tool_error", 0): -0.5,
    ("air.valid_arguments", 0): 0.125,
    ("air.tool_success", 1): 0.25,
    ("air.valid_arguments", 1): 0.125,
    ("air.retry", 1): -0.0625,
    ("air.calls", 2): -1.0,
}
"""By rule and call: the tool fails, the same is asked for again and succeeds, and the third call answers."""

PARAMETERS = """
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
RESULTS = ["Error: the station is down", "sunny"]
"""

AGENTS = {
    "chat": """
from openai import AsyncOpenAI

async def solve(task, llm):
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, http_client=llm.http_client)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
    messages = [{"role": "user", "content": "what is the weather in Paris?"}]
    for result in [*RESULTS, None]:
        reply = await client.chat.completions.create(model=llm.model, messages=messages, tools=tools)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 1.0
""",
    "messages": """
from anthropic import AsyncAnthropic

async def solve(task, llm):
    client = AsyncAnthropic(base_url=llm.anthropic_base_url, api_key=llm.api_key)
    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    messages = [{"role": "user", "content": "what is the weather in Paris?"}]
    for result in [*RESULTS, None]:
        reply = await client.messages.create(model=llm.model, messages=messages, tools=tools, max_tokens=99)
        messages.append({"role": "assistant", "content": [part.model_dump() for part in reply.content]})
        answers = [
            {"type": "tool_result", "tool_use_id": part.id, "content": "down" if "Error" in result else result,
             "is_error": "Error" in result}
            for part in reply.content if part.type == "tool_use"
        ]
        messages.append({"role": "user", "content": answers})
    return 1.0
""",
    "program": """
import json, os, urllib.request

def ask(messages):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps({"model": "m", "messages": messages, "tools": tools}).encode(),
        headers={"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    return json.loads(urllib.request.urlopen(request).read())["choices"][0]["message"]

messages = [{"role": "user", "content": "what is the weather in Paris?"}]
for result in [*RESULTS, None]:
    messages.append(ask(messages))
    for call in messages[-1].get("tool_calls") or []:
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
print(json.dumps({"reward": 1.0}))
""",
}


def says(prompt: str) -> str:
    """The model: it goes on asking until it has heard of the sun."""
    return "It is sunny." if "sunny" in prompt.rpartition("weather in")[2] else ASKS


async def earned(house: House, rollout_id: str) -> dict[tuple[str, int], float]:
    """What AIR gave, by rule and call."""
    places = {call.id: place for place, call in enumerate(await house.store.calls([rollout_id]))}
    rewards = [reward for reward in await house.store.rewards([rollout_id]) if reward.source == "air"]
    return {(reward.name, places[reward.call_id or ""]): reward.value for reward in rewards}


@pytest.mark.slow
async def test_the_rules_see_what_tools_gave_whatever_protocol_and_language_the_agent_speaks(folder: Folder) -> None:
    for name, source in AGENTS.items():
        folder.write(f"{name}.py", PARAMETERS + source)
    agents = ("chat.py:solve", "messages.py:solve", f"{sys.executable} program.py")
    async with open_house(folder, {"air": {"rules": RULES}}, says) as house:
        for done, agent in enumerate(agents):
            [rollout] = await house.rollouts(agent, {"n": done}, before=done)
            assert (rollout.error, rollout.reward) == (None, 1.0)
            assert await earned(house, rollout.id) == EXPECTED
