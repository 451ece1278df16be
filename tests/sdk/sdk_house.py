"""A real gateway on loopback with a scripted thinking model behind it, for SDKs to talk to."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "gateway"))  # its scripted engine and its toy model

from scripted_engine import ScriptedEngine
from toy_model import write_tokenizer

import build
from agentlightning import AgentLightningServer
from agentlightning.records import Call, NewRollout, WorkerStatus
from agentlightning.rendering.renderer import Renderer
from agentlightning.store.client import LightningStoreClient

END = 2

TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}\
{{- 'Call with <tool_call>{"name": …, "arguments": …}</tool_call><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
    {{- message.content }}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

QUESTION, RESULT, THANKS = "What is the weather in Paris?", "sunny, 21 degrees", "thanks!"
THOUGHT = "They ask for Paris."
ARGUMENTS = {"city": "Paris", "days": [1, 2, 3]}
ANSWER, WELCOME = "It is sunny in Paris, at 21 degrees.", "You are welcome."
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'

CONVERSATION = [
    {"text": "", "reasoning": THOUGHT, "tools": [{"name": "weather", "arguments": ARGUMENTS}]},
    {"text": ANSWER, "reasoning": "", "tools": []},
    {"text": WELCOME, "reasoning": "", "tools": []},
]
"""What every SDK must have heard: turn by turn."""

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}}


@dataclass
class Place:
    """One attempt, as an agent knows it."""

    base_url: str
    anthropic_base_url: str
    key: str
    rollout_id: str


@dataclass
class SdkHouse:
    """The gateway, its store and its engine."""

    url: str
    engine: ScriptedEngine
    store: LightningStoreClient
    renderer: Renderer
    run_id: str
    claimed: int = 0

    async def place(self, lease_s: float = 600.0) -> Place:
        """A new attempt."""
        self.claimed += 1
        rollout = NewRollout(run_id=self.run_id, task={}, group_id=str(self.claimed), replica=0)
        await self.store.enqueue([rollout])
        worker = WorkerStatus(id="w", run_id=self.run_id, host="h", pid=1, running=0, seen_ns=0)
        [claim] = await self.store.claim(worker, lease_s=lease_s)
        root = f"{self.url}/r/{claim.rollout.id}/{claim.lease.attempt}"
        return Place(f"{root}/v1", root, claim.key, claim.rollout.id)

    async def calls(self, place: Place) -> list[Call]:
        """What was recorded of an attempt."""
        return await self.store.calls([place.rollout_id])

    def answer(self, request: dict[str, Any]) -> list[int]:
        """Speaks as the prompt deserves."""
        prompt = self.renderer.decode(request["token_ids"], special=True)
        if prompt.endswith("the weather is"):
            return self.renderer.encode(" sunny, they say.")
        last = prompt.rsplit("<|im_start|>", 2)[-2]
        text = f"<think>\n{THOUGHT}\n</think>\n\n{CALL}"
        if THANKS in last:
            text = WELCOME
        elif RESULT in last:
            text = ANSWER
        return [*self.renderer.encode(text), END]


@asynccontextmanager
async def open_house(folder: Path) -> AsyncIterator[SdkHouse]:
    """Everything started, and ended with the block."""
    renderer = Renderer(write_tokenizer(folder / "tokenizer", TEMPLATE))
    engine = await ScriptedEngine(lambda _: [], tokenizer=folder / "tokenizer").start()
    with AgentLightningServer("memory://") as server:
        async with LightningStoreClient(server.url) as store:
            run = await store.create_run("sdks", {})
            await store.put_resources([build.policy(run.id, engine.url, folder / "tokenizer")])
            house = SdkHouse(server.url, engine, store, renderer, run.id)
            engine.answers = house.answer
            yield house
    await engine.close()


def check_record(calls: list[Call], turns: int = 3) -> None:
    """Every turn was recorded once and continues the one before, token for token."""
    assert [call.continuation for call in calls] == ["first_turn", *["continued"] * (turns - 1)]
    assert [call.parent_id for call in calls] == [None, *(call.id for call in calls[:-1])]
